"""``target-kind = "auto"`` of owners' files: the kind that most of them hold."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch_geometric.data import Data

from flower_fgl import simulate
from flower_fgl.cli.check_graph import inspect_graph
from flower_fgl.cli.rehearsal import plan_rehearsal
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.core import held_kind
from flower_fgl.core.errors import ConfigError, DataError, RunError
from flower_fgl.core.held_kind import kind_of_most
from flower_fgl.core.targets import CLASSES, LABELS, NUMBERS
from flower_fgl.methods import parse_config
from tests.support.owners import run_owners

NODES = 60


def write(folder: Path, names: Sequence[str], seed: int = 0) -> list[Path]:
    """Write one graph of classes, labels or numbers per owner, by the letter of a name."""
    folder.mkdir(exist_ok=True)
    paths = []
    for number, name in enumerate(names):
        draw, ring = np.random.default_rng((seed, number)), np.arange(NODES)
        x = draw.normal(size=(NODES, 3)).astype(np.float32)
        numbers = x.sum(axis=1, dtype=np.float64) + draw.normal(size=NODES)
        target = {
            "c": {"y": (numbers > 0).astype(int), "class_names": np.array(["a", "b"])},
            "l": {"y": (x[:, :2] > 0).astype(int), "label_names": np.array(["p", "q"])},
            "n": {"y": numbers, "target_names": np.array(["t"])},
        }[name[0]]
        path = folder / f"{name}.npz"
        edges = np.stack([ring, (ring + 1) % NODES], axis=1)
        np.savez(path, x=x, edges=edges, **target)  # type: ignore[arg-type]
        paths.append(path)
    return paths


def tables(folder: Path, **headers: str) -> Path:
    """Write tables that hold only a header; a name with ``_`` is in a folder."""
    for name, header in headers.items():
        path = folder / f"{name.replace('_', '/')}.csv"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(f"\ufeff{header}\n")
    return folder


@pytest.mark.parametrize(
    ("setting", "headers", "kind"),
    [
        ("transductive", {"nodes": "id,f,label"}, CLASSES),
        ("transductive", {"nodes": "id,f, target"}, NUMBERS),
        ("transductive", {"nodes": "id,f,label:p,label:q"}, LABELS),
        ("transductive", {"nodes": "id,f,label,target:t"}, CLASSES),  # the reader asks
        ("graph", {"nodes": "graph,id,f", "graphs": "id,target:t"}, NUMBERS),
        ("graph", {"graphs": "id,smiles,target"}, NUMBERS),
        ("edge", {"nodes": "id,label", "edges": "source,target,label"}, CLASSES),
        ("edge", {"nodes": "id,label", "edges": "source,target,target:t"}, NUMBERS),
        ("link", {"nodes": "id,target", "edges": "source,target"}, CLASSES),
        (
            "transductive",
            {"relations": "", "nodes_a": "id,target", "nodes_b": "id"},
            NUMBERS,
        ),
        (
            "edge",
            {"relations": "", "edges_r": "source,target,target:t"},
            NUMBERS,
        ),
    ],
)
def test_auto_reads_the_kind_from_the_tables_of_an_owner(
    setting: str, headers: dict[str, str], kind: str, tmp_path: Path
) -> None:
    tables(tmp_path / "one", **headers)
    config = parse_config({"owners": str(tmp_path), "setting": setting, "model": "gcn"})
    assert config.predicts == kind
    assert config.target_kind == ("auto" if kind == CLASSES else kind)
    assert (config.sources["target-kind"] == "data set") == (kind != CLASSES)


def test_a_client_looks_into_its_file_once_for_all_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, column in (("one", "target"), ("two", "label")):
        tables(tmp_path / name, nodes=f"id,f,{column}")
    seen: list[Path] = []
    kind = held_kind._kind
    monkeypatch.setattr(
        held_kind, "_kind", lambda path, values: seen.append(path) or kind(path, values)
    )
    session = Session()
    for name, number, expected in (("one", 3, NUMBERS), ("two", 1, CLASSES)):
        node = {"graph": str(tmp_path / name)}
        for _ in range(number):
            context = Context(1, 1, node, RecordDict(), {"model": "gcn"})
            assert session.config(context).predicts == expected
    assert [path.name for path in seen] == ["one", "two"]


def test_auto_is_the_kind_of_the_majority_and_never_replaces_a_choice(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path / "owners")
    write(tmp_path / "owners", ["n1", "n2", "c1", "c2"])
    assert parse_config({"owners": folder}).target_kind == "auto"
    config = parse_config({"owners": folder, "without-owners": "c1"})
    assert config.target_kind == NUMBERS
    assert config.main_score == "rmse"
    chosen = parse_config(
        {"owners": folder, "without-owners": "c1,c2", "target-kind": CLASSES}
    )
    assert chosen.target_kind == CLASSES
    listed = ",".join(str(tmp_path / "owners" / f"{n}.npz") for n in ("n1", "c1", "n2"))
    assert parse_config({"owners": listed}).target_kind == NUMBERS
    one = parse_config({"dataset": str(tmp_path / "owners" / "n1.npz")})
    assert one.target_kind == NUMBERS
    assert kind_of_most([]) == CLASSES
    molecules = {"owners": "ogbg-molesol,ogbg-mollipo", "setting": "graph"}
    assert parse_config(molecules).target_kind == NUMBERS


def test_a_file_that_cannot_be_read_is_left_to_its_reader(tmp_path: Path) -> None:
    (tmp_path / "bad.npz").write_bytes(b"PK")
    assert parse_config({"owners": str(tmp_path)}).target_kind == "auto"
    assert parse_config({"owners": str(tmp_path / "none.npz")}).target_kind == "auto"


@pytest.mark.parametrize("kind", [LABELS, NUMBERS])
def test_a_simulation_equals_the_one_with_the_kind_set(
    kind: str, tmp_path: Path
) -> None:
    write(tmp_path / "owners", [f"{kind[0]}1", f"{kind[0]}2"])
    rows = []
    for name, more in (("auto", {}), ("set", {"target_kind": kind})):
        run = simulate(
            owners=str(tmp_path / "owners"),
            rounds=2,
            run_dir=str(tmp_path / name),
            **more,
        )
        assert run.config["target-kind"] == kind
        assert run.summary["target"]["kind"] == kind
        rows.append(json.dumps([_scores(row) for row in run.rounds], sort_keys=True))
    assert rows[0] == rows[1]


def _scores(row: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in row.items() if key != "seconds"}


def test_an_owner_of_another_kind_is_named_in_a_simulation(tmp_path: Path) -> None:
    write(tmp_path / "owners", ["n1", "n2", "c1"])
    with pytest.raises(
        DataError, match="c1 holds classes, but this run predicts numbers"
    ):
        simulate(owners=str(tmp_path / "owners"), rounds=1, output_dir=str(tmp_path))


def test_a_method_that_cannot_predict_the_kind_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "owners", ["n1", "n2"])
    with pytest.raises(ConfigError, match="fedproto learns classes"):
        parse_config({"owners": str(tmp_path / "owners"), "method": "fedproto"})


def test_data_owners_of_the_majority_take_part_in_a_deployment(tmp_path: Path) -> None:
    """The server learns the kind from descriptions, and asks the owners again."""
    nodes = [{"graph": str(p)} for p in write(tmp_path / "g", ["n1", "n2", "c1"])]
    run = run_owners(nodes, tmp_path / "auto")
    assert run.status == "completed"
    assert [one["name"] for one in run.summary["refused"]] == ["c1"]
    assert "its targets are classes" in run.summary["refused"][0]["reason"]
    assert run.config["target-kind"] == NUMBERS
    assert (
        'target-kind = "numbers"  # data set'
        in (tmp_path / "auto/config.toml").read_text()
    )
    assert run.summary["metric"] == "rmse"
    explicit = run_owners(nodes[:2], tmp_path / "set", target_kind=NUMBERS)
    assert [_scores(row) for row in run.rounds] == [_scores(r) for r in explicit.rounds]


def test_an_owner_whose_kind_the_method_lacks_is_left_out_by_name(
    tmp_path: Path,
) -> None:
    nodes = [{"graph": str(p)} for p in write(tmp_path / "g", ["c1", "c2", "n1"])]
    run = run_owners(nodes, tmp_path / "run", method="fedproto")
    assert run.config["target-kind"] == "auto"
    (refused,) = run.summary["refused"]
    assert refused["name"] == "n1"
    assert "fedproto learns classes, and cannot predict numbers" in refused["reason"]


def test_a_deployment_of_numbers_resumes_with_auto(tmp_path: Path) -> None:
    nodes = [{"graph": str(p)} for p in write(tmp_path / "g", ["n1", "n2"])]
    settings = {"checkpoint_every": 1, "rounds": 3}

    def stop(row: dict[str, object]) -> None:
        if row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_owners(nodes, tmp_path / "run", "deployment", stop, **settings)
    again = run_owners(nodes, tmp_path / "run", "deployment", resume=True, **settings)
    assert again.status == "completed"
    assert again.config["target-kind"] == NUMBERS


@pytest.mark.parametrize(
    ("node", "settings", "message"),
    [
        (
            {},
            {"method": "fedproto"},
            "fedproto learns classes, and cannot predict numbers",
        ),
        (
            {},
            {"class_weights": "balanced"},
            "is for classes, but the targets are numbers",
        ),
        ({"share-target-statistics": False}, {}, "its node config demands"),
    ],
)
def test_a_deployment_of_numbers_meets_the_same_checks(
    node: dict[str, bool], settings: dict[str, str], message: str, tmp_path: Path
) -> None:
    paths = write(tmp_path / "g", ["n1", "n2"])
    nodes = [{"graph": str(path), **node} for path in paths]
    with pytest.raises((ConfigError, RunError), match=message):
        run_owners(nodes, tmp_path / "run", **settings)


def test_a_check_and_a_rehearsal_read_the_kind_from_the_files(tmp_path: Path) -> None:
    one, two, odd = write(tmp_path, ["n1", "n2", "c1"])
    assert inspect_graph(one, {}).description.target_kind == NUMBERS  # type: ignore[union-attr]
    assert not inspect_graph(odd, {}).problems
    assert inspect_graph(odd, {"target-kind": NUMBERS}).problems
    about = {"dataset": "synthetic", "clients": 3}
    plan = plan_rehearsal(
        [one, two, odd], {"method": "fedavg"}, {"loss": "mae"}, **about
    )
    assert plan.config.predicts == NUMBERS
    assert "target-kind" not in plan.values  # as in the deployment that is rehearsed
    with pytest.raises(ConfigError, match="fedproto learns classes"):
        plan_rehearsal([one, two], {"method": "fedproto"}, {}, **about)


def test_floating_y_with_a_fraction_is_numbers_in_python(tmp_path: Path) -> None:
    ring = torch.arange(NODES)
    draw = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(NODES, 3, generator=draw),
        edge_index=torch.stack([ring, ring.roll(1)]),
        y=torch.randn(NODES, generator=draw),
    )
    run = simulate(
        dataset=data,
        clients=2,
        rounds=1,
        partition="uniform",
        run_dir=str(tmp_path / "r"),
    )
    assert run.summary["target"]["kind"] == NUMBERS
    data.y = data.y.round()
    with pytest.raises(DataError, match="Set target-kind"):
        simulate(dataset=data, clients=2, rounds=1, partition="uniform")


@pytest.mark.parametrize(
    ("kind", "names", "unread"),
    [
        (CLASSES, ("x", "y"), "target, label:p"),
        (NUMBERS, ("target",), "label, label:p"),
    ],
)
@pytest.mark.parametrize("is_set", [False, True])
def test_target_kind_chooses_among_columns_of_several_kinds(
    kind: str, names: tuple[str, ...], unread: str, is_set: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    rows = [f"{'xy'[i % 2]},{i / 2},{i % 2}" for i in range(NODES)]
    lines = ["id,label,target,label:p", *(f"n{i},{row}" for i, row in enumerate(rows))]
    table = folder / ("graphs.csv" if is_set else "nodes.csv")
    settings = {"target-kind": kind}
    if is_set:
        table.write_text("\n".join(lines))
        nodes = [f"n{i},a,{i}" for i in range(NODES)]
        (folder / "nodes.csv").write_text("\n".join(["graph,id,f", *nodes]))
        (folder / "edges.csv").write_text("graph,source,target\n")
        settings |= {"setting": "graph", "model": "gin"}
    else:
        table.write_text(
            "\n".join(
                f"{line},{i}" if i else f"{line},f" for i, line in enumerate(lines)
            )
        )
        (folder / "edges.csv").write_text("source,target\nn0,n1\n")
    report = inspect_graph(folder, settings)
    assert not report.problems
    assert report.description is not None
    assert report.description.class_names == names
    assert report.description.num_features == 1
    told = f"{table.name}: {unread} will not be read: the run predicts {kind}."
    assert told in report.notes
    del settings["target-kind"]
    (problem,) = inspect_graph(folder, settings).problems
    assert 'Set target-kind = "classes" or "numbers" or "labels" to choose' in problem


def test_target_kind_chooses_among_columns_of_edges(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "nodes.csv").write_text(
        "id,f\n" + "\n".join(f"n{i},{i}" for i in range(NODES))
    )
    edges = [f"n{i},n{(i + 1) % NODES},{'xy'[i % 2]},{i / 4}" for i in range(NODES)]
    (folder / "edges.csv").write_text(
        "\n".join(["source,target,label,target:t", *edges])
    )
    for kind, names in ((CLASSES, ("x", "y")), (NUMBERS, ("t",))):
        report = inspect_graph(folder, {"setting": "edge", "target-kind": kind})
        assert report.description is not None, report.problems
        assert report.description.class_names == names
        assert any(f"the run predicts {kind}" in note for note in report.notes)
    assert "several kinds" in inspect_graph(folder, {"setting": "edge"}).problems[0]
    assert not inspect_graph(folder, {"setting": "link"}).problems  # needs neither


@pytest.mark.parametrize("name", ["graph.npz", "graph/nodes.csv"])
def test_a_pipe_is_not_waited_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "graph").mkdir()
    os.mkfifo(tmp_path / name)
    owner = str(tmp_path / name.removesuffix("/nodes.csv"))
    values = {"owners": f"{owner},{owner}"}
    for module in ("builtins", "io"):
        monkeypatch.setattr(f"{module}.open", lambda *_, **__: pytest.fail("opened"))
    assert held_kind.with_held_kind(values) == values
