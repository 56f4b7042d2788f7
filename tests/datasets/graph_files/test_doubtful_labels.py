"""Labels that are no classes: markers of unknown ones, ids, and several spellings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from flower_fgl import simulate
from flower_fgl.cli.check_graph import inspect_graph
from flower_fgl.cli.partition import export_clients
from flower_fgl.core.errors import DataError
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph
from flower_fgl.datasets.graph_files.graph_file import (
    load_graph_file,
    save_client_graph,
)
from flower_fgl.datasets.graph_files.validate import doubtful_labels
from flower_fgl.datasets.pyg_data import node_dataset, to_npz
from flower_fgl.datasets.store import open_store
from flower_fgl.methods import parse_config

COUNT = 24
RING = [(i, (i + 1) % COUNT) for i in range(COUNT)]
ELLIPTIC = ["1", "2", *["unknown"] * 4] * 4
IDS = [f"patient {i}" for i in range(COUNT)]
BY_TWO = [f"kind {i // 2}" for i in range(COUNT)]


def write_csv(folder: Path, labels: list[str], of: str, *listed: str) -> Path:
    """Write tables with the labels of nodes or edges; list classes if any are given."""
    folder.mkdir(exist_ok=True)
    nodes, edges = ("a", "b") * (COUNT // 2), ("p", "q") * (COUNT // 2)
    if of == "node":
        nodes = tuple(labels)
    else:
        edges = tuple(labels)
    rows = [f"n{i},{i % 5},{label}\n" for i, label in enumerate(nodes)]
    (folder / "nodes.csv").write_text("id,x,label\n" + "".join(rows))
    rows = [f"n{i},n{j},{e}\n" for (i, j), e in zip(RING, edges, strict=True)]
    (folder / "edges.csv").write_text("source,target,label\n" + "".join(rows))
    listing = "classes.csv" if of == "node" else "edge_classes.csv"
    if listed:
        (folder / listing).write_text("\n".join(["name", *listed]) + "\n")
    return folder


def write_npz(path: Path, labels: list[str], of: str, *declared: str) -> Path:
    """Write an ``.npz`` file with the labels of nodes or edges."""
    names, y = np.unique(labels, return_inverse=True)
    arrays: dict[str, Any] = {
        "x": np.ones((COUNT, 2)),
        "edges": np.array(RING),
        "y": np.arange(COUNT) % 2,
        "class_names": np.array(["a", "b"]),
    }
    keys = ("y", "class_names", "declared_classes")
    if of == "edge":
        keys = ("edge_label", "edge_class_names", "edge_declared_classes")
    arrays |= {keys[0]: y, keys[1]: names}
    if declared:
        arrays[keys[2]] = np.array(declared)
    np.savez(path, **arrays)
    return path


def to_graph(labels: list[str], of: str) -> tuple[Data, dict[str, Any]]:
    """Return a PyG graph with the labels, and the keywords of ``to_npz``."""
    names, y = np.unique(labels, return_inverse=True)
    x, edges = torch.ones(COUNT, 2), torch.tensor(RING).T
    if of == "node":
        data = Data(x=x, edge_index=edges, y=torch.tensor(y))
        return data, {"class_names": names.tolist()}
    data = Data(x=x, edge_index=edges, edge_label=torch.tensor(y))
    return data, {"edge_class_names": names.tolist()}


MARKERS = ["unknown", "UNKNOWN", "-1", "-1.0", "nan", "None", "NA", "N/A", "NULL", "?"]


@pytest.mark.parametrize("of", ["node", "edge"])
@pytest.mark.parametrize("marker", MARKERS)
def test_a_marker_of_unknown_classes_is_no_class(
    marker: str, of: str, tmp_path: Path
) -> None:
    labels = ["1", "2", *[marker] * 4] * 4
    found = f'16 of 24 labelled {of}s have the class "{marker}", which usually means'
    table, listing = (
        ("nodes.csv", "classes.csv")
        if of == "node"
        else ("edges.csv", "edge_classes.csv")
    )
    settings = {"setting": "edge"} if of == "edge" else {}
    (problem,) = inspect_graph(write_csv(tmp_path / "g", labels, of), settings).problems
    for text in (table, "column label", found, "Leave the cell empty", listing):
        assert text in problem
    (problem,) = inspect_graph(
        write_npz(tmp_path / "g.npz", labels, of), settings
    ).problems
    key, array = ("y", "declared") if of == "node" else ("edge_label", "edge_declared")
    for text in (found, f"Set {key} to -1", f"{array}_classes"):
        assert text in problem
    data, names = to_graph(labels, of)
    with pytest.raises(DataError, match="declared_classes") as error:
        to_npz(data, tmp_path / "h.npz", **names)
    assert found in str(error.value)
    assert f"Set {key} to -1" in str(error.value)


@pytest.mark.parametrize("of", ["node", "edge"])
@pytest.mark.parametrize(("labels", "number"), [(ELLIPTIC, 3), (IDS, COUNT)])
def test_classes_that_the_owner_declares_are_classes(
    labels: list[str], number: int, of: str, tmp_path: Path
) -> None:
    classes = sorted(set(labels))
    folder = write_csv(tmp_path / "g", labels, of, *classes)
    file = write_npz(tmp_path / "g.npz", labels, of, *classes)
    data, names = to_graph(labels, of)
    made = to_npz(data, tmp_path / "h.npz", **names, declared_classes=classes)
    for path in (folder, file, made):
        dataset = load_graph_file(path, needs_labels=of == "node").dataset
        assert dataset.edges is not None or of == "node"
        found = dataset.class_names if of == "node" else dataset.edges.class_names  # type: ignore[union-attr]
        assert len(found) == number
        assert sorted(found) == classes


@pytest.mark.parametrize("of", ["node", "edge"])
def test_ids_are_no_classes(of: str, tmp_path: Path) -> None:
    found = f"24 labelled {of}s have 24 different classes, such as"
    settings = {"setting": "edge"} if of == "edge" else {}
    for path in (
        write_csv(tmp_path / "g", IDS, of),
        write_npz(tmp_path / "g.npz", IDS, of),
    ):
        (problem,) = inspect_graph(path, settings).problems
        assert found in problem
        assert "names of classes leave their owner" in problem
    data, names = to_graph(IDS, of)
    with pytest.raises(DataError, match=found):
        to_npz(data, tmp_path / "h.npz", **names)
    with pytest.raises(DataError, match=found):
        node_dataset(data, "numbers")
    with pytest.raises(DataError, match=found):
        simulate("fedavg", data, clients=2, rounds=1)


def test_small_graphs_and_rare_classes_are_left_alone() -> None:
    for labels, names in (
        (list(range(9)), [f"class {i}" for i in range(9)]),  # too few to tell
        ([i // 2 for i in range(COUNT)], [f"class {i}" for i in range(12)]),
        ([0, 1, 1, -1], ["flu", "cold", "unknown"]),  # no node of the marked class
        ([-1] * COUNT, IDS),
    ):
        assert doubtful_labels(torch.tensor(labels), names) == ""
    assert doubtful_labels(torch.arange(10), IDS[:10])


def test_unlabelled_cells_beside_a_list_without_the_marker_are_explained(
    tmp_path: Path,
) -> None:
    folder = write_csv(tmp_path / "g", ELLIPTIC, "node", "1", "2")
    with pytest.raises(
        DataError, match=r'"unknown" is not in classes\.csv.*leave the cell empty'
    ):
        load_graph_file(folder)


@pytest.mark.parametrize("names", [("Fraud", "fraud"), ("1", "1.0"), ("a b", "a  B")])
@pytest.mark.parametrize("of", ["node", "edge"])
def test_one_file_spells_a_class_in_one_way(
    of: str, names: tuple[str, str], tmp_path: Path
) -> None:
    labels = [*names, "fine"] * (COUNT // 3)
    data, keywords = to_graph(labels, of)
    for listed in ((), (*names, "fine")):
        with pytest.raises(DataError, match="spells a class"):
            load_graph_file(write_csv(tmp_path / "g", labels, of, *listed))
    with pytest.raises(DataError, match="spells a class"):
        load_graph_file(write_npz(tmp_path / "g.npz", labels, of))
    with pytest.raises(DataError, match="spells a class"):
        to_npz(data, tmp_path / "h.npz", **keywords)


@pytest.mark.parametrize("bad", [np.array(["3"]), np.array([1]), np.array("unknown")])
def test_declared_classes_are_names_of_classes(bad: Any, tmp_path: Path) -> None:
    path = write_npz(tmp_path / "g.npz", ["1", "2"] * (COUNT // 2), "node")
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **arrays, declared_classes=bad)
    with pytest.raises(DataError, match="declared_classes must be a list of names in"):
        load_graph_file(path)


def test_exported_graphs_can_be_used(tmp_path: Path) -> None:
    folder = write_csv(tmp_path / "g", ELLIPTIC, "node", "1", "2", "unknown")
    settings = {"dataset": str(folder), "clients": 2, "partition": "louvain"}
    for path in export_clients(parse_config(settings), tmp_path / "out"):
        assert inspect_graph(path, {}).problems == []
        assert load_graph_file(path).dataset.class_names == ("1", "2", "unknown")


def test_small_parts_of_a_dataset_of_many_classes_can_be_used(tmp_path: Path) -> None:
    config = parse_config({"dataset": "synthetic", "clients": 3})
    client: ClientGraph = open_store(config, 3).load(0)
    number = client.graph.num_nodes
    y = torch.arange(number) % (number - 2)
    graph = replace(client.graph, y=y)
    names = tuple(f"field {c}" for c in range(number))
    path = tmp_path / "part.npz"
    save_client_graph(path, replace(client, graph=graph, target=Target.classes(names)))
    assert torch.equal(load_graph_file(path).dataset.y, y)
