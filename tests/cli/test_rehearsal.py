"""``new-app``, and what ``rehearse`` refuses before it starts anything."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from flower_fgl import METHODS
from flower_fgl.cli import rehearsal
from flower_fgl.cli.main import app
from flower_fgl.cli.rehearsal import Plan, plan_rehearsal, run_rehearsal
from flower_fgl.core.config import pyproject_table
from flower_fgl.core.errors import ConfigError, DataError, RunError
from flower_fgl.core.flower_internals import parse_config_args
from flower_fgl.datasets.sources import load as load_module
from flower_fgl.simulation.flower.rehearsal import Rehearsal
from tests.simulation.test_multi_label import write_yelp
from tests.support.owners import run_owners


def plan(*graphs: str, method: str = "fedavg", **pairs: Any) -> Plan:
    return plan_rehearsal(
        [Path(graph) for graph in graphs],
        {"method": method},
        {key.replace("_", "-"): value for key, value in pairs.items()},
        dataset="synthetic",
        clients=3,
    )


def test_a_new_app_holds_all_settings_and_is_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "federation-app"
    result = CliRunner().invoke(app, ["new-app", str(folder)])
    assert result.exit_code == 0, result.output
    text = (folder / "pyproject.toml").read_text("utf-8")
    flower = tomllib.loads(text)["tool"]["flwr"]["app"]
    assert flower["config"] == pyproject_table(METHODS)
    assert flower["components"]["serverapp"] == "flower_fgl.server_app:app"
    assert flower["fab-include"] == ["flower-fgl.md"]  # no data beside it is sent
    again = CliRunner().invoke(app, ["new-app", str(folder)])
    assert isinstance(again.exception, RunError)
    assert "Choose another folder" in str(again.exception)
    assert (folder / "pyproject.toml").read_text("utf-8") == text


def test_owners_are_named_after_their_graphs() -> None:
    found = plan("data/ash.npz", "data/oak.v2")
    assert list(found.owners) == ["ash", "oak.v2"]
    assert found.graphs["ash"] == Path("data/ash.npz").resolve()
    assert plan().owners == ("owner-0", "owner-1", "owner-2")


def test_a_name_with_quotes_reaches_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Rehearsal, "start", lambda _, *words: started.append(words))
    name = 'St. "Anna\'s" \\ 1'
    stage = Rehearsal(tmp_path / "new", [name], tls=False)
    stage.start_owner(name, tmp_path / f"{name}.npz")
    assert parse_config_args([started[0][-1]]) == {
        "graph": str(tmp_path / f"{name}.npz"),
        "name": name,
        "worker-idle": 600,
    }


def test_warnings_of_a_rehearsed_run_are_read_from_its_log(tmp_path: Path) -> None:
    stage = Rehearsal(tmp_path / "new", ["ash"], tls=False)
    assert not stage.warnings()
    (stage.folder / "run.log").write_text(
        "\x1b[92mINFO \x1b[0m:      Run folder: WARNING: none\n"
        + 2 * "\x1b[93mWARNING \x1b[0m:   owner ash: check the unit.\n"
    )
    assert stage.warnings() == ["owner ash: check the unit."]


def test_a_one_shot_method_is_rehearsed_for_one_round() -> None:
    assert plan("a.npz", method="opfgl").values["rounds"] == 1
    assert plan("a.npz").values["rounds"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"graphs": ["a/ash.npz", "b/ash.npz"]}, "Two graphs are named"),
        ({"method": "fedabc"}, 'Unknown method "fedabc"'),
        ({"pairs": {"fedprox.mu": 0.1}}, "no effect"),
        ({"pairs": {"run-dir": "x"}}, "--set run-dir is not possible"),
        ({"pairs": {"lr": -1.0}}, "lr must be > 0"),
    ],
)
def test_a_wrong_rehearsal_is_refused(arguments: dict[str, Any], message: str) -> None:
    pairs = arguments.pop("pairs", {})
    graphs = arguments.pop("graphs", [])
    with pytest.raises(ConfigError, match=message):
        plan(*graphs, **arguments, **pairs)


def test_an_unusable_graph_ends_a_rehearsal_before_any_program_starts(
    tmp_path: Path,
) -> None:
    graph = tmp_path / "ash.npz"
    graph.write_bytes(b"no archive")
    for _ in range(2):  # the folder can be used again
        with pytest.raises(DataError, match="The graph of ash cannot be used"):
            run_rehearsal(tmp_path / "new", plan(str(graph)), tls=False, timeout=1)
        assert list((tmp_path / "new").iterdir()) == []


class InThisProcess:
    """A rehearsal's programs, replaced by one run of the same owners in this process."""

    address = "127.0.0.1:0"

    def __init__(self, folder: Path, owners: Sequence[str], *, tls: bool) -> None:
        self.folder = folder
        self.nodes: list[dict[str, str]] = []

    def __enter__(self) -> InThisProcess:
        self.folder.mkdir()
        return self

    def __exit__(self, *_: object) -> None: ...

    def start_superlink(self) -> None: ...

    def start_owner(self, owner: str, graph: Path) -> None:
        home = self.folder / "owners" / owner
        node = {"graph": str(graph), "name": owner, "model-dir": str(home / "models")}
        self.nodes.append(node)

    def warnings(self) -> list[str]:
        return ["ash: its values are far from those of oak."]

    def run(self, values: dict[str, Any], _: float, on_round: Any) -> Path:
        settings = {**values, "hidden_channels": 8}
        return run_owners(
            self.nodes, self.folder / "run", on_round=on_round, **settings
        ).path


@pytest.mark.parametrize(
    ("setting", "summary", "columns"),
    [
        ("link", "{} pairs of nodes", ["score"]),
        ("edge", "{} edges, 2 classes", ["predicted", "p:even", "p:odd"]),
    ],
)
def test_owners_of_links_and_edges_are_rehearsed_and_scored(
    setting: str,
    summary: str,
    columns: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(rehearsal, "Rehearsal", InThisProcess)
    paths = [write_tables(tmp_path / name) for name in ("ash", "oak")]
    planned = plan(*map(str, paths), setting=setting)
    run = run_rehearsal(tmp_path / "new", planned, tls=False, timeout=1)
    said = capsys.readouterr().out
    assert run.status == "completed"
    assert run.best is not None
    assert 0 <= run.best["test"]["auroc"] <= 1
    for name, path in zip(("ash", "oak"), paths, strict=True):
        assert f"{name}: {path} can be used (" in said
        table = tmp_path / "new" / "owners" / name / "predictions.csv"
        frame = pd.read_csv(table)
        assert list(frame.columns) == ["source", "target", *columns]
        assert (
            f"{name}: predictions for {summary.format(len(frame))} in {table}" in said
        )
    assert "Warning: ash: its values are far from those of oak.\n" in said
    assert "training edges, " in said
    assert " nodes)" not in said


def test_owners_of_sets_of_graphs_are_rehearsed_and_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rehearsal, "Rehearsal", InThisProcess)
    paths = [write_set(tmp_path / name) for name in ("ash", "oak")]
    planned = plan(*map(str, paths), setting="graph", model="gin")
    run = run_rehearsal(tmp_path / "new", planned, tls=False, timeout=1)
    said = capsys.readouterr().out
    assert run.status == "completed"
    for name in ("ash", "oak"):
        table = tmp_path / "new" / "owners" / name / "predictions.csv"
        assert f"{name}: predictions for 30 graphs, 2 classes in {table}" in said
        frame = pd.read_csv(table)
        assert list(frame.columns) == ["graph", "predicted", "p:path", "p:ring"]
        assert frame["graph"].tolist() == [f"g{k}" for k in range(30)]


def test_partitions_are_rehearsed_for_links_but_not_for_edges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "Rehearsal", InThisProcess)
    small = {"synthetic.nodes": 120, "synthetic.blocks": 6}
    run = run_rehearsal(
        tmp_path / "links", plan(setting="link", **small), tls=False, timeout=1
    )
    assert run.status == "completed"
    assert run.best is not None
    assert "auroc" in run.best["test"]
    with pytest.raises(
        ConfigError, match='"edge" is rehearsed with the graphs of owners'
    ):
        run_rehearsal(
            tmp_path / "edges", plan(setting="edge", **small), tls=False, timeout=1
        )


@pytest.mark.parametrize("sought", ["", "no 1"])
def test_a_target_is_rehearsed_as_the_sought_class(
    sought: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWER_FGL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(load_module, "_check_statistics", lambda *_: None)
    monkeypatch.setattr(rehearsal, "Rehearsal", InThisProcess)
    write_yelp(tmp_path / "Yelp" / "raw")
    pairs = {"target": "1", "data-dir": str(tmp_path), "partition": "uniform"}
    pairs |= {"positive-class": sought} if sought else {}
    method = {"method": "fedavg"}
    planned = plan_rehearsal([], method, pairs, dataset="yelp", clients=2)
    run = run_rehearsal(tmp_path / "new", planned, tls=False, timeout=1)
    assert (run.config["target"], run.config["positive-class"]) == ("", sought or "1")
    assert run.summary["class_names"] == ["no 1", "1"]
    assert run.summary["metric"] == "auroc"
    assert run.best is not None
    assert {"auroc", "auprc", "precision_at_k"} <= run.best["test"].keys()


def write_tables(folder: Path) -> Path:
    """Write a ring of 40 nodes with chords as CSV tables with features and classes."""
    folder.mkdir()
    nodes = [f"n{i},{i % 3},{i % 5}" for i in range(40)]
    (folder / "nodes.csv").write_text("\n".join(["id,a,b", *nodes]) + "\n")
    lines = ["source,target,label,amount"]
    for i in range(40):
        for step in (1, 7):
            kind = "odd" if (i + step) % 3 else "even"
            lines.append(f"n{i},n{(i + step) % 40},{kind},{i % 4}")
    (folder / "edges.csv").write_text("\n".join(lines) + "\n")
    return folder


def write_set(folder: Path) -> Path:
    """Write 30 rings and paths of three to six nodes as CSV tables."""
    folder.mkdir()
    graphs, nodes, edges = ["id,label"], ["graph,id,one,place"], ["graph,source,target"]
    for k in range(30):
        size = 3 + k % 4
        graphs.append(f"g{k},{'ring' if k % 2 else 'path'}")
        nodes += [f"g{k},{n},1,{n}" for n in range(size)]
        last = size if k % 2 else size - 1
        edges += [f"g{k},{n},{(n + 1) % size}" for n in range(last)]
    for name, lines in (("graphs", graphs), ("nodes", nodes), ("edges", edges)):
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="is not empty: choose a new folder"):
        run_rehearsal(tmp_path, plan(), tls=False, timeout=1)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
