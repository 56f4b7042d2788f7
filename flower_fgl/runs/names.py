"""Names of run folders."""

from __future__ import annotations

import re

from flower_fgl.core.options import Scalar

__all__ = ["in_folder_name"]


def in_folder_name(value: Scalar) -> str:
    """Convert a case name or grid value to text that is safe in a folder name."""
    text = "".join(c if c.isalnum() or c in ".+-" else "_" for c in str(value))
    return re.sub("_+", "_", text).strip("_")
