from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.targets import Target
from flower_fgl.datasets.build import build_clients, load_dataset
from flower_fgl.datasets.client_graph import ClientGraph, Graph, GraphDataset
from flower_fgl.datasets.splits.graph_sets import (
    cut_graph_clients,
    degree_features,
    node_degrees,
)
from flower_fgl.datasets.store import open_store
from flower_fgl.methods import parse_config
from tests.datasets.test_store import assert_same
from tests.support.tiny_graphs import write_tiny

UNIFORM_MUTAG = "f29e8cb581210bed020e9dd44f449c615da5fa2e1b81174651e1cba41ab7436f"


def config(dataset: str, data_dir: Path, **values: Any) -> RunConfig:
    settings = {"setting": "graph", "partition": "uniform", "data-dir": str(data_dir)}
    return parse_config({"dataset": dataset, **settings, **values})


def load_set(dataset: str, data_dir: Path) -> GraphDataset:
    out = load_dataset(config(dataset, data_dir))
    assert isinstance(out, GraphDataset)
    return out


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_tiny(tmp_path / "data")
    return tmp_path / "data"


def graphs_of(client: ClientGraph) -> dict[str, Graph]:
    val, test = client.evaluation
    return {"train": client.graph, "val": val, "test": test}


def picture(x: Tensor, edge_index: Tensor, y: int) -> str:
    """Return a text that is equal for equal graphs."""
    return repr((x.to_dense().tolist(), sorted(edge_index.T.tolist()), y))


def pictures(graph: Graph | GraphDataset) -> list[str]:
    """Divide a union into its graphs by a slow loop."""
    assert graph.batch is not None
    out = []
    for number, label in enumerate(graph.y.tolist()):
        nodes = (graph.batch == number).nonzero().flatten().tolist()
        place = {node: k for k, node in enumerate(nodes)}
        inside = [
            [place[u], place[v]] for u, v in graph.edge_index.T.tolist() if u in place
        ]
        edges = torch.tensor(inside, dtype=torch.int64).reshape(-1, 2).T
        out.append(picture(graph.x.to_dense()[nodes], edges, label))
    return out


def test_every_graph_is_in_one_split_of_one_client_unchanged(tiny: Path) -> None:
    clients, _, num_edges = build_clients(config("tu:TINY", tiny), 3)
    assigned = [p for c in clients for g in graphs_of(c).values() for p in pictures(g)]
    whole = load_set("tu:TINY", tiny)
    assert sorted(assigned) == sorted(pictures(whole))
    assert sum(client.num_items for client in clients) == 30
    assert sum(client.num_edges for client in clients) == num_edges
    first = clients[0]
    expected = [pictures(whole)[number] for number in first.node_ids.tolist()]
    assert pictures(first.graph) == expected


def test_nine_tenths_of_each_class_rounded_down_are_training_graphs(tiny: Path) -> None:
    clients, _, _ = build_clients(config("tu:TINY", tiny), 3)
    for client in clients:
        parts = graphs_of(client)
        total = sum(g.y.bincount(minlength=2) for g in parts.values())
        train = parts["train"].y.bincount(minlength=2)
        assert train.tolist() == [9 * int(n) // 10 for n in total]
        assert parts["val"].num_items == 0
        assert parts["test"].num_items == int(total.sum() - train.sum())
        assert parts["train"].masks["train"].all()
        assert not parts["train"].masks["test"].any()
        assert set(parts["test"].masks) == {"test"}


def test_a_split_with_a_validation_share_gives_validation_graphs(tiny: Path) -> None:
    clients, _, _ = build_clients(config("tu:TINY", tiny, split="60/20/20"), 3)
    for client in clients:
        sizes = {name: g.num_items for name, g in graphs_of(client).items()}
        assert sizes == {"train": 6, "val": 2, "test": 2}


def test_degrees_are_one_hot_with_one_column_for_larger_ones() -> None:
    x = degree_features(torch.tensor([0, 2, 3, 9, 1]), 2)
    assert x.tolist() == [
        [1, 0, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
        [0, 0, 0, 1],
        [0, 1, 0, 0],
    ]


def test_many_degrees_are_kept_sparse() -> None:
    degrees = torch.tensor([0, 61, 62, 63, 700])
    dense, wide = degree_features(degrees, 61), degree_features(degrees, 62)
    assert (dense.layout, dense.shape) == (torch.strided, (5, 63))
    assert (wide.layout, wide.shape) == (torch.sparse_csr, (5, 64))
    column = wide.to_dense().argmax(dim=1)
    assert column.tolist() == [0, 61, 62, 63, 63]
    assert wide.to_dense().sum(dim=1).eq(1).all()


@pytest.mark.parametrize("place", ["train", "test"])
def test_degree_features_do_not_depend_on_test_graphs(place: str) -> None:
    # three stars of 3, 4 and 9 nodes; the large one is in the training set or not
    sizes = [3, 4, 9]
    pairs = [
        (s, s + k) for s, n in zip([0, 3, 7], sizes, strict=True) for k in range(1, n)
    ]
    both = sorted(pairs + [(b, a) for a, b in pairs])
    dataset = GraphDataset(
        "stars",
        torch.empty(16, 0),
        torch.tensor(both).T,
        torch.tensor([0, 1, 0]),
        Target.classes("ab"),
        batch=torch.repeat_interleave(torch.arange(3), torch.tensor(sizes)),
    )
    is_test = torch.tensor([False, False, place == "test"])
    masks = {"train": ~is_test, "val": torch.zeros(3).bool(), "test": is_test}
    (client,) = cut_graph_clients(dataset, [np.arange(3)], [masks])
    assert node_degrees(dataset)[[0, 3, 7]].tolist() == [2, 3, 8]
    largest = 3 if place == "test" else 8
    assert client.num_features == largest + 2
    centre = client.evaluation[1] if place == "test" else client.graph
    row = 0 if place == "test" else 7
    assert int(centre.x[row].argmax()) == (largest + 1 if place == "test" else 8)


def test_a_hub_in_a_test_graph_changes_no_training_graph(tmp_path: Path) -> None:
    write_tiny(tmp_path / "plain", has_labels=False)
    plain, _, _ = build_clients(config("tu:TINY", tmp_path / "plain"), 3)
    number = int(
        set(range(1, 29, 2))
        .difference(*(client.node_ids.tolist() for client in plain))
        .pop()
    )  # a star among the test graphs
    write_tiny(tmp_path / "hub", has_labels=False, hub=number)
    with_hub, _, _ = build_clients(config("tu:TINY", tmp_path / "hub"), 3)
    for a, b in zip(plain, with_hub, strict=True):
        assert a.num_features == 7  # degrees 0 to 5, and all larger ones
        assert torch.equal(a.graph.x, b.graph.x)
        assert torch.equal(a.graph.edge_index, b.graph.edge_index)


def test_the_store_restores_the_built_graph_clients(tiny: Path) -> None:
    settings = config("tu:TINY", tiny)
    clients, sha256, _ = build_clients(settings, 3)
    store = open_store(settings, 3)
    assert store.index.partition_sha256 == sha256
    for client in clients:
        stored = store.load(client.partition_id)
        assert_same(stored, client)
        for a, b in zip(stored.held, client.held, strict=True):
            assert torch.equal(a.batch, b.batch)
    assert store.load(0).graph.num_nodes > store.load(0).graph.num_items


@pytest.mark.parametrize("alpha", [0.3, 0.5, 1.0])
def test_a_dirichlet_partition_of_graphs_is_reproducible(
    alpha: float, tiny: Path
) -> None:
    values = {"partition": "dirichlet", "dirichlet-alpha": alpha}
    settings = config("tu:TINY", tiny, **values)
    (_, first, _), (_, second, _) = (build_clients(settings, 3) for _ in range(2))
    assert first == second
    other = config("tu:TINY", tiny, **values, **{"partition-seed": 7})
    assert build_clients(other, 3)[1] != first


def test_setting_and_dataset_must_have_the_same_task(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r'TINY is a set of.*setting = "graph"'):
        load_dataset(config("tu:TINY", tiny, setting="transductive"))
    with pytest.raises(ConfigError, match=r'synthetic is one graph.*"transductive" or'):
        load_dataset(config("synthetic", tiny))


def test_a_rule_for_one_graph_is_rejected(tiny: Path) -> None:
    with pytest.raises(ConfigError, match='and partition = "dirichlet" or "uniform"'):
        config("tu:TINY", tiny, partition="metis")


def test_a_set_has_no_published_split(tiny: Path) -> None:
    with pytest.raises(DataError, match="published without"):
        build_clients(config("tu:TINY", tiny, split="public"), 3)


def check_real(name: str, data: Path, width: int) -> list[ClientGraph]:
    clients, _, num_edges = build_clients(config(name, data), 10)
    whole = load_set(name, data)
    assert sum(client.num_items for client in clients) == whole.num_graphs
    assert sum(client.num_edges for client in clients) == num_edges
    assert {client.num_features for client in clients} == {width}
    for client in clients:
        total = sum(g.y.bincount(minlength=whole.num_classes) for g in client.held)
        train = client.class_counts()
        assert train.tolist() == [9 * int(n) // 10 for n in total]
    return clients


def test_mutag_has_an_even_partition_with_a_known_hash(real_data: Path) -> None:
    clients = check_real("mutag", real_data, 7)
    assert {client.num_items for client in clients} == {18, 19}
    assert build_clients(config("mutag", real_data), 10)[1] == UNIFORM_MUTAG


def test_proteins_is_assigned_completely(real_data: Path) -> None:
    check_real("proteins", real_data, 3)


@pytest.mark.thorough
def test_imdb_gets_degrees_of_its_training_graphs(real_data: Path) -> None:
    whole = load_set("imdb-binary", real_data)
    clients, _, _ = build_clients(config("imdb-binary", real_data), 10)
    trained = torch.cat([client.node_ids for client in clients])
    is_train = torch.zeros(1000, dtype=torch.bool)
    is_train[trained] = True
    largest = int(node_degrees(whole)[is_train[whole.batch]].max())
    check_real("imdb-binary", real_data, largest + 2)
    assert clients[0].graph.x.layout == torch.sparse_csr


@pytest.mark.slow
@pytest.mark.parametrize(("name", "width"), [("nci1", 37), ("collab", 493)])
def test_large_datasets_are_assigned_completely(
    name: str, width: int, real_data: Path
) -> None:
    check_real(name, real_data, width)
