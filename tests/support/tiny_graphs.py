"""Generator of a small dataset of graphs in the raw layout of TU Dortmund."""

from __future__ import annotations

from flower_fgl.testing.case import NAME, write_tiny

__all__ = ["NAME", "write_tiny"]
