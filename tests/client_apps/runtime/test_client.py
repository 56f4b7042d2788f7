from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.prototypes.hop_neighbors import Pairs
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.data import ClientData, node_place
from flower_fgl.client_apps.runtime.session import DataCache, choose_device, data_bytes
from flower_fgl.client_apps.runtime.state import ClientState
from flower_fgl.client_apps.runtime.training import make_optimizer
from flower_fgl.core.errors import RunError
from flower_fgl.core.options import kebab
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph, NodeDataset
from flower_fgl.methods import parse_config
from flower_fgl.nn import GraphInput, SparseOperator


def data_of(toy: NodeDataset, *, has_val: bool = True) -> ClientData:
    half = torch.arange(6) < 3
    none = torch.zeros(6, dtype=torch.bool)
    masks = {"train": half, "val": ~half if has_val else none, "test": none}
    graph = Graph(toy.x, toy.edge_index, toy.y, masks)
    client = ClientGraph(0, graph, toy.target, torch.arange(6))
    return ClientData.build(client, torch.device("cpu"))


def client_of(toy: NodeDataset, *, has_val: bool = True, **values: object) -> Client:
    settings = {kebab(key): value for key, value in values.items()}
    config = parse_config(settings)  # type: ignore[arg-type]
    device = torch.device("cpu")
    return Client(config, 0, 1, data_of(toy, has_val=has_val), ClientState(), device)


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({}, "partition-id"),
        ({"partition-id": 0}, "num-partitions"),
        ({"partition-id": "0", "num-partitions": 2}, "whole number"),
        ({"partition-id": -1, "num-partitions": 2}, "-1"),
        ({"partition-id": 2, "num-partitions": 2}, "numbered from 0"),
        ({"partition-id": 0, "num-partitions": 0}, "below"),
    ],
)
def test_a_node_config_without_a_valid_partition_is_rejected(
    node: dict[str, object], words: str
) -> None:
    with pytest.raises(RunError, match=words):
        node_place(node)


def test_an_unavailable_device_is_rejected() -> None:
    with pytest.raises(RunError, match="cuda:99"):
        choose_device("cuda:99")


def test_the_cpu_is_always_available() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda")


def test_columns_and_sizes_follow_the_masks(toy: NodeDataset) -> None:
    data = data_of(toy)
    assert data.sizes == {"val": 3, "test": 0}
    assert data.training.index.tolist() == [0, 1, 2]
    assert data.training.labels.tolist() == [0, 0, 0]


def test_the_cache_keeps_the_newest_within_its_limit(toy: NodeDataset) -> None:
    one = data_of(toy)
    cache = DataCache(limit=2 * data_bytes(one))
    built = []

    def build(name: str) -> ClientData:
        built.append(name)
        return data_of(toy)

    for name in ("a", "b", "a", "c", "a", "b"):
        cache.get((name,), lambda name=name: build(name))
    assert built == [
        "a",
        "b",
        "c",
        "b",
    ]  # b was the least recently used when c was added


def test_memoized_results_count_toward_the_cache_size(
    toy: NodeDataset,
) -> None:
    plain = data_bytes(data_of(toy))
    cache = DataCache(limit=3 * plain)
    first = cache.get(("a",), lambda: data_of(toy))
    assert cache.get(("b",), lambda: data_of(toy)) is not first
    assert cache.get(("a",), lambda: data_of(toy)) is first
    floats = torch.zeros(plain // 4)
    first.memo["rings",] = [Pairs(floats, floats)]
    assert data_bytes(first) == plain + 2 * floats.nbytes
    cache.get(("b",), lambda: data_of(toy))  # a now has 3 parts and is dropped for b
    assert cache.get(("a",), lambda: data_of(toy)) is not first


def test_the_cache_keeps_one_graph_however_large(toy: NodeDataset) -> None:
    cache = DataCache(limit=0)
    first = cache.get(("a",), lambda: data_of(toy))
    assert cache.get(("a",), lambda: data_of(toy)) is first


def test_the_validation_score_is_the_accuracy_of_the_column(
    toy: NodeDataset,
) -> None:
    client = client_of(toy)
    model = client.build_model(initialise=True)
    assert client.validate(model) == client.evaluate(model)["val"].accuracy


def test_a_model_predicts_only_the_scored_nodes(
    toy: NodeDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(toy)
    model = client.build_model(initialise=True)
    expected = client.evaluate(model)
    predicted = []

    def predict(graph: GraphInput, wanted: Tensor) -> Tensor:
        predicted.append(wanted.tolist())
        return model(graph).masked_fill(~wanted[:, None], math.nan)  # type: ignore[no-any-return]

    monkeypatch.setattr(model, "predict", predict)
    assert client.evaluate(model)["val"] == expected["val"]
    assert predicted == [[False] * 3 + [True] * 3]  # the column val; test has no node


def test_without_validation_nodes_the_validation_score_is_undefined(
    toy: NodeDataset,
) -> None:
    client = client_of(toy, has_val=False)
    assert math.isnan(client.validate(client.build_model(initialise=True)))


def test_absent_classes_count_as_zero_with_that_setting(toy: NodeDataset) -> None:
    """Two of three classes are predicted or true: the third is ignored, or counts as 0."""
    three = replace(toy, target=Target.classes(("left", "right", "none")))
    kept, zero = (client_of(three, absent_classes=c) for c in ("ignore", "zero"))
    model = kept.build_model(initialise=True).eval()
    with torch.no_grad():
        model.classifier.bias.copy_(torch.tensor([0.0, 0.0, -99.0]))
    present = {*kept.data.labels[0][3:].tolist()}
    present |= set(model(kept.data.inputs[0])[3:].argmax(dim=1).tolist())
    first, second = (c.evaluate(model)["val"].macro_f1 for c in (kept, zero))
    assert second == pytest.approx(first * len(present) / 3)


def test_check_every_keeps_the_best_weights_of_local_training(toy: NodeDataset) -> None:
    client = client_of(toy, check_every=1, local_epochs=5, dropout=0.0)
    model = client.build_model(initialise=True)
    client.train(model, 1)
    best = client.validate(model)
    plain = client_of(toy, local_epochs=1, dropout=0.0, optimizer_state="keep")
    other = plain.build_model(initialise=True)
    seen = []
    for _ in range(5):
        plain.train(other, 1)
        seen.append(plain.validate(other))
    assert best == max(seen)


@pytest.mark.parametrize("setting", ["transductive", "few-shot"])
def test_few_shot_runs_also_score_test_nodes_over_own_classes(
    toy: NodeDataset, setting: str
) -> None:
    nodes = torch.arange(6)
    masks = {"train": nodes == 0, "val": nodes > 5, "test": (nodes > 0) & (nodes < 4)}
    graph = Graph(toy.x, toy.edge_index, toy.y, masks)
    owned = ClientGraph(0, graph, toy.target, nodes)
    cpu = torch.device("cpu")
    config = parse_config({"setting": setting})
    data = ClientData.build(owned, cpu)
    client = Client(config, 0, 1, data, ClientState(), cpu)
    assert data.own_classes.tolist() == [True, False]
    model = client.build_model()
    model.forward = lambda inputs: torch.tensor([[0.0, 1.0]]).repeat(6, 1)  # type: ignore[method-assign,assignment]
    scores = client.evaluate(model)
    # nodes 1, 2, 3 have classes 0, 0, 1; the model predicts 1, or 0 where 1 is masked
    assert scores["test"].accuracy == pytest.approx(1 / 3)
    assert ("test_masked" in scores) == (setting == "few-shot")
    if setting == "few-shot":
        assert scores["test_masked"].accuracy == pytest.approx(2 / 3)
        assert scores["test_masked"].num_nodes == 3


@pytest.mark.parametrize("is_sparse", [False, True])
def test_input_weights_of_sparse_features_are_column_major(
    toy: NodeDataset, is_sparse: bool
) -> None:
    x = SparseOperator.from_entries(*entries_of(toy.x), (6, toy.x.shape[1])).matrix
    client = client_of(replace(toy, x=x) if is_sparse else toy)
    model = client.build_model(initialise=True)
    weight = dict(model.named_parameters())["encoder.0.lin.weight"]
    assert weight.t().is_contiguous() == is_sparse
    assert weight.is_contiguous() != is_sparse
    assert make_optimizer(model, client.config).defaults["fused"]


def entries_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    row, column = x.nonzero(as_tuple=True)
    return row, column, x[row, column]


def test_sparse_and_dense_features_give_the_same_rounds(toy: NodeDataset) -> None:
    x = SparseOperator.from_entries(*entries_of(toy.x), (6, toy.x.shape[1])).matrix
    found = []
    for dataset in (toy, replace(toy, x=x)):
        client = client_of(dataset, dropout=0.0)
        model = client.build_model(initialise=True)
        for number in (1, 2, 3):  # moments persist, contiguous as in a file or message
            client.train(model, number)
            group = client.state.group("optimizer")
            kept = {name: tensor.contiguous() for name, tensor in group.items()}
            client.state.set_group("optimizer", kept)
        found.append({n: t.contiguous() for n, t in model.state_dict().items()})
    torch.testing.assert_close(*found)


def test_a_cached_receptive_field_counts_toward_the_cache_size() -> None:
    path = torch.arange(39)
    edges = torch.stack([path, path + 1])
    edges = torch.cat([edges, edges.flip(0)], dim=1)
    few, none = torch.arange(40) == 7, torch.zeros(40, dtype=torch.bool)
    masks = {"train": few, "val": none, "test": ~few}
    y = torch.arange(40) % 2
    graph = Graph(torch.rand(40, 5), edges, y, masks)
    client = ClientGraph(0, graph, Target.classes(("a", "b")), torch.arange(40))
    data = ClientData.build(client, torch.device("cpu"))
    config = parse_config({})
    before = data_bytes(data)
    model = Client(config, 0, 1, data, ClientState(), torch.device("cpu")).build_model(
        initialise=True
    )
    data.training.logits(model, data.training.index)
    assert data_bytes(data) > before
    # a mini-batch uses the whole graph
    data.training.fields.clear()
    data.training.logits(model, data.training.index.clone())
    assert not data.training.fields
