"""Classes, times and features of edges in CSV folders, .npz files and PyG graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.client_graph import EdgeTable
from flower_fgl.datasets.graph_files.graph_file import load_graph_file
from flower_fgl.datasets.pyg_data import to_npz

NODES = "id,age\na,1\nb,2\nc,3\n"
EDGES = """source,target,label,time,amount,split
a,b,odd,1,10,train
b,a,normal,1,20,val
a,b,,2.5,30,
c,c,normal,3,40,test
"""


def write(folder: Path, edges: str = EDGES, **more: str) -> Path:
    for name, text in {"nodes": NODES, "edges": edges, **more}.items():
        (folder / f"{name}.csv").write_text(text)
    return folder


def read(path: Path) -> EdgeTable:
    edges = load_graph_file(path, needs_labels=False).dataset.edges
    assert edges is not None
    return edges


def assert_is_the_table(table: EdgeTable) -> None:
    assert table.pairs.tolist() == [[0, 1, 0, 2], [1, 0, 1, 2]]
    assert [table.class_names[c] if c >= 0 else "" for c in table.y] == [
        "odd", "normal", "", "normal",
    ]  # fmt: skip
    assert table.time is not None
    assert table.time.tolist() == [1, 1, 2.5, 3]
    assert table.x.tolist() == [[10], [20], [30], [40]]
    assert table.feature_names == ("amount",)
    assert {n: mask.nonzero().flatten().tolist() for n, mask in table.masks.items()} == {
        "train": [0], "val": [1], "test": [3],
    }  # fmt: skip


def test_a_csv_folder_keeps_every_edge_with_its_direction(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert_is_the_table(read(path))
    # messages pass over a simple undirected graph
    graph = load_graph_file(path, needs_labels=False).dataset
    assert graph.edge_index.tolist() == [[0, 1], [1, 0]]
    assert read(write(tmp_path, "source,target,label\na,b,x\n")).x.shape == (1, 0)


def test_a_folder_without_a_column_label_has_no_edge_table(tmp_path: Path) -> None:
    path = write(tmp_path, "source,target\na,b\n")
    assert load_graph_file(path, needs_labels=False).dataset.edges is None


def test_the_log_says_that_repeated_edges_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = ["a,b,odd", "a,b,normal", "b,a,normal", "a,a,odd"]
    path = write(tmp_path, "\n".join(["source,target,label", *rows, ""]))
    with caplog.at_level("INFO"):
        assert read(path).num_edges == 4
    assert (
        "all 4 edges with their classes are kept. Messages pass over 1 pairs of nodes, in "
        "both directions: 1 edges from a node to itself and 2 repeated edges"
        in caplog.text
    )


def test_classes_may_be_listed(tmp_path: Path) -> None:
    path = write(tmp_path, edge_classes="name\nodd\nnormal\nnever\n")
    assert read(path).class_names == ("odd", "normal", "never")
    assert_is_the_table(read(path))
    unlabelled = "source,target,label\na,b,\n"
    assert read(write(tmp_path, unlabelled)).y.tolist() == [-1]


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ("source,target,label\na,b,\n", "no edge has a label. List the classes in edge_c"),
        ("source,target,label\na,x,odd\n", r'line 2: target "x" is not an id in nodes'),
        ("source,target,label,time\na,b,o,2\nb,a,o,1\n", "line 3: time 1 goes backwards"),
        ("source,target,label,time\na,b,o,2\nb,a,o,\n", "line 3: time must .*empty cell"),
        ("source,target,label,time\na,b,o,2024-01-01\n", 'line 2: time .*"2024-01-01"'),
        ("source,target,label,time\na,b,o,nan\n", 'line 2: time must be a number.*"nan"'),
        ("source,target,label,amount\na,b,o,much\n", 'column "amount": expected a number'),
        ("source,target,label,amount\na,b,o,inf\n", "expected a finite number, got inf"),
        ("source,target,label,split\na,b,o,later\n", 'empty, got "later"'),
        ("source,target,label,label\na,b,o,o\n", "each once"),
        ("source,target,time\na,b,1\n", "Remove time, .*only together with a column lab"),
    ],
)  # fmt: skip
def test_bad_tables_are_refused_with_their_line(
    edges: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        load_graph_file(write(tmp_path, edges), needs_labels=False)


def test_a_class_that_is_not_listed_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, edge_classes="name\nodd\n")
    with pytest.raises(DataError, match=r'class "normal" is not in edge_classes\.csv'):
        load_graph_file(path, needs_labels=False)


def pyg_graph(**changes: Any) -> Data:
    fields: dict[str, Any] = {
        "x": torch.tensor([[1.0], [2.0], [3.0]]),
        "edge_index": torch.tensor([[0, 1, 0, 2], [1, 0, 1, 2]]),
        "edge_label": torch.tensor([1, 0, -1, 0]),
        "edge_time": torch.tensor([1, 1, 2.5, 3]),
        "edge_attr": torch.tensor([10, 20, 30, 40]),
        **{
            f"edge_{name}_mask": torch.tensor([i == place for i in range(4)])
            for name, place in (("train", 0), ("val", 1), ("test", 3))
        },
    }
    return Data(**(fields | changes))


def test_a_pyg_graph_becomes_the_same_table(tmp_path: Path) -> None:
    names: dict[str, Any] = {
        "edge_class_names": ["normal", "odd"],
        "edge_feature_names": ["amount"],
    }
    path = to_npz(pyg_graph(), tmp_path / "a.npz", **names)
    assert_is_the_table(read(path))
    with pytest.raises(DataError, match="class_names is missing"):
        load_graph_file(path)  # nodes have no classes
    both = to_npz(pyg_graph(y=torch.tensor([0, 1, 1])), tmp_path / "b.npz", **names)
    assert load_graph_file(both).dataset.y.tolist() == [0, 1, 1]
    assert_is_the_table(read(both))
    renamed = pyg_graph(edge_label=None, edge_y=torch.tensor([1, 0, -1, 0]))
    assert_is_the_table(read(to_npz(renamed, tmp_path / "c.npz", **names)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edge_time": torch.tensor([1.0, 3, 2, 4])}, "backwards at edge 2, from 3 to 2"),
        ({"edge_time": torch.tensor([1.0, 3, 4])}, "edge_time must hold one entry"),
        ({"edge_time": torch.tensor([1.0, 3, 4, torch.nan])}, "edge_time holds NaN"),
        ({"edge_label": torch.tensor([1, 0, 2])}, "edge_label must hold one entry"),
        ({"edge_label": torch.tensor([0, 0, -2, 1])}, "outside"),
        ({"edge_attr": torch.tensor([1.0, 3, 4, torch.inf])}, "edge_attr holds NaN or inf"),
        ({"edge_test_mask": None}, "but no edge_test_mask"),
        ({"edge_test_mask": torch.ones(4, dtype=torch.bool)}, "1 edges are in both masks"),
        ({"edge_label_index": torch.zeros(2, 4)}, "edge_label_index, which refers"),
    ],
)  # fmt: skip
def test_bad_pyg_graphs_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        to_npz(pyg_graph(**changes), tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edge_label": None}, r"label is missing, .* remove edge_class_n.* reads them"),
        ({"edge_class_names": np.array([1, 2])}, "edge_class_names must be a non-empty"),
        ({"edge_class_names": np.array(["a"])}, "labels are outside"),
        ({"edge_attr": np.array([["a"]] * 4)}, "edge_attr must hold numbers, got <U1"),
        ({"edge_attr": np.zeros(4)}, "edge_attr must hold one entry"),
        ({"edge_attr_names": np.array(["a", "b"])}, "one text for each column"),
        ({"edge_attr_names": np.array([""])}, "edge_attr_names: the features need diff"),
        ({"edge_train_mask": np.zeros(4)}, "edge_train_mask = edge_train_mask != 0"),
        ({"edge_train_mask": np.zeros(4, ">f4")}, "edge_train_mask = edge_train_mask != 0"),
        ({"edge_train_mask": np.zeros(4, "g")}, "edge_train_mask = edge_train_mask != 0"),
        ({"edge_train_mask": np.array([2, 0])}, r"numbers of edges.*zeros\(4, dtype=bool"),
        ({"edge_train_mask": np.array(["a"] * 4)}, "edge_train_mask must be bool, got <U1"),
        ({"edge_val_mask": None}, "a split of edges needs edge_train_mask, edge_val_mask"),
    ],
)  # fmt: skip
def test_bad_npz_arrays_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = to_npz(pyg_graph(), tmp_path / "a.npz")
    with np.load(path) as file:
        arrays = {**dict(file), **changes}
    np.savez(path, **{k: a for k, a in arrays.items() if a is not None})
    with pytest.raises(DataError, match=message):
        load_graph_file(path, needs_labels=False)
