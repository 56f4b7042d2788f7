"""Shared fixtures: a six-node toy graph, a seeded generator, the folder of real data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from flower_fgl.datasets.client_graph import NodeDataset


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def toy() -> NodeDataset:
    """Two triangles joined by one edge, one class each."""
    pairs = [(0, 1), (0, 2), (1, 2), (2, 3), (3, 4), (3, 5), (4, 5)]
    both = sorted(pairs + [(v, u) for u, v in pairs])
    return NodeDataset(
        name="toy",
        x=torch.eye(6),
        edge_index=torch.tensor(both).T.contiguous(),
        y=torch.tensor([0, 0, 0, 1, 1, 1]),
        class_names=("left", "right"),
    )


@pytest.fixture(scope="session")
def real_data() -> Path:
    folder = os.environ.get("FLOWER_FGL_DATA")
    if not folder:
        pytest.skip("FLOWER_FGL_DATA is not set: no real data at hand")
    return Path(folder).resolve()
