from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flower_fgl.algorithms.fedsageplus import MendedGraph, hide_nodes
from flower_fgl.core.model_spec import TYPED
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.nn import MODELS, GraphInput, build_model
from flower_fgl.nn.models import backbone_class
from tests.support.sparse import sparse


@pytest.mark.parametrize("is_sparse", [False, True])
def test_hiding_a_node_records_the_nodes_that_lost_it(
    toy: NodeDataset, is_sparse: bool
) -> None:
    # node 2 is a neighbour of 0, 1 and 3; of the seven edges three go
    x = sparse(toy.x) if is_sparse else toy.x
    found = hide_nodes(GraphInput(x, toy.edge_index), torch.arange(6) == 2)
    assert found.kept.tolist() == [0, 1, 3, 4, 5]
    assert found.counts.tolist() == [1, 1, 1, 0, 0]
    assert found.centres.tolist() == [0, 1, 2]
    assert found.lost.to_dense().tolist() == [[1], [1], [1]]
    assert torch.equal(found.hidden, toy.x[2:3])
    edges = {(0, 1), (2, 3), (2, 4), (3, 4)}
    both = edges | {(v, u) for u, v in edges}
    assert set(map(tuple, found.inputs.edge_index.T.tolist())) == both
    kept = found.inputs.x.to_dense() if is_sparse else found.inputs.x
    assert torch.equal(kept, toy.x[found.kept])


def test_a_node_may_lose_several_neighbours(toy: NodeDataset) -> None:
    is_hidden = (torch.arange(6) == 4) | (torch.arange(6) == 5)
    found = hide_nodes(GraphInput(toy.x, toy.edge_index), is_hidden)
    assert found.counts.tolist() == [0, 0, 0, 2]
    assert found.lost.to_dense().tolist() == [[1, 1]]
    assert found.wanted(5).tolist() == [2]
    assert found.wanted(1).tolist() == [1]


def test_without_edges_no_node_loses_a_neighbour(toy: NodeDataset) -> None:
    graph = GraphInput(sparse(toy.x), torch.zeros((2, 0), dtype=torch.int64))
    found = hide_nodes(graph, torch.arange(6) < 2)
    assert found.counts.tolist() == [0, 0, 0, 0]
    assert found.centres.numel() == 0
    assert found.hidden.shape == (0, 6)
    assert found.wanted(5).numel() == 0


@pytest.mark.parametrize("name", sorted({*MODELS} - {"gine", *TYPED}))
@pytest.mark.parametrize("is_sparse", [False, True])
def test_backbones_take_a_mended_graph_as_one_with_more_nodes(
    toy: NodeDataset, name: str, is_sparse: bool
) -> None:
    torch.manual_seed(0)
    model = build_model(
        name,
        in_channels=6,
        hidden_channels=4,
        num_classes=2,
        num_layers=2,
        dropout=0.0,
    ).eval()
    owner = torch.tensor([0, 0, 5])
    generated = torch.randn(3, 6)
    new = torch.tensor([[0, 0, 5, 6, 7, 8], [6, 7, 8, 0, 0, 5]])
    edges = torch.cat([toy.edge_index, new], dim=1)
    plain = model(GraphInput(torch.cat([toy.x, generated]), edges))
    x = sparse(toy.x) if is_sparse else toy.x
    mended = MendedGraph(GraphInput(x, toy.edge_index), owner, generated)
    torch.testing.assert_close(model(mended), plain)


def test_a_gradient_reaches_the_generated_nodes(toy: NodeDataset) -> None:
    model = build_model(
        "graphsage",
        in_channels=6,
        hidden_channels=4,
        num_classes=2,
        num_layers=2,
        dropout=0.0,
    )
    graph = GraphInput(sparse(toy.x), toy.edge_index)
    mended = MendedGraph(graph, torch.tensor([3]), torch.zeros(1, 0))
    generated = torch.ones(1, 6, requires_grad=True)
    model(mended.with_generated(generated))[3].sum().backward()
    assert generated.grad is not None
    assert generated.grad.abs().sum() > 0


def test_without_generated_nodes_the_graph_is_unchanged(toy: NodeDataset) -> None:
    model = build_model(
        "graphsage",
        in_channels=6,
        hidden_channels=4,
        num_classes=2,
        num_layers=2,
        dropout=0.0,
    ).eval()
    graph = GraphInput(toy.x, toy.edge_index)
    nobody = torch.zeros(0, dtype=torch.int64)
    mended = MendedGraph(graph, nobody, torch.zeros(0, 6))
    torch.testing.assert_close(model(mended), model(graph))


class Summing(nn.Module):
    """Map the features and add the neighbours' sums, as a module of another library."""

    def __init__(self, *, in_channels: int, hidden_channels: int, **_: object) -> None:
        super().__init__()
        self.map = nn.Linear(in_channels, hidden_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.map(x)
        source, target = edge_index
        found: Tensor = h.index_add(0, target, h[source])
        return found


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_torch_module_takes_a_mended_graph_as_one_with_more_nodes(
    toy: NodeDataset, is_sparse: bool
) -> None:
    model = backbone_class("summing", Summing)(
        in_channels=6, hidden_channels=4, num_classes=2, num_layers=1, dropout=0.0
    )
    owner, generated = torch.tensor([0, 0, 5]), torch.randn(3, 6)
    new = torch.tensor([[0, 0, 5, 6, 7, 8], [6, 7, 8, 0, 0, 5]])
    whole = torch.cat([toy.x, generated])
    plain = GraphInput(whole, torch.cat([toy.edge_index, new], dim=1))
    x = sparse(toy.x) if is_sparse else toy.x
    mended = MendedGraph(GraphInput(x, toy.edge_index), owner, generated)
    assert torch.equal(mended.dense_features(), whole)
    torch.testing.assert_close(model(mended), model(plain))
    # other generated nodes are not hidden by a cache, and get a gradient
    others = torch.randn(3, 6, requires_grad=True)
    other = mended.with_generated(others)
    assert torch.equal(other.dense_features()[6:], others)
    model(other)[0].sum().backward()
    assert others.grad is not None
    assert others.grad.abs().sum(dim=1).gt(0).tolist() == [True, True, False]
