from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

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
        num_classes=3,
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
