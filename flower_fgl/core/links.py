"""Names that settings, data and scores of pairs of nodes share; imports no torch."""

from __future__ import annotations

import math

__all__ = ["EDGE", "EDGE_SPLIT", "LINK", "LINK_CLASSES", "LINK_SPLIT", "MIN_EDGES"]
__all__ += ["read_time_cuts"]

LINK = "link"
"""Value of ``setting`` for link prediction."""
LINK_CLASSES = ("no link", "link")
"""Classes of pairs of nodes."""
LINK_SPLIT = "85/5/10"
"""Default split of each client's edges in percent: training, validation, test."""
EDGE = "edge"
"""Value of ``setting`` for the classification of edges."""
EDGE_SPLIT = "60/20/20"
"""Default split of each client's labelled edges in percent."""
MIN_EDGES = 10
"""Fewest edges of a graph that can be split: undirected ones for link prediction, labelled
ones to classify edges."""


def read_time_cuts(text: str) -> tuple[float, float] | None:
    """Return the two times of ``time-cuts``, ``None`` if it is empty.

    Raises a ValueError unless it holds two finite numbers in ascending order.
    """
    if not text.strip():
        return None
    first, second = map(float, text.split(","))
    if not (math.isfinite(first) and math.isfinite(second) and first < second):
        raise ValueError
    return first, second
