"""Classes and numbers of the edges of one relation of a typed graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import HeteroData

from flower_fgl import simulate
from flower_fgl.core.errors import DataError
from flower_fgl.datasets.client_graph import ClientGraph
from flower_fgl.datasets.graph_files.graph_file import (
    LocalGraphFile,
    load_graph_file,
    save_client_graph,
)
from flower_fgl.datasets.owned import client_from_owned
from flower_fgl.methods import parse_config
from tests.support.owners import run_owners
from tests.support.typed_graphs import airline, write_tables

SIZES: dict[str, Any] = {
    "setting": "edge",
    "model": "rgcn",
    "hidden_channels": 8,
    "rounds": 2,
}


def own(folder: Path, **options: Any) -> Path:
    """Write three airlines."""
    for number in range(3):
        write_tables(folder / "own" / f"air{number}", airline(number, **options))
    return folder / "own"


def archived(folder: Path, path: Path) -> None:
    """Write an airline as an archive without names of features."""
    dataset = read(folder).dataset
    assert dataset.edges is not None
    client = ClientGraph(
        0,
        dataset.graph({}),
        dataset.target,
        torch.arange(dataset.num_nodes),
        edges=replace(dataset.edges, feature_names=()),
        schema=dataset.schema,
    )
    save_client_graph(path, client)


def read(folder: Path) -> LocalGraphFile:
    """Read an airline without labels of nodes."""
    return load_graph_file(folder, needs_labels=False)


def test_a_table_of_edges_becomes_the_predicted_ones(tmp_path: Path) -> None:
    owned = read(write_tables(tmp_path / "air", airline(0)))
    dataset = owned.dataset
    table, schema = dataset.edges, dataset.schema
    assert table is not None
    assert schema is not None
    flies = ("airport", "flies", "airport")
    assert schema.predicted == flies
    lines = airline(0)["edges/flies.csv"].splitlines()[1:]
    cells = [line.split(",") for line in lines]
    assert table.pairs.T.tolist() == [[int(c[0]), int(c[1])] for c in cells]
    names = {"": -1, **{name: k for k, name in enumerate(table.class_names)}}
    assert table.y.tolist() == [names[c[2]] for c in cells]
    assert table.feature_names == ("a", "b")
    expected = torch.tensor([[float(c[3]), float(c[4])] for c in cells])
    torch.testing.assert_close(table.x, expected)
    assert dataset.messages is not None
    assert dataset.messages.relation is not None
    distinct = {(c[0], c[1]) for c in cells}
    assert int((dataset.messages.relation == 0).sum()) == len(distinct)


def test_classes_of_edges_may_be_listed(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "air", airline(0))
    (folder / "edge_classes.csv").write_text("name\nown\ncharter\ncodeshare\n")
    table = read(folder).dataset.edges
    assert table is not None
    assert table.class_names == ("own", "charter", "codeshare")
    (folder / "edge_classes.csv").write_text("name\nown\n")
    with pytest.raises(DataError, match=r'"codeshare" is not in edge_classes\.csv'):
        read(folder)


def test_an_archive_holds_the_same_edges(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "air", airline(0, has_time=True))
    dataset = read(folder).dataset
    archived(folder, tmp_path / "air.npz")
    found = read(tmp_path / "air.npz").dataset
    assert found.schema == dataset.schema
    assert found.edges is not None
    assert dataset.edges is not None
    for name in ("pairs", "y", "x", "time"):
        one, other = getattr(found.edges, name), getattr(dataset.edges, name)
        assert torch.equal(one, other), name
    assert found.edges.target == dataset.edges.target
    assert found.messages is not None
    assert dataset.messages is not None
    assert torch.equal(found.messages.index, dataset.messages.index)


@pytest.mark.parametrize("has_time", [False, True])
@pytest.mark.parametrize("align", ["same", "name"])
def test_a_deployment_gives_the_numbers_of_a_simulation(
    align: str, has_time: bool, tmp_path: Path
) -> None:
    folder = own(tmp_path, has_time=has_time)
    if align == "name":  # one has no planes
        tables = airline(1, has_time=has_time)
        text = tables["relations.csv"].replace("serves,plane,airport\n", "")
        for path in ("edges/serves.csv", "nodes/plane.csv"):
            (folder / "air1" / path).unlink()
        (folder / "air1" / "relations.csv").write_text(text)
    values = SIZES | {"schema_align": align, "rounds": 12, "lr": 0.05}
    simulated = simulate(
        "fedavg", owners=str(folder), output_dir=str(tmp_path), **values
    )
    nodes = [{"graph": str(path)} for path in sorted(folder.iterdir())]
    deployed = run_owners(nodes, tmp_path / "run", **values)

    def numbers(run: Any) -> list[Any]:
        return [
            (row["loss"], row["metrics"]["local"]["test"]["auroc"])
            for row in run.rounds
        ]

    assert numbers(deployed) == numbers(simulated)
    assert len(numbers(deployed)) == 12
    assert simulated.summary["best"]["test"]["auroc"] > 0.9  # a feature tells the class


def test_later_edges_and_those_that_show_them_pass_no_messages(tmp_path: Path) -> None:
    tables = airline(0, has_time=True)
    pairs = [line.split(",")[:2] for line in tables["edges/flies.csv"].splitlines()[1:]]
    back = sorted({(b, a) for a, b in pairs})
    tables["relations.csv"] += "back,airport,airport\n"
    tables["edges/back.csv"] = "\n".join(
        ["source,target", *(f"{a},{b}" for a, b in back), ""]
    )
    config = parse_config({"setting": "edge", "model": "rgcn"})
    client = client_from_owned(read(write_tables(tmp_path / "air", tables)), config)
    (test,) = client.evaluation
    assert client.schema is not None
    names = [one[1] for one in client.schema.relations]
    for graph, parts in ((client.graph, ("train",)), (test, ("train", "val"))):
        first = 200 * (60 + 20 * (len(parts) - 1)) // 100  # about: labels are missing
        messages = graph.messages
        assert messages is not None
        assert messages.relation is not None
        of = {
            name: messages.index[:, messages.relation == number]
            for number, name in enumerate(names)
        }
        earlier = {(int(a), int(b)) for a, b in pairs[: first - 12]}
        later = {(int(a), int(b)) for a, b in pairs[first + 12 :]}
        sent = {tuple(pair) for pair in of["flies"].T.tolist()}
        assert earlier <= sent
        assert not (later - {(int(a), int(b)) for a, b in pairs[: first + 12]}) & sent
        shown = {frozenset(pair) for pair in of["back"].T.tolist()}
        assert shown == {frozenset(pair) for pair in sent}
        assert of["serves"].shape[1] == len(tables["edges/serves.csv"].splitlines()) - 1


def test_edges_are_predicted_by_name(tmp_path: Path) -> None:
    folder = own(tmp_path, has_time=True)
    values = SIZES | {"rounds": 12, "lr": 0.05, "share_feature_names": True}
    run = simulate("fedavg", owners=str(folder), output_dir=str(tmp_path), **values)
    new = write_tables(tmp_path / "new", airline(7, has_time=True))
    found = run.predict(new)
    lines = [line.split(",") for line in airline(7)["edges/flies.csv"].splitlines()[1:]]
    assert [str(one) for one in found["source"]] == [line[0] for line in lines]
    known = [k for k, line in enumerate(lines) if line[2]]
    right = [found["predicted"][k] == lines[k][2] for k in known]
    assert sum(right) > 0.85 * len(right)
    some = run.predict(new, only_unknown=True)
    assert len(some) == 10
    later = run.predict(new, from_time=150)
    assert later["time"].min() == 150
    assert len(later) == 50
    other = write_tables(tmp_path / "b", airline(7, has_time=True, columns="b,a"))
    swapped = run.predict(other)
    torch.testing.assert_close(
        torch.tensor(swapped["p:own"].to_numpy()),
        torch.tensor(found["p:own"].to_numpy()),
        check_dtype=False,
    )
    with pytest.raises(DataError, match=r"expected 2 features of edges .*, got 1"):
        run.predict(write_tables(tmp_path / "one", airline(7, columns="a")))


def test_an_owner_with_other_features_of_edges_is_left_out(tmp_path: Path) -> None:
    folder = own(tmp_path)
    write_tables(folder / "air3", airline(3, columns="b,a"))
    values = SIZES | {"schema_align": "name"}
    with pytest.raises(DataError, match="air3: the features of its edges differ in"):
        simulate("fedavg", owners=str(folder), output_dir=str(tmp_path), **values)
    nodes = [{"graph": str(path)} for path in sorted(folder.iterdir())]
    run = run_owners(nodes, tmp_path / "run", **values)
    (refused,) = run.summary["refused"]
    assert refused["name"] == "air3"
    write_tables(folder / "air3", airline(3, columns="a"))
    with pytest.raises(DataError, match="air3: the features of its edges differ in"):
        simulate("fedavg", owners=str(folder), output_dir=str(tmp_path), **values)
    (tmp_path / "unnamed").mkdir()
    for number in (0, 3):
        archived(folder / f"air{number}", tmp_path / "unnamed" / f"{number}.npz")
    with pytest.raises(DataError, match=r"different numbers of features \(0: 2, 3: 1"):
        simulate(
            "fedavg",
            owners=str(tmp_path / "unnamed"),
            output_dir=str(tmp_path),
            **SIZES,
        )


def test_numbers_of_edges_are_predicted(tmp_path: Path) -> None:
    for number in range(3):
        tables = airline(number)
        header, *lines = tables["edges/flies.csv"].splitlines()
        cells = [line.split(",") for line in lines]
        rows = [",".join([*c[:2], c[3], *c[3:]]) for c in cells]
        header = header.replace("label", "target:delay")
        tables["edges/flies.csv"] = "\n".join([header, *rows, ""])
        write_tables(tmp_path / "own" / f"air{number}", tables)
    run = simulate(
        "fedavg",
        owners=str(tmp_path / "own"),
        output_dir=str(tmp_path),
        target_kind="numbers",
        **SIZES | {"rounds": 20, "lr": 0.05},
    )
    assert run.summary["best"]["test"]["rmse"] < 0.5


def test_labels_of_two_relations_need_a_choice(tmp_path: Path) -> None:
    folder = own(tmp_path)
    for number in range(3):
        path = folder / f"air{number}" / "edges" / "serves.csv"
        _, *lines = path.read_text().splitlines()
        rows = [f"{line},{'x' if k % 2 else 'z'}" for k, line in enumerate(lines)]
        path.write_text("\n".join(["source,target,label", *rows, ""]))
    with pytest.raises(DataError, match="or those of several relations do"):
        simulate("fedavg", owners=str(folder), output_dir=str(tmp_path), **SIZES)
    values = SIZES | {"target_relation": "serves"}
    run = simulate("fedavg", owners=str(folder), output_dir=str(tmp_path), **values)
    assert run.summary["best"]["test"]["num_nodes"] > 20
    values["target_relation"] = "lands"
    with pytest.raises(DataError, match='no edges of the relation "lands" have labels'):
        simulate("fedavg", owners=str(folder), output_dir=str(tmp_path), **values)


def hetero_airline(seed: int, folder: Path) -> HeteroData:
    """Return an airline as PyG's object."""
    dataset = read(write_tables(folder, airline(seed, has_time=True))).dataset
    table, data = dataset.edges, HeteroData()
    assert table is not None
    assert table.time is not None
    assert dataset.messages is not None
    data["airport"].x, data["plane"].x = dataset.x[:30, :2], dataset.x[30:, 2:]
    serves = dataset.messages.index[:, dataset.messages.relation == 1]
    flies = data["airport", "flies", "airport"]
    flies.edge_index, flies.edge_label = table.pairs, table.y
    flies.edge_attr, flies.edge_time = table.x, table.time
    data["plane", "serves", "airport"].edge_index = serves - torch.tensor([[30], [0]])
    return data


def test_pyg_graphs_give_the_numbers_of_tables(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, output = own(tmp_path, has_time=True), str(tmp_path)
    graphs = [hetero_airline(k, tmp_path / "h" / str(k)) for k in range(3)]
    of_tables = simulate("fedavg", owners=str(folder), output_dir=output, **SIZES)
    of_graphs = simulate("fedavg", dataset=graphs, output_dir=output, **SIZES)
    assert [row["loss"] for row in of_graphs.rounds] == [
        row["loss"] for row in of_tables.rounds
    ]
    assert "not used" not in caplog.text
    found, due = of_graphs.predict(graphs[0]), of_tables.predict(folder / "air0")
    torch.testing.assert_close(
        torch.tensor(found["p:0"].to_numpy()),
        torch.tensor(due["p:codeshare"].to_numpy()),
        check_dtype=False,
    )
    del graphs[0]["airport", "flies", "airport"].edge_label  # new edges have none
    assert of_graphs.predict(graphs[0]).equals(found)
    del graphs[0]["airport", "flies", "airport"]
    with pytest.raises(DataError, match="lists no edges of the relation"):
        of_graphs.predict(graphs[0])


def test_a_partition_of_one_graph_keeps_its_edges(tmp_path: Path) -> None:
    run = simulate(
        "fedavg",
        dataset=hetero_airline(0, tmp_path / "air"),
        clients=2,
        partition="uniform",
        output_dir=str(tmp_path),
        **SIZES,
    )
    assert run.summary["best"]["test"]["num_nodes"] > 10
