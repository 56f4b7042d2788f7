"""Runs in a notebook: frames, tables, figures, models, predictions, comparisons."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch_geometric.data import Data

import flower_fgl
from flower_fgl import Run, RunSet, simulate
from flower_fgl.core.errors import ConfigError, DataError, RunError
from flower_fgl.lab.report.numbers import cost_until
from flower_fgl.lab.tables.cells import make_cell
from flower_fgl.nn import GraphInput
from tests.support.short_runs import SMALL


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunSet:
    """FedAvg and Local with two seeds each; FedAvg also scores the global model."""
    folder = tmp_path_factory.mktemp("runs")
    return RunSet(
        [
            simulate(
                method,
                clients=3,
                seed=seed,
                evaluate="both" if method == "fedavg" else "local",
                run_dir=str(folder / f"{method}-{seed}"),
                **SMALL,
            )
            for method in ("fedavg", "local")
            for seed in (0, 1)
        ]
    )


def test_public_names_are_listed_and_load_nothing_heavy_until_used() -> None:
    code = (
        "import json, sys, flower_fgl\n"
        "names = dir(flower_fgl)\n"
        "flower_fgl.load, flower_fgl.Run, flower_fgl.RunSet, flower_fgl.compare\n"
        "heavy = {'torch', 'matplotlib', 'pandas', 'ray'} & set(sys.modules)\n"
        "print(json.dumps([names, flower_fgl.__all__, sorted(heavy)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    names, public, heavy = json.loads(done.stdout)
    assert set(public) <= set(names)
    shown = {name for name in names if not name.startswith("__")}
    assert shown <= set(public)  # nothing that a module only imports
    assert heavy == []
    for name in public:
        assert getattr(flower_fgl, name) is not None


def test_a_frame_has_a_row_for_each_round_client_and_column(runs: RunSet) -> None:
    run = runs[0]
    frame = run.to_frame()
    keys = ["round", "client", "evaluation", "column"]
    assert list(frame.columns[:4]) == keys
    assert len(frame) == 2 * 3 * 2 * 2  # rounds, clients, evaluations, columns
    assert not frame.duplicated(keys).any()
    row = next(r for r in run.clients if r["round"] == 2 and r["partition_id"] == 1)
    mine = frame.set_index(keys).loc[(2, 1, "local", "test")]
    assert mine["accuracy"] == row["metrics"]["local"]["test"]["accuracy"]
    assert mine["loss"] == row["loss"]
    test = frame[(frame["column"] == "test") & (frame["evaluation"] == "local")]
    last = test[test["round"] == 2]
    pooled = np.average(last["accuracy"], weights=last["num_nodes"])
    assert run.last is not None
    assert pooled == pytest.approx(run.last["test"]["accuracy"])


def test_a_frame_per_round_has_the_pooled_scores_and_the_costs(runs: RunSet) -> None:
    run = runs[0]
    frame = run.to_frame(per="round")
    assert len(frame) == 2 * 2 * 2
    first = frame.set_index(["round", "evaluation", "column"]).loc[(1, "global", "val")]
    row = run.rounds[0]
    assert first["accuracy"] == row["metrics"]["global"]["val"]["accuracy"]
    assert first["bytes_up"] == sum(row["bytes"]["up"].values())
    assert first["seconds"] == row["seconds"]["total"]
    with pytest.raises(ConfigError, match='"client" or "round"'):
        run.to_frame(per="rounds")


def test_the_frame_of_a_run_without_scores_has_the_same_columns(
    runs: RunSet, tmp_path: Path
) -> None:
    run = runs[2]
    empty = Run(run.path, run.config, run.sources, run.summary, [], [])
    for per in ("client", "round"):
        frame = empty.to_frame(per)
        assert frame.empty
        assert set(frame.columns) <= set(run.to_frame(per).columns)


class Cells(HTMLParser):
    """Texts of the cells of a table, and all tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.tags[-1] in ("td", "th"):
            self.cells[-1] += data.strip()


def test_a_notebook_shows_the_table_of_the_terminal(runs: RunSet) -> None:
    run = runs[0]
    shown = Cells(run._repr_html_()).cells
    printed = run.table().splitlines()
    for line in printed[1:-1]:
        for word in line.split():
            assert any(word in cell for cell in shown), word
    assert printed[-1].removeprefix("Run folder: ") in run._repr_html_()
    evil = "<script>alert(1)</script>"
    summary = {**run.summary, "dataset": evil, "error": evil}
    hostile = Run(run.path, run.config, run.sources, summary, run.rounds, run.clients)
    page = Cells(hostile._repr_html_() + RunSet([hostile])._repr_html_())
    assert "script" not in page.tags
    assert evil in page.cells


def test_the_pictures_of_the_report_are_figures(runs: RunSet) -> None:
    figure = runs[0].plot()
    assert [p.get_title(loc="left") for p in figure.axes] == [
        "Accuracy",
        "Training loss",
    ]
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert len(runs.plot("cost").axes) == 2
    assert len(runs[:1].plot("labels").axes) == 2
    with pytest.raises(ConfigError, match=r'no picture "labels".*Known: .*convergence'):
        runs.plot("labels")


def test_the_model_has_the_weights_of_the_best_round(runs: RunSet) -> None:
    from safetensors.torch import load_file

    model = runs[0].model()
    assert not model.training
    saved = load_file(runs[0].path / "model.safetensors")
    state = model.state_dict()
    assert set(state) == set(saved)
    assert all(torch.equal(state[name], saved[name]) for name in saved)
    with pytest.raises(RunError, match="holds no model"):
        runs[2].model()  # Local sends no weights


def test_a_graph_in_memory_gets_predictions(
    runs: RunSet, caplog: pytest.LogCaptureFixture
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(7, 8, generator=generator)
    one_way = torch.tensor([[0, 1, 2, 5], [1, 2, 3, 5]])
    frame = runs[0].predict(Data(x=x, edge_index=one_way))
    both = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])  # and no self-loop
    with torch.inference_mode():
        expected = runs[0].model()(GraphInput(x, both)).softmax(dim=1)
    columns = ["p:0", "p:1", "p:2"]
    assert list(frame.columns) == ["node", "predicted", *columns]
    assert torch.equal(torch.tensor(frame[columns].to_numpy()), expected)
    assert frame["node"].tolist() == list(range(7))
    assert frame["predicted"].tolist() == [str(int(k)) for k in expected.argmax(dim=1)]
    assert "order of the columns is not checked" in caplog.text
    whole = (9 * x).long()
    due = runs[0].predict(Data(x=whole.float(), edge_index=one_way))
    for other in (whole, whole.bfloat16(), whole.float().to_sparse()):
        found = runs[0].predict(Data(x=other, edge_index=one_way))
        pd.testing.assert_frame_equal(found, due)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (3, "Expected the path of a graph file, or an object with the tensors x"),
        (Data(x=torch.rand(3, 8)), r"x \(N, d\) and edge_index .* got the Data"),
        (
            Data(x=torch.rand(3, 8).numpy(), edge_index=torch.empty(2, 0).long()),
            "x must be a torch.Tensor, got ndarray",
        ),
        (
            Data(x=torch.rand(3, 5), edge_index=torch.tensor([[0], [1]])),
            "expected 8 features as in training, got 5",
        ),
        (
            Data(x=torch.rand(3, 8), edge_index=torch.tensor([[0], [9]])),
            "the Data",
        ),
    ],
)
def test_a_graph_that_does_not_fit_gets_one_clear_error(
    runs: RunSet, graph: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        runs[0].predict(graph)


def test_runs_are_loaded_from_folders(runs: RunSet) -> None:
    folder = runs[0].path
    run = flower_fgl.load(str(folder))
    assert isinstance(run, Run)
    assert run == runs[0]
    loaded = RunSet.load(folder.parent)
    assert [run.path.name for run in loaded] == [
        "fedavg-0",
        "fedavg-1",
        "local-0",
        "local-1",
    ]
    assert {name: len(group) for name, group in loaded.by_method().items()} == {
        "fedavg": 2,
        "local": 2,
    }
    with pytest.raises(RunError, match="is not a run folder"):
        flower_fgl.load(folder.parent)


def test_the_frame_of_several_runs_names_each(runs: RunSet) -> None:
    frame = runs.to_frame()
    assert len(frame) == 4
    assert frame["method"].tolist() == ["fedavg", "fedavg", "local", "local"]
    best = runs[1].best
    assert best is not None
    assert frame.loc[1, "test_accuracy"] == best["test"]["accuracy"]
    assert frame.loc[1, "bytes_up"] == runs[1].summary["bytes"]["up"]
    per_client = runs.to_frame(per="client")
    assert len(per_client) == sum(len(run.to_frame()) for run in runs)
    assert not per_client.duplicated(
        ["run", "round", "client", "evaluation", "column"]
    ).any()
    assert per_client["num_clients"].unique().tolist() == [3]
    assert isinstance(runs.to_frame(per="round"), pd.DataFrame)
    with pytest.raises(ConfigError, match='per must be "run"'):
        runs.to_frame(per="seed")


def test_the_tidy_frame_has_a_row_for_each_score(runs: RunSet) -> None:
    frame = runs.to_frame("score")
    assert list(frame.columns[:4]) == ["dataset", "run", "method", "model"]
    for run in runs:
        own = frame[(frame["run"] == run.path.name) & (frame["model"] == "own")]
        test = own[(own["column"] == "test") & (own["score"] == "accuracy")]
        assert test["value"].tolist() == [(run.final or {})["test"]["accuracy"]]
        assert test["method"].tolist() == [run.summary["method"]]


def test_several_runs_have_a_table_and_a_page(runs: RunSet, tmp_path: Path) -> None:
    lines = str(runs).splitlines()
    assert len(lines) == 5
    best = runs[0].best
    assert best is not None
    assert lines[1].split() == [
        "fedavg",
        "synthetic",
        "3",
        "0",
        f"{100 * best['val']['accuracy']:.2f}",
        f"{100 * best['test']['accuracy']:.2f}",
    ]
    assert Cells(runs._repr_html_()).cells[6:12] == lines[1].split()
    assert runs.report(tmp_path / "all.html").is_file()
    assert runs[0].report(tmp_path) == tmp_path / "report.html"
    assert repr(RunSet([])) == "no runs"


def test_two_methods_are_compared_by_runs_or_by_folders(runs: RunSet) -> None:
    sides = runs.by_method()
    result = flower_fgl.compare(sides["fedavg"], sides["local"])
    scores = [(run.best or {})["test"]["accuracy"] for run in runs]
    expected = (scores[0] + scores[1] - scores[2] - scores[3]) / 2
    assert result.difference == pytest.approx(expected)
    text = f"fedavg minus local = {100 * expected:+.2f}, n = 2 pairs on one partition: not "
    assert text in repr(result)
    folder = runs[0].path.parent
    by_name = flower_fgl.compare(f"{folder}:fedavg", f"{folder}:local", column="val")
    assert by_name.n == 2
    with pytest.raises(RunError, match="at least 2 pairs"):
        flower_fgl.compare(runs[0], runs[2])
    for wrong in (1, [1]):
        with pytest.raises(ConfigError, match="a folder of runs, not int"):
            flower_fgl.compare(wrong, runs[2])  # type: ignore[arg-type, list-item]


def test_an_experiment_file_runs_from_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = """
    [config]
    clients = 3
    rounds = 1
    hidden-channels = 8
    synthetic = { nodes = 120, classes = 3, features = 8, blocks = 6 }
    [[case]]
    name = "plain"
    method = "fedavg"
    [[case]]
    name = "proximal"
    method = "fedprox"
    [grid]
    seed = [0, 1]
    """
    Path("study.toml").write_text(text)
    alone = flower_fgl.run_experiment(
        "study.toml", cases=["proximal"], local_epochs=1, fedprox={"mu": 0.5}
    )
    assert [run.summary["seed"] for run in alone] == [0, 1]
    assert {run.config["fedprox"]["mu"] for run in alone} == {0.5}
    assert {run.config["local-epochs"] for run in alone} == {1}
    assert capsys.readouterr().out == ""
    again = flower_fgl.run_experiment(
        "study.toml",
        cases=["proximal"],
        local_epochs=1,
        fedprox={"mu": 0.5},
        progress=True,
    )
    assert list(again) == list(alone)  # complete runs are read
    assert capsys.readouterr().out.count("already complete") == 2
    with pytest.raises(ConfigError, match='no case "other"'):
        flower_fgl.run_experiment("study.toml", cases=["other"])
    with pytest.raises(ConfigError, match="jobs = 2 gives each run one process"):
        flower_fgl.run_experiment("study.toml", jobs=2, workers=2)
    with pytest.raises(ConfigError, match=r'engine must be .*, got "Local"'):
        flower_fgl.run_experiment("study.toml", engine="Local")


def test_fine_tuning_after_rounds_of_the_global_model_hides_none_of_them(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {**SMALL, "evaluate": "global"}
    run = simulate(
        "fedavg", clients=3, run_dir=str(tmp_path / "run"),
        fedavg={"finetune_epochs": 1}, **settings,
    )  # fmt: skip
    assert run.best is not None
    cost = cost_until(run, run.best["test"]["accuracy"])
    assert cost.best is not None
    assert cost.server_round is not None
    assert run.plot("convergence").axes[0].lines
    for scope, number in (("", run.rounds[-1]["round"]), ("global", run.best["round"])):
        known = run.client_scores(number, scope or "local")
        found = [columns["test"]["accuracy"] for columns in known.values()]
        assert list(run.per_owner(scope=scope).values()) == found
        assert len(found) == 3
    assert make_cell([run], experiment="x", row="fedavg").is_finetuned
    tuned = run.summary["finetuned"]["test"]["accuracy"]
    assert RunSet([run]).to_frame()["test_accuracy"].tolist() == [tuned]
    assert f"{100 * tuned:.2f}" in repr(RunSet([run]))
    card = json.loads((run.path / "card.json").read_text())
    assert [row["model"] for row in card["Scores of owners"]] == ["own model"] * 3
    assert all(row["items"] for row in card["Scores of owners"])
