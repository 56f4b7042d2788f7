"""Labels and numbers in owners' files: ``.npz`` and CSV, nodes and edges."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flower_fgl.core.errors import DataError
from flower_fgl.core.targets import LABELS, NUMBERS, Target
from flower_fgl.datasets.graph_files.graph_file import (
    inspect_graph_file,
    load_graph_file,
    save_client_graph,
)
from flower_fgl.datasets.owned import client_from_file
from flower_fgl.methods import parse_config

NAN = float("nan")
GRAPH = {"x": np.eye(4), "edges": np.array([[0, 1], [1, 2], [2, 3]])}
TWO = {
    "y": np.array([[1.5, NAN], [NAN, NAN], [2.5, 3.0], [-1.0, 4.0]]),
    "target_names": np.array(["logS", "density"]),
    "target_units": np.array(["log mol/L", ""]),
}


def write(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **(GRAPH | arrays))
    return path


def test_numbers_of_nodes_are_read_with_names_units_and_holes(tmp_path: Path) -> None:
    owned = load_graph_file(write(tmp_path / "a.npz", **TWO))
    dataset = owned.dataset
    assert dataset.target == Target(NUMBERS, ("logS", "density"), ("log mol/L", ""))
    assert dataset.y.tolist() == [0, -1, 0, 0]
    assert dataset.targets is not None
    np.testing.assert_array_equal(dataset.targets.numpy(), TWO["y"])
    places = torch.tensor([0, -1, 1, 2])
    masks = {n: places == k for k, n in enumerate(("train", "val", "test"))}
    copy = tmp_path / "b.npz"
    save_client_graph(copy, owned.client_graph(0, masks))
    again = load_graph_file(copy).dataset
    assert again.target == dataset.target
    assert torch.equal(again.targets.nan_to_num(9), dataset.targets.nan_to_num(9))


def test_labels_of_nodes_are_read(tmp_path: Path) -> None:
    y = np.array([[1, 0], [-1, -1], [0, -1], [1, 1]])
    path = write(tmp_path / "a.npz", y=y, label_names=np.array(["toxic", "acid"]))
    dataset = load_graph_file(path).dataset
    assert dataset.target == Target(LABELS, ("toxic", "acid"))
    assert dataset.targets.dtype == torch.int8
    assert dataset.targets.tolist() == y.tolist()
    assert dataset.y.tolist() == [0, -1, 0, 0]


def test_numbers_of_edges_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.npz",
        edge_target=np.array([1.0, NAN, -2.0]),
        edge_target_names=np.array(["rating"]),
    )
    edges = load_graph_file(path, needs_labels=False).dataset.edges
    assert edges is not None
    assert edges.target == Target(NUMBERS, ("rating",))
    assert edges.y.tolist() == [0, -1, 0]
    assert edges.targets.nan_to_num(9).tolist() == [[1], [9], [-2]]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y": np.ones(4)}, "y holds numbers, not classes. Add target_names"),
        (
            TWO | {"class_names": np.array(["a"])},
            "class_names and target_names are both",
        ),
        (
            {"y": TWO["y"], "target_names": np.array(["a", "b", "c"])},
            "2 columns, but there are 3",
        ),
        (TWO | {"y": TWO["y"][:3]}, "one row per node and one column per target name"),
        (
            TWO | {"y": np.where(np.isnan(TWO["y"]), np.inf, TWO["y"])},
            'holds 3 infinite values, the first at node 0, "density"',
        ),
        (
            TWO | {"y": TWO["y"] * 1e300},
            'holds 5 numbers beyond ±1e+15, the first at node 0, "logS". Choose a larger',
        ),
        (
            TWO | {"target_names": np.array(["logS", "LOGS"])},
            'spells a target "logS" and "LOGS"',
        ),
        (TWO | {"y": TWO["y"] * NAN}, 'no node has a value of "logS" or any other'),
        (TWO | {"target_units": np.array(["m"])}, "target_units must be 2 texts"),
        (
            {"y": np.full((4, 1), 2), "label_names": np.array(["a"])},
            "1 if an item has the label",
        ),
    ],
)
def test_a_bad_target_gives_one_error(arrays, message, tmp_path: Path) -> None:
    owned, problems = inspect_graph_file(write(tmp_path / "a.npz", **arrays))
    assert owned is None
    assert len(problems) == 1
    assert message in problems[0]


def tables(folder: Path, nodes: str, edges: str, **others: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "nodes.csv").write_text(nodes)
    (folder / "edges.csv").write_text(edges)
    for name, text in others.items():
        (folder / f"{name}.csv").write_text(text)
    return folder


EDGES = "source,target\na,b\nb,c\n"


def test_csv_columns_of_numbers_with_units(tmp_path: Path) -> None:
    folder = tables(
        tmp_path / "own",
        "id,f,target:logS,target:density\na,1,-2.5,\nb,2,,1e0\nc,3,,\n",
        EDGES,
        targets="name,unit\nlogS,log mol/L\nmelting,K\n",
    )
    dataset = load_graph_file(folder).dataset
    names = ("logS", "density", "melting")
    assert dataset.target == Target(NUMBERS, names, ("log mol/L", "", "K"))
    assert dataset.feature_names == ("f",)
    assert dataset.targets.nan_to_num(9).tolist() == [
        [-2.5, 9, 9],
        [9, 1, 9],
        [9, 9, 9],
    ]
    single = tables(tmp_path / "own", "id,f,target\na,1,2\nb,2,\nc,3,4\n", EDGES)
    (single / "targets.csv").unlink()
    assert load_graph_file(single).dataset.target == Target(NUMBERS, ("target",))


def test_csv_columns_of_labels(tmp_path: Path) -> None:
    folder = tables(
        tmp_path / "own", "id,f,label:toxic,label:acid\na,1,1,0\nb,2,,1\nc,3,,\n", EDGES
    )
    dataset = load_graph_file(folder).dataset
    assert dataset.target == Target(LABELS, ("toxic", "acid"))
    assert dataset.targets.tolist() == [[1, 0], [-1, 1], [-1, -1]]


def test_csv_numbers_of_edges(tmp_path: Path) -> None:
    folder = tables(
        tmp_path / "own",
        "id,f,label\na,1,x\nb,2,y\nc,3,x\n",
        "source,target,amount,target:rating\na,b,5,-10\nb,c,6,\n",
    )
    edges = load_graph_file(folder).dataset.edges
    assert edges is not None
    assert edges.target == Target(NUMBERS, ("rating",))
    assert edges.feature_names == ("amount",)
    assert edges.targets.nan_to_num(9).tolist() == [[-10], [9]]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            "id,f,target\na,1,high\nb,1,2\nc,1,2\n",
            'line 2, column "target": expected a f',
        ),
        ("id,f,target\na,1,inf\nb,1,2\nc,1,2\n", "expected a finite number"),
        (
            "id,f,label,target\na,1,x,1\nb,1,x,2\nc,1,x,2\n",
            "label, target, of several kin",
        ),
        ("id,f,target:\na,1,1\nb,1,2\nc,1,2\n", 'the column "target:" has no name'),
        ("id,f,label:a\na,1,2\nb,1,1\nc,1,0\n", "expected 0 or 1"),
        ("id,f,Target:a\na,1,2\nb,1,1\nc,1,0\n", '"Target:a" is not read'),
        ("id,target:a,target :b\na,1,2\nb,1,1\nc,1,0\n", '"target :b" is not read'),
        ("id,f,target\na,1,-1e300\nb,1,2\nc,1,2\n", "1 numbers beyond ±1e+15"),
    ],
)
def test_a_bad_column_gives_one_error(nodes, message, tmp_path: Path) -> None:
    owned, problems = inspect_graph_file(tables(tmp_path / "own", nodes, EDGES))
    assert owned is None
    assert len(problems) == 1
    assert message in problems[0]


@pytest.mark.parametrize("column", ["label:rating", "Target:rating"])
def test_a_target_of_edges_in_another_spelling_is_no_feature(
    column: str, tmp_path: Path
) -> None:
    edges = f"source,target,{column}\na,b,5\nb,c,6\n"
    folder = tables(tmp_path / "own", "id,f\na,1\nb,2\nc,3\n", edges)
    owned, problems = inspect_graph_file(folder, needs_labels=False)
    assert owned is None
    assert [
        f'"{column}" is not read as a target' in problem for problem in problems
    ] == [1]


def test_a_target_of_nodes_that_is_not_read_is_named(tmp_path: Path) -> None:
    folder = tables(tmp_path / "own", "id,f,target\na,1,2\nb,1,1\nc,1,0\n", EDGES)
    owned, _ = inspect_graph_file(folder, needs_labels=False)
    assert owned is not None
    assert "nodes.csv: target will not be read" in owned.notes[0]


def test_the_kind_of_a_file_must_be_that_of_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz", **TWO)
    classes = parse_config({"owners": str(tmp_path), "target-kind": "classes"})
    with pytest.raises(DataError, match="holds numbers, but this run predicts classes"):
        client_from_file(path, classes)
    config = parse_config({"owners": str(tmp_path), "target-kind": "numbers"})
    assert client_from_file(path, config).target.width == 2
    one = parse_config(
        {"owners": str(tmp_path), "target-kind": "numbers", "target": "density"}
    )
    client = client_from_file(path, one)
    assert client.target == Target(NUMBERS, ("density",))
    assert client.graph.y.tolist() == [-1, -1, 0, 0]
    other = parse_config(
        {"owners": str(tmp_path), "target-kind": "numbers", "target": "densitty"}
    )
    with pytest.raises(DataError, match=r"none of its numbers.*density"):
        client_from_file(path, other)
