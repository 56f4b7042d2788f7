"""Parameters of layers against PyG's, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric import nn as pyg
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from flower_fgl.nn import layers, topology


def mlp() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)
    )


PAIRS: dict[str, tuple[Any, Any]] = {
    "GCN": (lambda: layers.GCNConv(7, 5), lambda: pyg.GCNConv(7, 5)),
    "GCN without bias": (
        lambda: layers.GCNConv(7, 5, bias=False),
        lambda: pyg.GCNConv(7, 5, bias=False),
    ),
    "SAGE": (lambda: layers.SAGEConv(7, 5), lambda: pyg.SAGEConv(7, 5)),
    "SAGE without root": (
        lambda: layers.SAGEConv(7, 5, bias=False, root_weight=False),
        lambda: pyg.SAGEConv(7, 5, bias=False, root_weight=False),
    ),
    "GAT": (
        lambda: layers.GATConv(7, 5, heads=3),
        lambda: pyg.GATConv(7, 5, heads=3),
    ),
    "GIN": (lambda: layers.GINConv(mlp()), lambda: pyg.GINConv(mlp())),
    "GCN2": (
        lambda: layers.GCN2Conv(7, 0.1, 0.5, layer=2),
        lambda: pyg.GCN2Conv(7, 0.1, 0.5, layer=2),
    ),
    "SG": (lambda: layers.SGConv(7, 5), lambda: pyg.SGConv(7, 5, K=2)),
    "SSG": (lambda: layers.SGConv(7, 5), lambda: pyg.SSGConv(7, 5, alpha=0.1, K=2)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_layer_draws_the_parameters_of_pyg(name: str) -> None:
    ours, theirs = PAIRS[name]
    torch.manual_seed(3)
    own = ours()
    after = torch.rand(())
    torch.manual_seed(3)
    other = theirs()
    assert torch.equal(after, torch.rand(()))  # as many numbers are drawn
    expected = dict(other.state_dict())
    expected.pop("eps", None)  # 0, and no part of the state of ours
    assert list(own.state_dict()) == list(expected)
    for key, value in own.state_dict().items():
        assert torch.equal(value, expected[key])
    torch.manual_seed(4)
    own.reset_parameters()
    torch.manual_seed(4)
    other.reset_parameters()
    for key, value in own.named_parameters():
        assert torch.equal(value, dict(other.named_parameters())[key])


@pytest.mark.parametrize("is_weighted", [True, False])
def test_the_normalisation_is_that_of_pyg(is_weighted: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    # node 9 is isolated, node 2 has two self-loops
    edges = torch.randint(9, (2, 40), generator=draw)
    edges = torch.cat([edges, torch.tensor([[2, 2], [2, 2]])], dim=1)
    weight = None
    if is_weighted:
        weight = torch.rand(42, generator=draw).requires_grad_()
    got = topology.gcn_norm(edges, weight, 10, torch.float32)
    expected = gcn_norm(edges, weight, 10, dtype=torch.float32)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    if weight is not None:
        grads = [torch.autograd.grad(v.square().sum(), weight)[0]
                 for v in (got[1], expected[1])]  # fmt: skip
        assert torch.equal(*grads)
