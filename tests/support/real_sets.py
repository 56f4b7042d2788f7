"""Which published data sets are at hand, whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from flower_fgl.datasets.sources.registry import SOURCES


def skip_unless_whole(dataset: str, real_data: Path) -> None:
    """Skip a test where a data set's files, or some of them, are absent."""
    for layout in SOURCES[dataset].layouts:
        folder = real_data / layout.folder
        if not layout.is_partial and all((folder / f).exists() for f in layout.files):
            return
    pytest.skip(f"FLOWER_FGL_DATA holds no whole {dataset}")
