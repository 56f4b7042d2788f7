"""Edges with direction and features, from an owner's file to the graphs of a client."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flower_fgl import to_npz
from flower_fgl.core.errors import DataError
from flower_fgl.datasets.build import build_clients
from flower_fgl.datasets.client_graph import GraphDataset, MessageEdges, NodeDataset
from flower_fgl.datasets.graph_files.graph_file import (
    load_graph_file,
    save_client_graph,
)
from flower_fgl.datasets.owned import client_from_file
from flower_fgl.datasets.owners import build_owners
from flower_fgl.datasets.pyg_data import graph_dataset, node_dataset
from flower_fgl.datasets.splits.graph_sets import cut_graph_clients
from flower_fgl.methods import parse_config
from flower_fgl.nn.link import pair_codes
from flower_fgl.nn.topology import Messages

NODES, EDGES = 40, 150
COLUMNS = ("amount", "age")


def config(**values: Any) -> Any:
    return parse_config({"method": "fedavg", "model": "gine", **values})


def arrays(seed: int = 0, columns: tuple[str, ...] = COLUMNS) -> dict[str, Any]:
    """Return a graph whose edges have repeats, both directions and self-loops."""
    rng = np.random.default_rng(seed)
    index = rng.integers(0, NODES, (2, EDGES))
    index[:, :10] = index[:, 10:20]  # repeats
    index[:, 20:30] = index[::-1, 30:40]  # the other direction
    values = {name: rng.normal(size=EDGES).astype(np.float32) for name in COLUMNS}
    y = np.arange(NODES) % 2
    return {
        "x": rng.normal(size=(NODES, 3)).astype(np.float32),
        "edge_index": index,
        "y": y,
        "class_names": np.array(["a", "b"]),
        "feature_names": np.array(["u", "v", "w"]),
        "edge_attr": np.stack([values[name] for name in columns], axis=1),
        "edge_attr_names": np.array(columns),
    }


def write(path: Path, **changes: Any) -> Path:
    """Write a graph file; an array that is None is left out."""
    found = arrays() | changes
    np.savez(path, **{key: array for key, array in found.items() if array is not None})
    return path


def rows(messages: MessageEdges | None) -> list[tuple[float, ...]]:
    """Return source, target and features of each edge, sorted."""
    assert messages is not None
    return sorted(
        (*ends, *x)
        for ends, x in zip(messages.index.T.tolist(), messages.x.tolist(), strict=True)
    )


def expected(found: dict[str, Any], keep: Any = slice(None)) -> list[tuple[float, ...]]:
    """Return the rows of the edges of a file."""
    index, x = (
        torch.from_numpy(found["edge_index"]),
        torch.from_numpy(found["edge_attr"]),
    )
    return rows(MessageEdges(index[:, keep], x[keep]))


# ------------------------------------------------------------------------- files
def test_a_file_keeps_repeats_directions_and_self_loops(tmp_path: Path) -> None:
    client = client_from_file(write(tmp_path / "a.npz"), config())
    assert rows(client.graph.messages) == expected(arrays())
    assert client.num_edge_features == 2
    assert client.feature_names == ("u", "v", "w", "edge: amount", "edge: age")


def test_a_model_that_reads_no_features_of_edges_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.npz")
    client = client_from_file(path, config(model="gcn"))
    assert caplog.messages[-1] == (
        'a: edge_attr is not used by model gcn. Set model = "gine".'
    )
    assert client.graph.messages is None
    assert (client.num_edge_features, client.feature_names) == (0, ("u", "v", "w"))
    directed = config(model="gcn", **{"edge-direction": "separate"})
    client = client_from_file(path, directed)
    assert client.graph.messages is not None
    assert client.graph.messages.x.shape == (EDGES, 0)
    assert client.num_edge_features == 0


def test_a_file_without_features_of_edges_is_refused(tmp_path: Path) -> None:
    bare = write(tmp_path / "a.npz", edge_attr=None, edge_attr_names=None)
    with pytest.raises(
        DataError, match=r'a has no features of edges, .* model = "gin"'
    ):
        client_from_file(bare, config())
    undirected = config(
        model="gcn", dataset="synthetic", **{"edge-direction": "forward"}
    )
    with pytest.raises(DataError, match="synthetic lists undirected edges"):
        build_clients(undirected, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edge_attr": np.full((EDGES, 2), np.nan)}, "edge_attr holds NaN"),
        ({"edge_attr": np.zeros((3, 2))}, "one entry for each of the 150 edges"),
        ({"edge_attr": np.zeros(EDGES)}, "one text for each column"),
        ({"edge_attr": np.array([["a", "b"]] * EDGES)}, "edge_attr must hold numbers"),
        ({"edge_attr_names": np.array(["a"])}, "one text for each column"),
        ({"edge_attr_names": np.array(["a", "a"])}, "a name occurs twice"),
    ],
)
def test_bad_features_of_edges_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        client_from_file(write(tmp_path / "a.npz", **changes), config())


def test_a_table_of_edges_may_have_features(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("id,label,u\na,x,1\nb,y,2\nc,x,0\n")
    (tmp_path / "edges.csv").write_text("source,target,amount\nb,a,5\nb,a,5\na,a,1.5\n")
    client = client_from_file(tmp_path, config())
    assert rows(client.graph.messages) == [(0, 0, 1.5), (1, 0, 5), (1, 0, 5)]
    assert client.feature_names == ("u", "edge: amount")
    (tmp_path / "edges.csv").write_text("source,target,amount\n")
    none = client_from_file(tmp_path, config()).graph.messages
    assert none is not None
    assert none.x.shape == (0, 1)  # an owner without edges is fine


def test_a_written_graph_is_read_again(tmp_path: Path) -> None:
    client = client_from_file(write(tmp_path / "a.npz"), config(setting="inductive"))
    save_client_graph(tmp_path / "b.npz", client)
    again = client_from_file(tmp_path / "b.npz", config(setting="inductive"))
    assert again.feature_names == client.feature_names
    held = zip(
        (client.graph, *client.evaluation),
        (again.graph, *again.evaluation),
        strict=True,
    )
    for one, other in held:
        assert rows(one.messages) == rows(other.messages)
        assert torch.equal(one.edge_index, other.edge_index)


# --------------------------------------------------------------------------- PyG
def pyg_graph(**changes: Any) -> Any:
    from torch_geometric.data import Data

    found = arrays()
    data = Data(
        x=torch.from_numpy(found["x"]),
        edge_index=torch.from_numpy(found["edge_index"]),
        edge_attr=torch.from_numpy(found["edge_attr"]),
        y=torch.from_numpy(found["y"]),
    )
    for key, value in changes.items():
        data[key] = value
    return data


def test_a_pyg_graph_keeps_its_edges_in_a_file(tmp_path: Path) -> None:
    path = to_npz(
        pyg_graph(), tmp_path / "a.npz", feature_names=["u", "v", "w"],
        edge_feature_names=COLUMNS,
    )  # fmt: skip
    client = client_from_file(path, config())
    assert rows(client.graph.messages) == expected(arrays())
    assert client.feature_names[3:] == ("edge: amount", "edge: age")


def test_edges_of_a_pyg_graph_without_features_keep_their_direction() -> None:
    directed = node_dataset(pyg_graph(edge_attr=None), "the graph").messages
    assert directed is not None
    assert directed.x.shape == (EDGES, 0)
    simple = node_dataset(pyg_graph(edge_attr=None), "the graph").edge_index
    plain = pyg_graph(edge_attr=None, edge_index=simple.flip(0))
    assert node_dataset(plain, "the graph").messages is None


def test_graphs_of_a_list_have_features_of_edges_or_none_has() -> None:
    pair = [pyg_graph(y=torch.tensor([k])) for k in range(2)]
    dataset = graph_dataset(pair, "graphs")
    assert dataset.messages is not None
    assert dataset.messages.x.shape == (2 * EDGES, 2)
    with pytest.raises(
        DataError, match=r"graphs 0 and 1 differ in their attributes \(edge_attr\)"
    ):
        graph_dataset(
            [pair[0], pyg_graph(y=torch.tensor([1]), edge_attr=None)], "graphs"
        )


# ---------------------------------------------------------------- parts of graphs
def test_messages_follow_the_nodes_of_a_partition(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz")
    clients, _, _ = build_clients(config(dataset=str(path), partition="uniform"), 3)
    found = arrays()
    for client in clients:
        nodes = client.node_ids
        inside = np.isin(found["edge_index"], nodes.numpy()).all(axis=0)
        messages = client.graph.messages
        assert messages is not None
        whole = replace(messages, index=nodes[messages.index])
        assert rows(whole) == expected(found, np.flatnonzero(inside))


def test_inductive_training_sees_no_edge_of_evaluation_nodes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz")
    client = client_from_file(path, config(setting="inductive"))
    found = arrays()
    inside = np.isin(found["edge_index"], client.node_ids.numpy()).all(axis=0)
    assert client.graph.messages is not None
    assert client.graph.messages.index.shape[1] == inside.sum() < EDGES


def test_removed_edges_send_no_messages(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz")
    values = {"dataset": str(path), "partition": "uniform", "edge-sparsity": 0.5}
    (client,), _, _ = build_clients(config(**values), 1)
    graph = client.graph
    assert graph.messages is not None
    kept = torch.isin(
        pair_codes(graph.messages.index, NODES), pair_codes(graph.edge_index, NODES)
    )
    loops = graph.messages.index[0] == graph.messages.index[1]
    assert bool((kept | loops).all())
    assert 0 < len(kept) < EDGES


def test_graphs_of_a_set_keep_their_own_edges() -> None:
    parts = [
        graph_dataset([pyg_graph(y=torch.tensor([k])) for k in range(6)], "graphs")
    ]
    dataset: GraphDataset = parts[0]
    is_part = torch.arange(6)
    masks = {name: is_part // 2 == k for k, name in enumerate(("train", "val", "test"))}
    client = cut_graph_clients(dataset, [np.arange(6)], [masks])[0]
    for graph in (client.graph, *client.evaluation):
        assert graph.messages is not None
        first = graph.messages.index[0] < NODES
        assert rows(graph.messages.select(first)) == expected(arrays())
        assert int((~first).sum()) == EDGES


def test_no_edge_between_the_ends_of_a_held_out_pair_is_left(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz", y=None, class_names=None)
    graph = client_from_file(path, config(setting="link")).graph
    assert graph.pairs is not None
    assert graph.messages is not None
    held_out = graph.pairs[:, graph.masks["val"] | graph.masks["test"]]
    codes = pair_codes(graph.messages.index, NODES)
    assert not bool(torch.isin(codes, pair_codes(held_out, NODES)).any())
    # the messages are exactly the file's edges within training pairs, and self-loops
    index = torch.from_numpy(arrays()["edge_index"])
    pairs = graph.pairs[:, graph.masks["train"]]
    trained = torch.isin(pair_codes(index, NODES), pair_codes(pairs, NODES))
    keep = (trained | (index[0] == index[1])).numpy()
    assert rows(graph.messages) == expected(arrays(), np.flatnonzero(keep))
    repeated = pair_codes(index[:, trained], NODES)
    assert len(torch.unique(repeated)) < len(repeated)


def edge_arrays(**changes: Any) -> dict[str, Any]:
    """Return arrays of a graph with classes of edges."""
    names = np.array(["x", "y"])
    return {"edge_label": np.arange(EDGES) % 2, "edge_class_names": names} | changes


def test_classified_edges_pass_their_features_and_times_cut_them(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a.npz", **edge_arrays())
    client = client_from_file(path, config(setting="edge"))
    assert rows(client.graph.messages) == expected(arrays())  # test edges too
    assert client.num_edge_features == 2
    timed = write(tmp_path / "b.npz", **edge_arrays(edge_time=np.arange(EDGES) * 1.0))
    client = client_from_file(timed, config(setting="edge"))
    graphs = (client.graph, *client.evaluation)
    counts = [g.messages.index.shape[1] for g in graphs if g.messages is not None]
    train = int(client.graph.masks["train"].sum())
    tested = int(client.evaluation[0].masks["test"].sum())
    assert counts == [train, EDGES - tested]
    assert rows(client.graph.messages) == expected(arrays(), np.arange(train))


def test_a_forward_pass_counts_the_nodes_that_hear_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    path = write(tmp_path / "a.npz")
    client_from_file(path, config(**{"edge-direction": "forward"}))
    deaf = NODES - len(np.unique(arrays()["edge_index"][1]))
    assert deaf
    assert f"{deaf} of {NODES} nodes get no message" in caplog.messages[-1]


@pytest.mark.parametrize("setting", ["closed-set", "open-set", "few-shot"])
def test_other_settings_cut_messages_by_nodes(setting: str, tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.npz", y=np.arange(NODES) % 4, class_names=np.array([*"abcd"])
    )
    values = {"dataset": str(path), "setting": setting, "shots": 1}
    values |= {} if setting == "few-shot" else {"partition": "metis"}
    clients, _, _ = build_clients(config(**values), 2)
    found = arrays()
    for client in clients:
        nodes = client.node_ids
        assert client.graph.messages is not None
        whole = replace(client.graph.messages, index=nodes[client.graph.messages.index])
        inside = np.isin(found["edge_index"], nodes.numpy()).all(axis=0)
        assert rows(whole) == expected(found, np.flatnonzero(inside))
        for graph in client.evaluation:
            assert graph.messages is not None
            assert int(graph.messages.index.max()) < graph.num_nodes


def test_labels_of_edges_of_a_tu_dataset_are_features(real_data: Path) -> None:
    values = {"dataset": "mutag", "setting": "graph", "partition": "uniform"}
    clients, _, _ = build_clients(config(**values, **{"data-dir": str(real_data)}), 2)
    for client in clients:
        for graph in (client.graph, *client.evaluation):
            assert graph.messages is not None
            assert graph.messages.x.shape == (graph.edge_index.shape[1], 4)
            assert bool((graph.messages.x.sum(dim=1) == 1).all())
            # the files list both directions of a bond, which count once
            both = Messages(graph.messages.index, graph.messages.x).ways("both").first
            assert both.index.shape == graph.edge_index.shape


# ------------------------------------------------------------------------- owners
def owners(folder: Path, *columns: tuple[str, ...]) -> str:
    """Write one graph for each tuple of columns."""
    for number, names in enumerate(columns):
        write(folder / f"{'abc'[number]}.npz", **arrays(number, names))
    return str(folder)


def test_owners_agree_on_columns_of_edges_by_name(tmp_path: Path) -> None:
    folder = owners(tmp_path, COLUMNS, COLUMNS[::-1], COLUMNS)
    clients, _, _ = build_owners(config(owners=folder, clients=3))
    for number, client in enumerate(clients):
        assert client.feature_names[3:] == ("edge: amount", "edge: age")
        assert rows(client.graph.messages) == expected(arrays(number))


def test_an_owner_with_other_columns_of_edges_is_refused(tmp_path: Path) -> None:
    folder = owners(tmp_path, COLUMNS, ("age",), COLUMNS)
    message = (
        "b: its features of edges differ from those of the other clients: .*amount"
    )
    with pytest.raises(DataError, match=message):
        build_owners(config(owners=folder, clients=3))
    free = config(owners=folder, clients=3, **{"feature-align": "project"})
    clients, _, _ = build_owners(free)
    assert [client.num_edge_features for client in clients] == [2, 1, 2]


def test_reading_a_file_leaves_its_plain_graph_as_it_was(tmp_path: Path) -> None:
    with_features: NodeDataset = load_graph_file(write(tmp_path / "a.npz")).dataset
    bare = write(tmp_path / "b.npz", edge_attr=None, edge_attr_names=None)
    without = load_graph_file(bare).dataset
    assert torch.equal(with_features.edge_index, without.edge_index)
    assert torch.equal(with_features.x, without.x)
