from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric import nn as pyg
from torch_geometric.io import read_planetoid_data

from flower_fgl.core.model_spec import TYPED
from flower_fgl.nn import MODELS, Backbone, GraphInput, SparseOperator, build_model
from tests.nn.pyg_layers import as_pyg

MakeGraph = Callable[..., GraphInput]
# gine reads features of edges, which these graphs lack: see test_gine.py
names = pytest.mark.parametrize("name", sorted({*MODELS} - {"gine", *TYPED}))
ignores_edges = {"mlp"}


def build(name: str, **changes: Any) -> Backbone:
    sizes = {
        "in_channels": 9,
        "hidden_channels": 8,
        "num_outputs": 3,
        "num_layers": 2,
        "dropout": 0.5,
    }
    torch.manual_seed(0)
    return build_model(name, **(sizes | changes))


def plain_forward(model: Any, name: str, x: Tensor, edges: Tensor) -> Tensor:
    """Run a backbone's parameters through PyG's own forward passes, without dropout."""
    options = {}
    if name in ("sgc", "ssgc"):
        options["K"] = len(model.coefficients) - 1
    if name == "ssgc":
        options["alpha"] = model.alpha
    encoder, classifier = as_pyg(model.encoder, **options), as_pyg(model.classifier)
    out: Tensor
    if name in ("gcn", "graphsage", "gat", "gin"):
        for conv in encoder:
            x = conv(x, edges).relu()
        out = classifier(x, edges)
        return out
    if name == "mlp":
        for layer in encoder:
            x = layer(x).relu()
    elif name in ("sgc", "ssgc"):
        x = encoder(x, edges)
    elif name == "appnp":
        for layer in encoder:
            x = layer(x).relu()
        x = pyg.APPNP(model.steps, model.alpha)(x, edges)
    elif name == "gcnii":
        start = x = encoder["input"](x).relu()
        for conv in encoder["convs"]:
            x = conv(x, start, edges).relu()
    else:
        steps = model.steps if name == "gamlp" else len(encoder["branches"]) - 1
        hops = plain_hops(x, edges, steps)
        if name == "sign":
            pairs = zip(encoder["branches"], hops, strict=True)
            parts = torch.cat([layer(hop) for layer, hop in pairs], dim=1).relu()
            x = encoder["merge"](parts).relu()
        else:
            x = plain_gamlp(encoder, hops)
    out = classifier(x)
    return out


def plain_hops(x: Tensor, edges: Tensor, steps: int) -> list[Tensor]:
    loops = torch.arange(len(x)).expand(2, -1)
    row, column = torch.cat([edges[:, edges[0] != edges[1]], loops], dim=1).flip(0)
    a = torch.zeros(len(x), len(x)).index_put((row, column), torch.ones(()), True)
    scale = a.sum(1).rsqrt()
    s = scale[:, None] * a * scale
    hops = [x]
    for _ in range(steps):
        hops.append(s @ hops[-1])
    return hops


def plain_gamlp(encoder: Any, hops: list[Tensor]) -> Tensor:
    first, *rest = encoder["layers"]
    z = [first(hop) for hop in hops]
    scores: list[Tensor] = []
    for k in range(len(z)):
        mixture = torch.cat(scores, dim=1).softmax(1) if k else torch.ones(len(z[0]), 1)
        history = sum(mixture[:, j : j + 1] * z[j] for j in range(max(k, 1)))
        score = encoder["attention"](torch.cat([history, z[k]], dim=1))
        scores.append(F.leaky_relu(score, 0.2))
    weight = torch.cat(scores, dim=1).softmax(1)
    x = sum(weight[:, k : k + 1] * z[k] for k in range(len(z))).relu()
    for layer in rest:
        x = layer(x).relu()
    return x


@names
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("is_directed", [False, True], ids=["simple", "directed"])
@pytest.mark.parametrize("num_layers", [2, 3])
def test_outputs_and_gradients_equal_those_of_plain_pyg(
    make_graph: MakeGraph,
    name: str,
    is_sparse: bool,
    is_directed: bool,
    num_layers: int,
) -> None:
    graph = make_graph(is_sparse=is_sparse, is_directed=is_directed, num_edges=30)
    model = build(name, num_layers=num_layers).eval()
    y = torch.arange(graph.num_nodes) % 3
    out = model(graph)
    expected = plain_forward(model, name, graph.x.to_dense(), graph.edge_index)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    parameters = list(model.parameters())
    got = torch.autograd.grad(F.cross_entropy(out, y), parameters)
    wanted = torch.autograd.grad(F.cross_entropy(expected, y), parameters)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    for (parameter, _), gradient in zip(model.named_parameters(), got, strict=True):
        # GAMLP's softmax cancels a bias that moves all scores alike: rounding is left
        assert parameter == "encoder.attention.bias" or gradient.abs().sum() > 0


def test_appnp_is_the_published_model_up_to_the_bias_of_the_head(
    make_graph: MakeGraph,
) -> None:
    graph = make_graph()
    model: Any = build("appnp").eval()
    with torch.no_grad():
        model.classifier.bias.zero_()
    logits = model.classifier(model.encoder[0](graph.x).relu())
    expected = pyg.APPNP(10, 0.1)(logits, graph.edge_index)
    torch.testing.assert_close(model(graph), expected)


@names
@pytest.mark.parametrize("num_layers", [2, 3])
def test_a_backbone_is_its_head_on_its_embedding(
    make_graph: MakeGraph, name: str, num_layers: int
) -> None:
    graph = make_graph()
    model = build(name, num_layers=num_layers).eval()
    h = model.embed(graph)
    assert h.shape == (12, 8)
    out = model.head(h, graph)
    assert out.shape == (12, 3)
    assert torch.equal(out, model(graph))


@names
def test_names_start_with_encoder_or_classifier_and_state_is_parameters_only(
    name: str,
) -> None:
    model = build(name)
    state = list(model.state_dict())
    assert state == [key for key, _ in model.named_parameters()]
    prefixes = {key.split(".")[0] for key in state}
    assert prefixes == {"encoder", "classifier"}


@names
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("num_nodes", [1, 5])
def test_graphs_without_edges_give_finite_outputs_and_gradients(
    make_graph: MakeGraph, name: str, is_sparse: bool, num_nodes: int
) -> None:
    whole = make_graph(is_sparse=is_sparse)
    x = whole.x.to_dense()[:num_nodes]
    row, column = x.nonzero(as_tuple=True)
    if is_sparse:
        operator = SparseOperator.from_entries(row, column, x[row, column], x.shape)
        x = operator.matrix
    graph = GraphInput(x, torch.zeros(2, 0, dtype=torch.int64))
    model = build(name, dropout=0.0)
    out = model(graph)
    assert out.shape == (num_nodes, 3)
    assert out.isfinite().all()
    out.square().sum().backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() for p in model.parameters()
    )


@names
def test_features_without_entries_give_finite_outputs(name: str) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    x = SparseOperator.from_entries(nothing, nothing, torch.zeros(0), (4, 9)).matrix
    graph = GraphInput(x, torch.tensor([[0, 1], [1, 0]]))
    model = build(name)
    out = model(graph)
    assert out.isfinite().all()
    out.sum().backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() for p in model.parameters()
    )


@names
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 999))
def test_renumbered_nodes_get_renumbered_outputs(name: str, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(10, 9, generator=g)
    edges = torch.randint(0, 9, (2, 25), generator=g)
    order = torch.randperm(10, generator=g)
    place = torch.argsort(order)  # node v becomes node place[v]
    model = build(name).eval()
    expected = model(GraphInput(x, edges))[order]
    got = model(GraphInput(x[order], place[edges]))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@names
def test_evaluation_draws_nothing_and_training_does(
    make_graph: MakeGraph, name: str
) -> None:
    graph = make_graph()
    model = build(name)
    before = torch.get_rng_state()
    with torch.no_grad():
        first = model.eval()(graph)
        assert torch.equal(model(graph), first)
        assert torch.equal(torch.get_rng_state(), before)
        model.train()(graph)
    assert not torch.equal(torch.get_rng_state(), before)


def two_groups() -> tuple[GraphInput, Tensor]:
    """Two groups of 20 nodes, linked inside, with noisy features."""
    g = torch.Generator().manual_seed(0)
    y = torch.arange(40) // 20
    a = torch.rand(40, 40, generator=g) < torch.where(y[:, None] == y, 0.2, 0.01)
    edges = (a | a.t()).fill_diagonal_(False).nonzero().t()
    x = torch.randn(40, 9, generator=g)
    x[:, :4] += 2.0 * y[:, None] - 1
    return GraphInput(x, edges), y


@pytest.mark.thorough
@names
@pytest.mark.parametrize("num_layers", [2, 3])
def test_a_toy_problem_is_learnt_the_same_way_bit_for_bit(
    name: str, num_layers: int
) -> None:
    graph, y = two_groups()
    ends = []
    for _ in range(2):
        model = build(name, num_layers=num_layers, num_outputs=2, dropout=0.2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02, fused=True)
        for _ in range(60):
            optimizer.zero_grad()
            F.cross_entropy(model(graph), y).backward()
            optimizer.step()
        ends.append(torch.nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(*ends)
    accuracy = (model.eval()(graph).argmax(1) == y).float().mean()
    assert accuracy >= 0.95


@names
def test_a_gradient_of_a_gradient_reaches_the_features(
    make_graph: MakeGraph, name: str
) -> None:
    base = make_graph()
    x = base.x.clone().requires_grad_()
    model = build(name, dropout=0.0)
    loss = model(base.with_features(x)).square().sum()
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (second,) = torch.autograd.grad(sum(g.square().sum() for g in grads), x)
    assert second.isfinite().all()
    assert second.abs().sum() > 0


def test_gcn_reaches_its_published_accuracy_on_cora(real_data: Path) -> None:
    data = read_planetoid_data(str(real_data / "Planetoid/Cora/raw"), "cora")
    x = data.x / data.x.sum(1, keepdim=True).clamp(min=1)
    row, column = x.nonzero(as_tuple=True)
    x = SparseOperator.from_entries(row, column, x[row, column], x.shape).matrix
    graph = GraphInput(x, data.edge_index)
    model = build("gcn", in_channels=1433, hidden_channels=16, num_outputs=7)
    optimizer = torch.optim.Adam(
        [
            {"params": model.encoder.parameters(), "weight_decay": 5e-4},
            {"params": model.classifier.parameters(), "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    best = (0.0, 0.0)
    for _ in range(200):
        optimizer.zero_grad()
        train = data.train_mask
        F.cross_entropy(model.train()(graph)[train], data.y[train]).backward()
        optimizer.step()
        with torch.inference_mode():
            is_right = (model.eval()(graph).argmax(1) == data.y).float()
        scores = (
            float(is_right[data.val_mask].mean()),
            float(is_right[data.test_mask].mean()),
        )
        best = max(best, scores)
    assert best[1] >= 0.79  # the paper's 81.5 %, one seed, features not dropped
