"""GCN and GraphSAGE on directed edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.nn import GCNConv, SAGEConv

from flower_fgl.nn import GraphInput, build_model
from flower_fgl.nn.stacked import can_stack
from tests.nn.test_gine import random_graph, simple

SIZES: dict[str, Any] = {
    "in_channels": 4,
    "hidden_channels": 5,
    "num_outputs": 3,
    "num_layers": 2,
    "dropout": 0.0,
}
X, INDEX, EDGE_X = random_graph()
GRAPH = GraphInput(X, simple(INDEX)).with_messages(INDEX, EDGE_X)


def by_pyg(
    kind: Any, layer: Any, h: torch.Tensor, ends: torch.Tensor, **off: bool
) -> Any:
    """Run PyG's own layer with the weights of ours."""
    conv = kind(h.shape[1], layer.out_channels, **off)
    conv.load_state_dict(layer.state_dict())
    return conv(h, ends)


@pytest.mark.parametrize(("name", "kind"), [("gcn", GCNConv), ("graphsage", SAGEConv)])
def test_separate_adds_the_layer_of_the_reversed_graph(name: str, kind: Any) -> None:
    model: Any = build_model(name, **SIZES, messages="separate:0").eval()
    off = {"bias": False} | ({"root_weight": False} if name == "graphsage" else {})
    h = X
    for layer in (model.encoder[0], model.classifier):
        h = h.relu() if layer is model.classifier else h
        ahead = by_pyg(kind, layer["ahead"], h, INDEX)
        h = ahead + by_pyg(kind, layer["back"], h, INDEX.flip(0), **off)
    torch.testing.assert_close(model(GRAPH), h)


@pytest.mark.parametrize(("name", "kind"), [("gcn", GCNConv), ("graphsage", SAGEConv)])
def test_forward_is_the_layer_of_the_directed_graph(name: str, kind: Any) -> None:
    model: Any = build_model(name, **SIZES, messages="forward:0").eval()
    h = by_pyg(kind, model.encoder[0], X, INDEX).relu()
    expected = by_pyg(kind, model.classifier, h, INDEX)
    torch.testing.assert_close(model(GRAPH), expected)
    assert not torch.allclose(model(GRAPH), model(GraphInput(X, INDEX).with_messages(
        INDEX.flip(0), EDGE_X)))  # fmt: skip


@pytest.mark.parametrize("name", ["gcn", "graphsage"])
def test_both_is_the_undirected_network_bit_by_bit(name: str) -> None:
    torch.manual_seed(0)
    plain = build_model(name, **SIZES).eval()
    torch.manual_seed(0)
    both = build_model(name, **SIZES, messages="both:2").eval()
    assert torch.equal(both(GRAPH), plain(GraphInput(X, simple(INDEX))))
    assert (both.reach, can_stack(both)) == (2, True)


@pytest.mark.parametrize("name", ["gcn", "graphsage"])
def test_directed_networks_read_whole_graphs_one_by_one(name: str) -> None:
    model = build_model(name, **SIZES, messages="separate:0")
    assert (model.reach, can_stack(model)) == (None, False)


@pytest.mark.parametrize("name", ["gcn", "graphsage"])
def test_graphs_of_a_batch_give_the_same_logits_as_alone(name: str) -> None:
    model = build_model(name, **SIZES, messages="separate:0", readout=True).eval()
    x, index = torch.cat([X, 2 * X]), torch.cat([INDEX, INDEX.flip(0) + 6], dim=1)
    batch = torch.arange(2).repeat_interleave(6)
    whole = GraphInput(x, simple(index), batch=batch).with_messages(
        index, torch.zeros(60, 0)
    )
    for number in range(2):
        part = whole.select(torch.tensor([number]))
        torch.testing.assert_close(model(part), model(whole)[[number]])
