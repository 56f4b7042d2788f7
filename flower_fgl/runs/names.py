"""Names of run folders."""

from __future__ import annotations

import re

from flower_fgl.core.options import Scalar

__all__ = ["in_folder_name"]


def in_folder_name(value: Scalar) -> str:
    """Write a case's name or a value of the grid as part of a folder's name."""
    text = "".join(c if c.isalnum() or c in ".+-" else "_" for c in str(value))
    return re.sub("_+", "_", text).strip("_")
