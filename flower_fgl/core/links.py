"""Names that settings, data and scores of link prediction share; imports no torch."""

from __future__ import annotations

__all__ = ["LINK", "LINK_CLASSES", "LINK_SPLIT", "MIN_EDGES"]

LINK = "link"
"""Value of ``setting`` for link prediction."""
LINK_CLASSES = ("no link", "link")
"""Classes of pairs of nodes."""
LINK_SPLIT = "85/5/10"
"""Default split of each client's edges in percent: training, validation, test."""
MIN_EDGES = 10
"""Fewest undirected edges of a graph that can be split."""
