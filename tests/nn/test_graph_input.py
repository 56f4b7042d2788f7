from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.nn import GraphInput, SparseOperator, build_model, topology
from flower_fgl.nn import graph_input as module
from tests.nn.pyg_layers import as_pyg

MakeGraph = Callable[..., GraphInput]


@pytest.fixture
def path() -> GraphInput:
    """The path 0 - 1 - 2 and an isolated node 3."""
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    return GraphInput(torch.arange(8.0).view(4, 2), edges)


def dense(graph: GraphInput, kind: str) -> Tensor:
    return graph.operator(kind).matmul(torch.eye(graph.num_nodes))  # type: ignore[arg-type]


def calls_of(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str
) -> list[tuple[object, ...]]:
    """Record the arguments of each call of a module's function."""
    original, calls = getattr(where, name), []

    def recorded(*args: object, **options: object) -> object:
        calls.append(args)
        return original(*args, **options)

    monkeypatch.setattr(where, name, recorded)
    return calls


def test_the_normalised_operator_is_the_published_formula(path: GraphInput) -> None:
    a, b, c = 1 / 2, 1 / 6**0.5, 1 / 3  # degrees with self-loops 2, 3, 2, 1
    expected = torch.tensor(
        [[a, b, 0, 0], [b, c, b, 0], [0, b, a, 0], [0, 0, 0, 1]], dtype=torch.float32
    )
    torch.testing.assert_close(dense(path, "normalised"), expected)


def test_mean_and_sum_give_an_isolated_node_zero(path: GraphInput) -> None:
    adjacency = torch.zeros(4, 4)
    adjacency[path.edge_index[1], path.edge_index[0]] = 1
    torch.testing.assert_close(dense(path, "sum"), adjacency)
    adjacency[1] /= 2
    torch.testing.assert_close(dense(path, "mean"), adjacency)


def test_rows_are_targets_and_columns_sources() -> None:
    graph = GraphInput(torch.eye(3), torch.tensor([[0], [2]]))
    out = graph.operator("sum").matmul(graph.x)
    torch.testing.assert_close(out[2], torch.tensor([1.0, 0.0, 0.0]))
    assert out.sum() == 1


def test_edge_weights_enter_every_operator(path: GraphInput) -> None:
    weight = torch.tensor([2.0, 2.0, 6.0, 6.0])
    graph = GraphInput(path.x, path.edge_index, weight)
    assert dense(graph, "sum")[1].tolist() == [2, 0, 6, 0]
    assert dense(graph, "mean")[1].tolist() == [0.25, 0, 0.75, 0]
    expected = 6 / (9 * 7) ** 0.5  # weighted degrees 2 + 6 + 1 and 6 + 1
    assert float(dense(graph, "normalised")[1, 2]) == pytest.approx(expected)


def test_a_mean_over_weights_of_zero_is_zero(path: GraphInput) -> None:
    weight = torch.zeros(4, requires_grad=True)
    graph = GraphInput(path.x, path.edge_index, weight)
    out = graph.operator("mean").matmul(path.x)
    assert torch.equal(out, torch.zeros(4, 2))
    out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("name", ["gcn", "gcnii", "sgc", "appnp", "gamlp"])
@pytest.mark.parametrize("is_sparse", [True, False])
def test_operators_are_computed_once_in_many_training_steps(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch, name: str, is_sparse: bool
) -> None:
    calls = calls_of(monkeypatch, topology, "gcn_norm")
    graph = make_graph(is_sparse=is_sparse)
    model = build_model(
        name,
        in_channels=9,
        hidden_channels=4,
        num_outputs=3,
        num_layers=2,
        dropout=0.5,
    )
    for _ in range(3):
        model(graph).sum().backward()
    with torch.inference_mode():
        model.eval()(graph)
    assert len(calls) == 1


def test_propagated_features_equal_a_loop_and_are_computed_once(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_of(monkeypatch, module, "graph_filter")
    graph = make_graph()
    s = dense(graph, "normalised")
    weight = torch.randn(4, 9)
    expected = graph.x
    for power in range(4):
        for _ in range(3):
            got = graph.filtered_linear(
                None,
                weight,
                kind="normalised",
                coefficients=(0.0,) * power + (1.0,),
            )
            torch.testing.assert_close(got, expected @ weight.t())
        expected = s @ expected
    assert len(calls) == 4  # once for each power


@pytest.mark.parametrize("is_sparse", [True, False])
def test_a_filter_is_the_sum_of_its_terms(
    make_graph: MakeGraph, is_sparse: bool
) -> None:
    graph = make_graph(is_sparse=is_sparse)
    s = dense(graph, "normalised")
    x = graph.x.to_dense()
    weight, bias = torch.randn(4, 9), torch.randn(4)
    filtered = 0.5 * x + 2 * s @ s @ x - s @ s @ s @ x
    got = graph.filtered_linear(
        None,
        weight,
        bias,
        kind="normalised",
        coefficients=(0.5, 0.0, 2.0, -1.0),
    )
    torch.testing.assert_close(got, filtered @ weight.t() + bias)
    hidden = torch.randn(12, 4)
    got = graph.filtered_linear(
        hidden, weight[:, :4], bias, kind="normalised", coefficients=(2.0,)
    )
    torch.testing.assert_close(got, 2 * hidden @ weight[:, :4].t() + bias)


def test_sgc_keeps_one_propagated_copy_of_dense_features_and_none_of_sparse(
    make_graph: MakeGraph,
) -> None:
    shape = (103, 37)  # no other tensor in the process has this shape
    for is_sparse, kept in [(False, 1), (True, 0)]:
        graph = make_graph(shape[0], 200, shape[1], is_sparse=is_sparse)
        model = build_model(
            "sgc",
            in_channels=37,
            hidden_channels=4,
            num_outputs=3,
            num_layers=4,
            dropout=0.0,
        )
        model(graph).sum().backward()
        alive = [o for o in gc.get_objects() if type(o) is Tensor and o.shape == shape]
        dense_copies = [o for o in alive if o.layout == torch.strided]
        assert len(dense_copies) == kept + (not is_sparse)  # and the features
        del alive, dense_copies, graph, model


@pytest.mark.parametrize("name", ["gcn", "gat", "graphsage", "sign"])
@pytest.mark.parametrize("is_sparse", [True, False])
def test_operators_cached_in_evaluation_serve_training(
    make_graph: MakeGraph, name: str, is_sparse: bool
) -> None:
    graph = make_graph(is_sparse=is_sparse)
    model = build_model(
        name, in_channels=9, hidden_channels=4, num_outputs=3, num_layers=2, dropout=0.5
    )
    with torch.inference_mode():
        model(graph)
    model(graph).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with torch.inference_mode():
        operator = graph.operator("sum")
    assert isinstance(operator, SparseOperator)
    assert not operator.matrix.is_inference()


@pytest.mark.parametrize("learnt", ["features", "weights", "both"])
@pytest.mark.parametrize("kind", ["gcn", "sgc"])
def test_learnable_features_and_edge_weights_get_the_gradients_of_pyg(
    make_graph: MakeGraph, kind: str, learnt: str
) -> None:
    base = make_graph()
    x = base.x.clone().requires_grad_(learnt != "weights")
    weight = torch.rand(base.edge_index.shape[1]).requires_grad_(learnt != "features")
    model = build_model(
        kind, in_channels=9, hidden_channels=4, num_outputs=3, num_layers=2, dropout=0.0
    )
    out = model(GraphInput(x, base.edge_index, weight))
    options = {"K": 2} if kind == "sgc" else {}
    encoder, classifier = as_pyg(model.encoder, **options), as_pyg(model.classifier)
    if kind == "gcn":
        h = encoder[0](x, base.edge_index, weight).relu()
        expected = classifier(h, base.edge_index, weight)
    else:
        expected = classifier(encoder(x, base.edge_index, weight))
    torch.testing.assert_close(out, expected)
    leaves = [t for t in (x, weight, *model.parameters()) if t.requires_grad]
    grads = torch.autograd.grad(out.square().sum(), leaves)
    assert all(g.abs().sum() > 0 for g in grads)
    wanted = torch.autograd.grad(expected.square().sum(), leaves)
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-5)


def test_nothing_that_requires_grad_is_cached(path: GraphInput) -> None:
    x = path.x.clone().requires_grad_()
    weight = torch.ones(4, requires_grad=True)
    graph = GraphInput(x, path.edge_index, weight)
    model = build_model(
        "gcn",
        in_channels=2,
        hidden_channels=4,
        num_outputs=3,
        num_layers=2,
        dropout=0.0,
    )
    before = model(graph)
    with torch.no_grad():
        x.mul_(2)
        weight.mul_(3)
    fresh = GraphInput(x.detach(), path.edge_index, weight.detach())
    torch.testing.assert_close(model(graph), model(fresh))
    assert not torch.allclose(before, model(graph))


def test_with_features_shares_the_operators(
    path: GraphInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_of(monkeypatch, topology, "gcn_norm")
    path.operator("normalised")
    other = path.with_features(torch.randn(4, 5))
    assert other.operator("normalised") is path.operator("normalised")
    assert len(calls) == 1
    assert (other.num_nodes, other.num_features) == (4, 5)
    weight = torch.randn(2, 5)
    torch.testing.assert_close(other.linear(None, weight), other.x @ weight.t())
    with pytest.raises(DataError, match="must have 4 rows"):
        path.with_features(torch.randn(3, 5))
    with pytest.raises(DataError, match="float64"):
        path.with_features(torch.randn(4, 5, dtype=torch.float64))


def test_with_edges_shares_the_features(path: GraphInput) -> None:
    path.filtered_linear(
        None, torch.ones(2, path.num_features), kind="sum", coefficients=(0.0, 1.0)
    )
    edges = torch.tensor([[0, 3], [3, 0]])
    weight = torch.tensor([0.5, 2.0], requires_grad=True)
    other = path.with_edges(edges, weight)
    assert other.x is path.x
    plain = GraphInput(path.x, edges, weight)
    layer = torch.randn(2, path.num_features)
    for graph in (other, plain):
        weight.grad = None
        out = graph.filtered_linear(None, layer, kind="sum", coefficients=(0.0, 1.0))
        out.square().sum().backward()  # type: ignore[no-untyped-call]
        graph.result = (out.detach(), weight.grad)  # type: ignore[attr-defined]
    torch.testing.assert_close(other.result, plain.result)  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="contain nodes 0 to 3"):
        path.with_edges(torch.tensor([[4], [0]]))
    union = GraphInput(path.x, edges, batch=torch.tensor([0, 0, 0, 0]))
    with pytest.raises(
        DataError, match="needs a single graph, got a batch of 1 graphs"
    ):
        union.with_edges(edges)


def test_a_graph_that_is_on_the_device_is_returned_itself(path: GraphInput) -> None:
    assert path.to("cpu") is path
    assert path.to(torch.device("cpu")) is path
    assert path.device == torch.device("cpu")
    assert path.to("meta").edge_index.device.type == "meta"


def test_a_graph_moves_with_its_weights(path: GraphInput) -> None:
    graph = GraphInput(path.x, path.edge_index, torch.ones(4))
    moved = graph.to("meta")
    assert moved.edge_weight is not None
    assert {moved.x.device.type, moved.edge_weight.device.type} == {"meta"}


@pytest.mark.parametrize(
    ("x", "edge_index", "weight", "message"),
    [
        (torch.ones(3), torch.zeros(2, 0, dtype=torch.int64), None, "x must be"),
        (torch.eye(3).to_sparse_coo(), torch.zeros(2, 0).long(), None, "sparse CSR"),
        (torch.ones(3, 1), torch.zeros(0).long(), None, r"shape \(2, edges\)"),
        (torch.ones(3, 1), torch.tensor([[0], [3]]), None, "nodes 0 to 2, got 0 to 3"),
        (torch.ones(3, 1), torch.tensor([[-1], [0]]), None, "got -1 to 0"),
        (
            torch.ones(3, 1),
            torch.tensor([[0], [1]]),
            torch.ones(2),
            "one entry for each",
        ),
    ],
)
def test_invalid_shapes_and_edges_are_rejected(
    x: Tensor, edge_index: Tensor, weight: Tensor | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        GraphInput(x, edge_index, weight)


def test_sparse_features_that_require_grad_are_rejected() -> None:
    one = torch.tensor([0])
    x = SparseOperator.from_entries(one, one, torch.ones(1), (2, 2)).matrix
    with pytest.raises(DataError, match="cannot require grad"):
        GraphInput(x.requires_grad_(), torch.zeros(2, 0, dtype=torch.int64))


def test_an_encoding_of_the_nodes_is_computed_once_per_batch() -> None:
    batch = GraphInput(
        torch.ones(3, 1), torch.tensor([[0, 1], [1, 0]]), batch=torch.tensor([0, 0, 1])
    )
    calls = []

    def number(graph: GraphInput) -> torch.Tensor:
        calls.append(graph.num_nodes)
        return torch.arange(float(graph.num_nodes))[:, None]

    second = batch.select(torch.tensor([1, 0])).select(torch.tensor([1]))
    assert second.encode_nodes("number", number).flatten().tolist() == [0, 1]
    with torch.inference_mode():
        last = batch.select(torch.tensor([1]))
        assert last.encode_nodes("number", number).flatten().tolist() == [2]
    assert calls == [3]
