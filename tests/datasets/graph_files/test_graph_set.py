from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.graph_files import set_csv
from flower_fgl.datasets.graph_files.graph_file import load_graph_file
from flower_fgl.datasets.graph_files.graph_set import inspect_graph_set, load_graph_set
from tests.support.graph_sets import set_arrays, write_set, write_tables

NAN = np.nan
GRAPHS = """
    id,label,key
    m1,toxic,A
    m2,,A
    m3,safe,B
"""
NODES = """
    graph,id,mass,charge
    m2,a,1,0.5
    m1,a,2,0
    m2,b,3,0
    m1,b,4,0
    m3,a,5,-1
    m1,c,6,0
"""
EDGES = """
    graph,source,target
    m2,b,a
    m1,a,b
    m1,b,a
    m1,c,b
"""


def folder(path: Path, **changed: str | None) -> Path:
    tables = {"graphs": GRAPHS, "nodes": NODES, "edges": EDGES} | changed
    return write_tables(path, **{k: text for k, text in tables.items() if text})


def test_an_archive_is_read_as_it_is(tmp_path: Path) -> None:
    arrays = set_arrays(train_mask=None)
    owned = load_graph_set(write_set(tmp_path / "own.npz"))
    data = owned.dataset
    assert (data.num_graphs, data.class_names) == (60, ("low", "high"))
    assert data.y.tolist() == arrays["y"].tolist()
    assert data.batch.tolist() == arrays["graph_of_node"].tolist()
    torch.testing.assert_close(data.x, torch.from_numpy(arrays["x"]).float())
    both = {(int(a), int(b)) for a, b in arrays["edges"]}
    both |= {(b, a) for a, b in both}
    assert sorted(both) == list(map(tuple, data.edge_index.T.tolist()))
    assert owned.ids == owned.keys == tuple(arrays["graph_ids"].tolist())
    assert data.feature_names == ("mass", "charge", "size")


def test_without_ids_graphs_are_numbered_and_have_no_keys(tmp_path: Path) -> None:
    owned = load_graph_set(write_set(tmp_path / "own.npz", 4, graph_ids=None))
    assert (owned.ids, owned.keys) == (("0", "1", "2", "3"), ())
    keys = np.array(["k", "k", "l", "m"])
    owned = load_graph_set(write_set(tmp_path / "own.npz", 4, graph_keys=keys))
    assert (owned.ids[0], owned.keys) == ("g0", ("k", "k", "l", "m"))


def test_labels_may_be_missing_for_a_prediction(tmp_path: Path) -> None:
    path = write_set(tmp_path / "own.npz", 4, y=None, class_names=None)
    with pytest.raises(DataError, match="class_names is missing"):
        load_graph_set(path)
    owned = load_graph_set(path, needs_labels=False)
    assert owned.dataset.y.tolist() == [-1] * 4
    tables = folder(tmp_path / "csv", graphs="id\nm1\nm2\nm3")
    with pytest.raises(DataError, match="no column label"):
        load_graph_set(tables)
    owned = load_graph_set(tables, needs_labels=False)
    assert (owned.ids, owned.dataset.num_graphs) == (("m1", "m2", "m3"), 3)


def test_rows_of_a_graph_need_not_be_adjacent(tmp_path: Path) -> None:
    owned = load_graph_set(folder(tmp_path))
    data = owned.dataset
    assert owned.ids == ("m1", "m2", "m3")
    assert owned.keys == ("A", "A", "B")
    assert data.batch.tolist() == [0, 0, 0, 1, 1, 2]
    assert data.x.tolist() == [[2, 0], [4, 0], [6, 0], [1, 0.5], [3, 0], [5, -1]]
    assert data.edge_index.tolist() == [[0, 1, 1, 2, 3, 4], [1, 0, 2, 1, 4, 3]]
    assert data.class_names == ("safe", "toxic")
    assert data.y.tolist() == [1, -1, 0]
    assert data.feature_names == ("mass", "charge")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"graph_of_node": np.array([0, 0, 2, 2])}, r'graph "g1" has no node\. Give'),
        ({"graph_of_node": np.array([1, 0, 2, 2])}, "must ascend from 0, got 0 at node 1"),
        ({"graph_of_node": np.array([0, 1, 2, 3])}, "names graph 3, but graphs are"),
        ({"graph_of_node": np.array([0, 1, 2])}, "one entry per row of x"),
        ({"graph_of_node": np.array([0.0, 1, 2, 2])}, "must hold integers"),
        ({"edges": np.array([[0, 1]])}, "node 0 of graph 0 and node 1 of graph 1"),
        ({"edges": None}, "edges are missing"),
        ({"y": np.array([0, 1])}, r"one label per graph, shape \(3,\), got \(2,\)"),
        ({"y": np.array([0, 1, 2])}, r"1 labels are outside \[-1, 2\)"),
        ({"y": np.zeros((3, 2), dtype=int)}, r"shape \(3,\), got \(3, 2\)"),
        ({"graph_ids": np.array(["a", "a", "b"])}, "names a graph twice"),
        ({"graph_ids": np.array(["a", " ", "b"])}, "expected one line of 1 to 300"),
        ({"graph_keys": np.array(["a", "b"])}, "one text for each graph, shape"),
        ({"node_ids": np.arange(4)}, "node_ids cannot be used in a set"),
        ({"evaluation_0_x": np.ones((4, 1))}, "evaluation_0_x cannot be used"),
        ({"train_mask": np.ones(4, dtype=bool)}, r"must be bool of shape \(3,\)"),
        ({"x": np.array([[1.0], [np.nan], [0], [0]])}, "NaN or infinite"),
        ({"graph_of_node": None}, 'holds one graph, but setting = "graph" needs a set'),
    ],
)  # fmt: skip
def test_a_bad_archive_gives_one_error(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base = {
        "graph_of_node": np.array([0, 1, 2, 2]),
        "x": np.ones((4, 1)),
        "edges": np.array([[2, 3]]),
        "y": np.array([0, 1, -1]),
        "feature_names": None,
    }
    path = write_set(tmp_path / "own.npz", 3, **base)
    assert load_graph_set(path).dataset.num_graphs == 3
    if changed.get("graph_of_node", 0) is None:
        base |= {"graph_ids": None}
    write_set(path, 3, **(base | changed))
    with pytest.raises(DataError, match=message):
        load_graph_set(path)


def test_graphs_have_numbers_with_units_and_holes(tmp_path: Path) -> None:
    y = np.array([[1.5, np.nan], [np.nan, np.nan], [2, -3]])
    names = {"class_names": None, "target_names": np.array(["logS", "logP"])}
    units = {"target_units": np.array(["log mol/L", ""])}
    path = write_set(tmp_path / "own.npz", 3, y=y, **names, **units)
    data = load_graph_set(path).dataset
    assert (data.target.kind, data.target.names) == ("numbers", ("logS", "logP"))
    assert data.target.units == ("log mol/L", "")
    assert data.targets is not None
    np.testing.assert_array_equal(data.targets.numpy(), y)
    assert data.y.tolist() == [0, -1, 0]
    write_set(
        path, 3, y=np.array([0, np.inf, 1]), **names | {"target_names": np.array(["t"])}
    )
    with pytest.raises(DataError, match='the first at graph 1, "t"'):
        load_graph_set(path)
    write_set(path, 3, y=np.array([0.5, 1, 2]))
    with pytest.raises(DataError, match="y must hold integers, got float64"):
        load_graph_set(path)


@pytest.mark.parametrize(
    ("header", "cells", "kind", "values"),
    [
        ("target", ["-1.5", "", "2"], "numbers", [[-1.5], [np.nan], [2]]),
        ("target:b,target:a", ["1,2", ",3", "4,"], "numbers", [[1, 2], [NAN, 3], [4, NAN]]),
        ("label:b,label:a", ["1,0", ",1", ","], "labels", [[1, 0], [-1, 1], [-1, -1]]),
    ],
)  # fmt: skip
def test_tables_of_graphs_have_numbers_or_labels(
    header: str, cells: list[str], kind: str, values: list[list[float]], tmp_path: Path
) -> None:
    rows = [f"m{number},{cell}" for number, cell in enumerate(cells, start=1)]
    path = folder(tmp_path / "own", graphs="\n".join([f"id,{header}", *rows]))
    data = load_graph_set(path).dataset
    assert data.target.kind == kind
    names = tuple(name.partition(":")[2] or name for name in header.split(","))
    assert data.target.names == names
    assert data.targets is not None
    np.testing.assert_array_equal(data.targets.numpy(), values)
    bad = "\n".join([f"id,{header}", rows[0] + "x", *rows[1:]])
    folder(tmp_path / "own", graphs=bad)
    with pytest.raises(DataError, match=r"line 2.*or an empty cell if it is unknown"):
        load_graph_set(path)


def test_units_of_numbers_are_in_a_table(tmp_path: Path) -> None:
    path = folder(
        tmp_path,
        graphs="id,target:logS\nm1,1\nm2,2\nm3,",
        targets="name,unit\nlogS,log mol/L\nlogP,",
    )
    target = load_graph_set(path).dataset.target
    assert (target.names, target.units) == (("logS", "logP"), ("log mol/L", ""))


def test_features_of_edges_stay_with_their_edges(tmp_path: Path) -> None:
    rows = ["order", "1.5", "1", "3", "2"]
    lines = [line.strip() for line in EDGES.strip().splitlines()]
    edges = "\n".join(map(",".join, zip(lines, rows, strict=True)))
    messages = load_graph_set(folder(tmp_path, edges=edges)).dataset.messages
    assert messages is not None
    assert messages.index.tolist() == [[4, 0, 1, 2], [3, 1, 0, 1]]
    assert messages.x.flatten().tolist() == [1.5, 1, 3, 2]
    assert messages.feature_names == ("order",)


def test_shuffled_tables_join_the_nodes_that_their_ids_name(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    names = [f"n{k}" for k in range(6)]
    nodes = [(graph, name) for graph in range(30) for name in names[: 2 + graph % 4]]
    draw.shuffle(nodes)  # so that graphs go back and forth, and share ids
    nodes = [(int(graph), name) for graph, name in nodes]
    value = {node: place for place, node in enumerate(nodes)}
    pairs = {(g, "n0", name) for g, name in nodes if name != "n0"}
    edges = draw.permutation(sorted(pairs)).tolist()
    path = folder(
        tmp_path,
        graphs="id,target\n" + "\n".join(f"{g},{g}" for g in range(30)),
        nodes="graph,id,f\n" + "\n".join(f"{g},{n},{value[g, n]}" for g, n in nodes),
        edges="graph,source,target\n" + "\n".join(map(",".join, edges)),
    )
    data = load_graph_set(path).dataset
    found = data.x.flatten()[data.edge_index].long().T.tolist()
    ends = [(value[int(g), a], value[int(g), b]) for g, a, b in edges]
    assert sorted(map(tuple, found)) == sorted(ends + [end[::-1] for end in ends])
    assert data.batch.tolist() == sorted(graph for graph, _ in nodes)


@pytest.mark.parametrize(
    ("table", "old", "new", "message"),
    [
        ("graphs", "m3", "m1", r'line 4: id "m1" is already taken.*each graph'),
        ("graphs", "m3", "m4", r'nodes\.csv, line 6: graph "m3" is not an id'),
        ("graphs", "m3,", "m4,safe,C\nm3,", r'graph "m4" has no node\.'),
        ("graphs", "key", "weight", 'column "weight" is not known. Features'),
        ("graphs", "key", "SMILES", 'not known. .* Did you mean "smiles"'),
        ("nodes", "m1,b", "m1,a", r'line 5: the id "a" of a node of graph "m1"'),
        ("nodes", "m1,b", "m1,", r'line 5: the id "" of a node of graph'),
        ("nodes", "charge", "label", 'column "label" is about graphs'),
        ("nodes", "charge", "split", 'column "split" is about graphs'),
        ("nodes", "charge", "fold", '"fold" looks like a split'),
        ("nodes", "0.5", "x", 'line 2, column "charge": expected a number'),
        ("edges", "m1,c,b", "m1,c,d", r'line 5: target "d" is not an id of'),
        ("edges", "m1,c,b", "m9,c,b", r'edges\.csv, line 5: graph "m9"'),
        ("edges", "m1,c,b", "m1,c,", r'line 5: target "" is not an id of'),
        ("edges", "target", "target,label", "column label would not be read"),
        ("edges", EDGES, None, r"edges\.csv is missing"),
        ("nodes", NODES, None, r"nodes\.csv is missing"),
    ],
)
def test_a_bad_folder_gives_one_error_that_names_the_line(
    table: str, old: str, new: str | None, message: str, tmp_path: Path
) -> None:
    whole = {"graphs": GRAPHS, "nodes": NODES, "edges": EDGES}[table]
    text = None if new is None else whole.replace(old, new)
    assert text != whole
    with pytest.raises(DataError, match=message):
        load_graph_set(folder(tmp_path / "own", **{table: text}))


def test_nodes_of_a_set_need_the_table_of_its_graphs(tmp_path: Path) -> None:
    path = folder(tmp_path / "own", graphs=None)
    for load in (load_graph_file, load_graph_set):
        with pytest.raises(
            DataError, match=r"has a column graph, but graphs\.csv is missing"
        ):
            load(path)


def test_all_errors_of_a_file_are_listed(tmp_path: Path) -> None:
    path = folder(
        tmp_path, graphs=GRAPHS.replace("m3", "m1"), nodes=NODES.replace("0.5", "x")
    )
    owned, problems = inspect_graph_set(path)
    assert owned is None
    assert len(problems) == 1  # nodes are not compared with doubtful ids
    nodes, edges = NODES.replace("0.5", "x"), EDGES.replace("m2,b", "m9,b")
    _, problems = inspect_graph_set(folder(tmp_path, nodes=nodes, edges=edges))
    assert len(problems) == 2


def test_a_set_in_place_of_one_graph_names_the_setting(tmp_path: Path) -> None:
    for path in (write_set(tmp_path / "own.npz"), folder(tmp_path / "csv")):
        number = 60 if path.suffix else 3
        with pytest.raises(
            DataError, match=f"holds a set of {number} graphs: set sett"
        ):
            load_graph_file(path)


@pytest.mark.thorough
def test_a_million_graphs_take_bounded_memory(tmp_path: Path) -> None:
    number = 10**6
    path = write_set(
        tmp_path / "own.npz",
        1,
        x=np.ones((number, 1), dtype=np.float32),
        graph_of_node=np.arange(number),
        edges=np.empty((0, 2), dtype=np.int64),
        y=np.arange(number) % 2,
        graph_ids=None,
        feature_names=None,
    )
    tracemalloc.start()
    try:
        owned = load_graph_set(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert owned.dataset.num_graphs == number
    assert peak < 300 * number  # bytes; each graph takes 28 in the file, its id 60
    ids = np.arange(number + 1).astype(np.str_)
    one_more = set_arrays(1, x=np.ones((number + 1, 1)), feature_names=None)
    one_more |= {"graph_of_node": np.arange(number + 1), "graph_ids": ids}
    one_more |= {"y": np.zeros(number + 1, dtype=int)}
    np.savez(path, **one_more)
    with pytest.raises(DataError, match="1,000,001 graphs, the limit is 1,000,000"):
        load_graph_set(path)


def test_too_many_graphs_are_refused_before_other_tables_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(set_csv, "MOST_GRAPHS", 2)
    path = folder(tmp_path, nodes=None)
    with pytest.raises(DataError, match=r"graphs\.csv holds 3 graphs, the limit is 2"):
        load_graph_set(path)
