from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_fgl.client_apps.runtime import training
from flower_fgl.client_apps.runtime.training import TrainingSet, train_epochs
from flower_fgl.nn import Backbone, GraphInput, build_model
from flower_fgl.nn.computation_graph import (
    NeighborSampler,
    _surroundings,
    receptive_field,
)
from flower_fgl.nn.sparse import csr_matrix
from flower_fgl.nn.topology import OperatorKind

MakeGraph = Callable[..., GraphInput]

TARGETS = torch.tensor([31, 2, 7, 39])
"""Unsorted; the last has no neighbour."""


@pytest.fixture
def graph(make_graph: MakeGraph) -> GraphInput:
    return make_graph(40, 45, seed=4)


def model_of(name: str, graph: GraphInput, num_layers: int = 2) -> Backbone:
    torch.manual_seed(0)
    return build_model(
        name,
        in_channels=graph.num_features,
        hidden_channels=8,
        num_outputs=3,
        num_layers=num_layers,
        dropout=0.0,
    )


def test_nodes_are_ordered_by_distance_with_targets_first() -> None:
    path = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4], [1, 0, 2, 1, 3, 2, 4, 3]])
    found = _surroundings(path, torch.tensor([3, 0]), 6, 2, 5)
    assert found is not None
    nodes, extents = found
    assert nodes.tolist() == [3, 0, 1, 2, 4]
    assert extents == [2, 5, 5]
    assert _surroundings(path, torch.tensor([3, 0]), 6, 2, 4) is None
    last = _surroundings(path, torch.tensor([3, 0]), 6, 1, 4)
    assert last is not None
    assert last[1] == [2, 5]


@pytest.mark.parametrize("is_sampled", [False, True])
def test_memory_is_freed_without_the_garbage_collector(
    is_sampled: bool, graph: GraphInput
) -> None:
    # a grid runs for hours in one process, whose collector rarely visits old objects
    if is_sampled:
        draws = torch.Generator().manual_seed(0)
        field = NeighborSampler(graph).draw(TARGETS, [2, 2], draws)
    else:
        found = receptive_field(graph, TARGETS, 2)
        assert found is not None
        field = found
    model_of("gcn", graph)(field)
    alive = [weakref.ref(field), weakref.ref(field.level(1))]
    gc.disable()
    try:
        del field
        found = None
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize("num_layers", [2, 3])
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize(
    "name", ["gcn", "graphsage", "gin", "mlp", "gcn:linear", "graphsage:linear"]
)
def test_logits_and_gradients_are_those_of_the_whole_graph(
    name: str, is_sparse: bool, num_layers: int, is_batch: bool, make_graph: MakeGraph
) -> None:
    graph = make_graph(100, 60, is_sparse=is_sparse, seed=4)
    model = model_of(name, graph, num_layers)
    assert model.reach == num_layers
    part = receptive_field(graph, TARGETS, num_layers, is_batch=is_batch)
    assert part is not None
    assert part.num_nodes < graph.num_nodes
    found = []
    for logits in (model(part), model(graph)[TARGETS]):
        model.zero_grad()
        logits.square().sum().backward()
        found.append((logits, [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(*found)
    torch.testing.assert_close(model(part), found[0][0])  # from the cache
    assert part.num_bytes > 0  # type: ignore[attr-defined]


def test_each_layer_computes_only_the_nodes_that_later_layers_need(
    graph: GraphInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("gcn", graph)
    sizes, run_layer = [], type(model).run_layer  # type: ignore[attr-defined]

    def counting(self: Backbone, layer: object, level: GraphInput, h: Tensor) -> Tensor:
        out: Tensor = run_layer(self, layer, level, h)
        sizes.append(len(out))
        return out

    monkeypatch.setattr(type(model), "run_layer", counting)
    part = receptive_field(graph, TARGETS, 2)
    assert part is not None
    model(part)
    near = set(TARGETS.tolist())
    for source, target in graph.edge_index.T.tolist():
        if target in TARGETS.tolist():
            near.add(source)
    assert sizes == [len(near), len(TARGETS)]


def test_without_targets_nothing_is_computed(graph: GraphInput) -> None:
    model = model_of("graphsage", graph)
    part = receptive_field(graph, torch.empty(0, dtype=torch.int64), 2)
    assert part is not None
    logits = model(part)
    assert logits.shape == (0, 3)
    logits.sum().backward()
    with pytest.raises(TypeError, match='no square operator "'):
        part.operator("mean")


def test_edge_weights_are_used(graph: GraphInput) -> None:
    weight = torch.rand(graph.edge_index.shape[1])
    weighted = GraphInput(graph.x, graph.edge_index, weight)
    model = model_of("graphsage", graph)
    part = receptive_field(weighted, TARGETS, 2)
    assert part is not None
    torch.testing.assert_close(model(part), model(weighted)[TARGETS])


def test_no_receptive_field_if_it_covers_most_of_the_graph(graph: GraphInput) -> None:
    assert receptive_field(graph, torch.arange(35), 2) is None


def test_no_receptive_field_if_features_or_weights_require_grad(
    graph: GraphInput,
) -> None:
    weight = torch.ones(graph.edge_index.shape[1], requires_grad=True)
    learnt = GraphInput(graph.x, graph.edge_index, weight)
    assert receptive_field(learnt, TARGETS, 2) is None
    features = GraphInput(graph.x.requires_grad_(), graph.edge_index)
    assert receptive_field(features, TARGETS, 2) is None


@pytest.mark.parametrize("name", ["gat", "gamlp", "sgc", "gcnii"])
def test_other_backbones_use_the_whole_graph(name: str, graph: GraphInput) -> None:
    assert model_of(name, graph).reach is None


def test_training_on_few_nodes_is_training_on_the_whole_graph(
    graph: GraphInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for has_field in (True, False):
        model = model_of("graphsage", graph)
        data = TrainingSet(graph, TARGETS, torch.tensor([0, 1, 2, 1]))
        if not has_field:
            data.fields[2] = None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = train_epochs(model, data, optimizer, epochs=3)
        assert (data.fields[2] is not None) == has_field
        found.append((loss, dict(model.state_dict())))
    torch.testing.assert_close(*found)


def test_batches_share_the_propagated_features_of_the_whole_graph(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_graph(100, 60, seed=4)
    model, sizes = model_of("gcn", graph), []
    kept = GraphInput.propagated
    monkeypatch.setattr(
        GraphInput,
        "propagated",
        lambda self, *key: sizes.append(len(kept(self, *key))) or kept(self, *key),
    )
    for batch in (TARGETS, TARGETS + 20):
        part = receptive_field(graph, batch, 2, is_batch=True)
        assert part is not None
        torch.testing.assert_close(model(part), model(graph)[batch])
    assert set(sizes) == {100}
    assert len(graph._filtered) == 1


def test_training_in_small_batches_is_training_on_the_whole_graph(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_graph(100, 60, seed=4)
    index = torch.randperm(100, generator=torch.Generator().manual_seed(1))[:30]
    found, sizes = [], []
    for few in (0.05, 0.0):
        monkeypatch.setattr(training, "BATCH_FIELD_SHARE", few)
        model = model_of("graphsage", graph)
        data = TrainingSet(graph, index, torch.arange(30) % 3)
        field = data.field_of(2, index[:5])
        sizes.append(0 if field is None else field.num_nodes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        draw = torch.Generator().manual_seed(2)
        loss = train_epochs(
            model, data, optimizer, epochs=2, batch_size=5, generator=draw
        )
        found.append((loss, dict(model.state_dict())))
    assert 5 < sizes[0] < 100
    assert sizes[1] == 0
    torch.testing.assert_close(*found)


N, D = 30, 4


def make_graph(*, is_sparse: bool = False) -> GraphInput:
    """A random graph with hubs, one self-loop, and a node without neighbours."""
    draw = torch.Generator().manual_seed(0)
    upper = (torch.rand(N, N, generator=draw) > 0.7).triu(1)
    upper[:3] |= torch.rand(3, N, generator=draw) > 0.3
    upper = upper.triu(1)
    upper[:, -1] = False
    both = upper | upper.T
    both[5, 5] = True
    x = torch.randn(N, D, generator=draw)
    if is_sparse:
        row, column = torch.arange(N).repeat_interleave(D), torch.arange(D).repeat(N)
        x = csr_matrix(row, column, x.flatten(), (N, D))
    return GraphInput(x, both.nonzero().T)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slow_rows(
    graph: GraphInput, kind: OperatorKind, row: int, kept: set[int]
) -> dict[int, float]:
    """Compute a node's row of a sampled operator, entry by entry."""
    dense = graph.operator(kind).matrix.to_dense()  # type: ignore[attr-defined]
    around = [u for u in range(N) if u != row and dense[row, u] != 0]
    scale = len(around) / len(kept) if kept else 1.0
    found = {u: float(dense[row, u]) * scale for u in kept}
    if dense[row, row] != 0:
        found[row] = float(dense[row, row])
    return found


@pytest.mark.parametrize("kind", ["normalised", "mean", "sum"])
def test_a_sampled_operator_equals_a_loop_over_its_entries(kind: OperatorKind) -> None:
    graph = make_graph(is_sparse=True)
    field = NeighborSampler(graph).draw(torch.tensor([7, 0, 29, 5]), [3, 2], rng(1))
    for number in range(2):
        level = field.level(number)
        inputs = level._nodes.tolist()  # type: ignore[attr-defined]
        outputs = level.output_nodes.tolist()  # type: ignore[attr-defined]
        matrix = level._operator(kind).matrix.to_dense()  # type: ignore[attr-defined]
        limit = [2, 3][number]  # the last layer's number comes first
        for row, node in enumerate(outputs):
            entries = {inputs[c]: float(v) for c, v in enumerate(matrix[row]) if v != 0}
            kept = set(entries) - {node}
            degree = int(
                ((graph.edge_index[1] == node) & (graph.edge_index[0] != node)).sum()
            )
            assert len(kept) == min(limit, degree)
            assert entries == pytest.approx(slow_rows(graph, kind, node, kept))


@pytest.mark.thorough
def test_the_mean_of_many_draws_is_the_whole_neighbourhood() -> None:
    graph = make_graph(is_sparse=True)
    sampler = NeighborSampler(graph)
    targets = torch.tensor([0, 1, 7, 5])
    h = torch.randn(N, D, generator=rng(2))
    generator = rng(3)
    draws = 3000
    kinds: tuple[OperatorKind, ...] = ("normalised", "mean", "sum")
    found: dict[OperatorKind, list[Tensor]] = {kind: [] for kind in kinds}
    for _ in range(draws):
        field: Any = sampler.draw(targets, [3], generator)
        for kind in kinds:
            found[kind].append(field.propagate(h[field._nodes], kind))
    for kind in kinds:
        stack = torch.stack(found[kind])
        error = stack.std(0) / draws**0.5
        expected = graph.propagate(h, kind)[targets]
        assert ((stack.mean(0) - expected).abs() <= 4.5 * error + 1e-5).all()
        assert (error[:2] > 0).all()  # hubs were really sampled


@pytest.mark.parametrize("name", ["gcn", "graphsage", "gin"])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_large_limits_give_the_outputs_of_the_whole_graph(
    name: str, is_sparse: bool
) -> None:
    graph = make_graph(is_sparse=is_sparse)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_model(
            name,
            in_channels=D,
            hidden_channels=8,
            num_outputs=3,
            num_layers=3,
            dropout=0.0,
        )
    targets = torch.tensor([4, 29, 0])
    field = NeighborSampler(graph).draw(targets, [N, N, N], rng(0))
    torch.testing.assert_close(model(field), model(graph)[targets])


def test_the_first_layer_of_strided_features_is_exact() -> None:
    graph = make_graph()
    weight = torch.randn(2, D, generator=rng(0))
    field = NeighborSampler(graph).draw(torch.tensor([0, 7]), [1, 1], rng(1))
    level = field.level(0)
    nodes: Tensor = level.output_nodes  # type: ignore[attr-defined]
    given = {"kind": "mean", "coefficients": (0.0, 1.0)}
    found = level.filtered_linear(None, weight, **given)  # type: ignore[arg-type]
    whole = graph.filtered_linear(None, weight, **given)  # type: ignore[arg-type]
    torch.testing.assert_close(found, whole[nodes])
    assert len(nodes) == 4  # two targets, one neighbour of each


def test_equal_generators_draw_equal_neighbours() -> None:
    sampler = NeighborSampler(make_graph())
    targets = torch.arange(6)
    drawn = [
        sampler.draw(targets, [2, 2], rng(seed)).level(1)._nodes  # type: ignore[attr-defined]
        for seed in (1, 1, 2)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
