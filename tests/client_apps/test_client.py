from __future__ import annotations

import pytest
import torch

from flower_fgl.client_apps.base import choose_device
from flower_fgl.client_apps.client import ClientData, DataCache, node_place
from flower_fgl.datasets.client_graph import ClientGraph, Graph, NodeDataset
from flower_fgl.errors import RunError
from flower_fgl.prototypes.rings import Pairs


def data_of(toy: NodeDataset) -> ClientData:
    half = torch.arange(6) < 3
    masks = {"train": half, "val": ~half, "test": torch.zeros(6, dtype=torch.bool)}
    graph = Graph(toy.x, toy.edge_index, toy.y, masks)
    client = ClientGraph(0, graph, toy.class_names, torch.arange(6))
    return ClientData.build(client, torch.device("cpu"))


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
def test_a_node_config_that_names_no_partition_is_refused(
    node: dict[str, object], words: str
) -> None:
    with pytest.raises(RunError, match=words):
        node_place(node)


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "mps", "meta"])
def test_a_device_that_is_not_here_is_named(name: str) -> None:
    with pytest.raises(RunError, match=name):
        choose_device(name)


def test_the_processor_is_always_here() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda")


def test_columns_and_sizes_follow_the_masks(toy: NodeDataset) -> None:
    data = data_of(toy)
    assert data.sizes == {"val": 3, "test": 0}
    assert data.training.index.tolist() == [0, 1, 2]
    assert data.training.labels.tolist() == [0, 0, 0]


def test_the_cache_keeps_the_newest_within_its_limit(toy: NodeDataset) -> None:
    one = data_of(toy)
    cache = DataCache(limit=2 * one.num_bytes)
    built = []

    def build(name: str) -> ClientData:
        built.append(name)
        return data_of(toy)

    for name in ("a", "b", "a", "c", "a", "b"):
        cache.get((name,), lambda name=name: build(name))
    assert built == ["a", "b", "c", "b"]  # b was the least recently used when c came


def test_what_a_method_computes_for_a_graph_counts_in_the_cache(
    toy: NodeDataset,
) -> None:
    plain = data_of(toy).num_bytes
    cache = DataCache(limit=3 * plain)
    first = cache.get(("a",), lambda: data_of(toy))
    assert cache.get(("b",), lambda: data_of(toy)) is not first
    assert cache.get(("a",), lambda: data_of(toy)) is first
    floats = torch.zeros(plain // 4)
    first.memo["rings",] = [Pairs(floats, floats)]
    assert first.num_bytes == plain + 2 * floats.nbytes
    cache.get(("b",), lambda: data_of(toy))  # a, now of 3 parts, has to go for b
    assert cache.get(("a",), lambda: data_of(toy)) is not first


def test_the_cache_keeps_one_graph_however_large(toy: NodeDataset) -> None:
    cache = DataCache(limit=0)
    first = cache.get(("a",), lambda: data_of(toy))
    assert cache.get(("a",), lambda: data_of(toy)) is first
