"""Skipping of tests whose published dataset is not available."""

from __future__ import annotations

from pathlib import Path

import pytest

from flower_fgl.datasets.sources.registry import SOURCES


def skip_unless_whole(dataset: str, real_data: Path) -> None:
    """Skip a test if some files of a dataset are missing."""
    for layout in SOURCES[dataset].layouts:
        folder = real_data / layout.folder
        if not layout.is_partial and all((folder / f).exists() for f in layout.files):
            return
    pytest.skip(f"FLOWER_FGL_DATA does not contain all files of {dataset}")
