"""Small graphs with every edge case of a client's graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flower_fgl.nn import GraphInput
from tests.support.sparse import sparse

MakeGraph = Callable[..., GraphInput]


@pytest.fixture
def make_graph() -> MakeGraph:
    def make(
        num_nodes: int = 12,
        num_edges: int = 20,
        width: int = 9,
        *,
        is_sparse: bool = False,
        is_directed: bool = False,
        num_isolated: int = 2,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> GraphInput:
        g = torch.Generator().manual_seed(seed)
        linked = num_nodes - num_isolated
        edges = torch.randint(0, linked, (2, num_edges), generator=g)
        if not is_directed:
            edges = torch.cat([edges, edges.flip(0)], dim=1)
            edges = torch.unique(edges[:, edges[0] != edges[1]], dim=1)
        x = torch.rand(num_nodes, width, generator=g, dtype=dtype) - 0.3
        x = x * (torch.rand(x.shape, generator=g) < 0.5)
        return GraphInput(sparse(x) if is_sparse else x, edges)

    return make
