"""Parameters of layers against PyG's, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch_geometric import nn as pyg
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from flower_fgl.nn import GraphInput, layers, topology
from flower_fgl.nn.decoupled import recursive_attention
from flower_fgl.nn.layers import GATConv


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


MakeGraph = Callable[..., GraphInput]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_zeroes_at_its_rate_and_keeps_the_mean(rate: float) -> None:
    torch.manual_seed(0)
    h = torch.ones(400, 500)
    out = layers.dropout(h, rate, True)
    share = float((out == 0).float().mean())
    assert share == pytest.approx(rate, abs=0.005)  # 5 sigma: 5 · √(0.25 / 200,000)
    assert out.max() == pytest.approx(1 / (1 - rate))
    assert float(out.mean()) == pytest.approx(1, abs=0.05)


def test_dropout_passes_the_gradient_through_what_it_kept() -> None:
    h = torch.randn(50, 20, requires_grad=True)
    out = layers.dropout(h, 0.5, True)
    out.sum().backward()
    torch.testing.assert_close(h.grad, torch.where(out == 0, 0.0, 2.0))


def test_relu_dropout_is_relu_where_it_keeps() -> None:
    h = torch.randn(50, 20, requires_grad=True)
    out = layers.relu_dropout(h, 0.25, True)
    kept = out > 0
    torch.testing.assert_close(out[kept], h.detach()[kept] / 0.75)
    assert torch.equal(out[~kept], torch.zeros(int((~kept).sum())))
    share = kept[h > 0].float().mean()
    assert float(share) == pytest.approx(0.75, abs=0.1)
    out.sum().backward()
    torch.testing.assert_close(h.grad, kept / 0.75)


@pytest.mark.parametrize("function", [layers.dropout, layers.relu_dropout])
def test_nothing_is_drawn_outside_training_or_at_rate_zero(
    function: Callable[..., torch.Tensor],
) -> None:
    h = torch.randn(5, 4)
    before = torch.get_rng_state()
    expected = h if function is layers.dropout else h.relu()
    assert torch.equal(function(h, 0.5, False), expected)
    assert torch.equal(function(h, 0.0, True), expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_attention_weight_zero_removes_an_edge_and_one_keeps_it(
    make_graph: MakeGraph,
) -> None:
    full = make_graph()
    layer = GATConv(9, 4, heads=2)
    edges = full.edge_index
    ones = GraphInput(full.x, edges, torch.ones(edges.shape[1]))
    torch.testing.assert_close(layer(ones), layer(full))
    weight = (torch.arange(edges.shape[1]) % 3 > 0).float()
    thinned = GraphInput(full.x, edges[:, weight > 0])
    weighted = GraphInput(full.x, edges, weight.requires_grad_())
    out = layer(weighted)
    torch.testing.assert_close(out, layer(thinned))
    out.square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
    assert weight.grad.abs().sum() > 0


def test_attention_survives_large_scores(make_graph: MakeGraph) -> None:
    graph = make_graph()
    layer = GATConv(9, 4, heads=2)
    with torch.no_grad():
        layer.att_src.mul_(1e4)
    assert layer(graph).isfinite().all()


def test_recursive_attention_equals_a_loop_over_nodes() -> None:
    g = torch.Generator().manual_seed(0)
    hops = torch.randn(4, 5, 3, generator=g)
    weight, bias = torch.randn(1, 6, generator=g), torch.randn(1, generator=g)
    got = recursive_attention(hops, weight, bias)
    for node in range(5):
        x = hops[:, node]
        scores: list[torch.Tensor] = []
        for k in range(4):
            share = torch.stack(scores).softmax(0) if k else torch.ones(1)
            history = sum(share[j] * x[j] for j in range(max(k, 1)))
            both = torch.cat([history, x[k]])
            scores.append(
                torch.nn.functional.leaky_relu(both @ weight[0] + bias[0], 0.2)
            )
        torch.testing.assert_close(got[:, node], torch.stack(scores).softmax(0))
