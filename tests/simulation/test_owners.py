"""Runs over natural owners: names, local layers, and gains per owner."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flower_fgl import Run, resume, simulate
from flower_fgl.cli.main import app
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.fedper import FedPerClientApp
from flower_fgl.client_apps.fedprox import FedProxClientApp
from flower_fgl.client_apps.runtime.training import state_of
from flower_fgl.client_apps.stacked.group import Group
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.core.model_spec import TYPED
from flower_fgl.datasets.graph_files.graph_file import save_client_graph
from flower_fgl.lab.report.figures import draw_run
from flower_fgl.lab.results import RunSet
from flower_fgl.lab.tables.cells import Cell, Draw, make_cell
from flower_fgl.lab.tables.compare import gains_per_owner, select_runs
from flower_fgl.lab.tables.results_table import ResultsTable
from flower_fgl.lab.tables.table_formats import format_table
from flower_fgl.lab.tabulate import tabulate_runs
from flower_fgl.nn.models import MODELS, build_model, local_names, state_shapes
from flower_fgl.protocols.fedavg import Weights
from tests.support.owners import in_own_order, owner_graphs, run_owners
from tests.support.random_clients import random_client
from tests.support.short_runs import comparable
from tests.support.written_cells import make_draw, make_row

NAMES = ("ash", "birch", "cedar")
SHORT: dict[str, Any] = {"hidden_channels": 8, "rounds": 2, "seed": 0}


def save(folder: Path, graphs: list[Any]) -> Path:
    folder.mkdir()
    for name, graph in zip(NAMES, graphs, strict=True):
        save_client_graph(folder / f"{name}.npz", graph)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("owners")


@pytest.fixture(scope="module")
def folder(place: Path) -> Path:
    return save(place / "trees", owner_graphs())


@pytest.fixture(scope="module")
def uneven(place: Path) -> Path:
    """Owners of 8, 5 and 8 features."""
    graphs = owner_graphs()
    graphs[1] = replace(
        graphs[1], graph=replace(graphs[1].graph, x=graphs[1].graph.x[:, :5])
    )
    return save(place / "uneven", graphs)


@pytest.fixture(scope="module")
def runs(folder: Path, place: Path) -> dict[str, Run]:
    out = str(place / "runs")
    return {
        method: simulate(method, owners=str(folder), output_dir=out, **SHORT)
        for method in ("local", "fedavg")
    }


def test_a_run_over_owners_equals_a_deployment_with_these_files(
    folder: Path, runs: dict[str, Run], tmp_path: Path
) -> None:
    nodes = [{"graph": str(folder / f"{name}.npz")} for name in NAMES]
    deployed = run_owners(nodes, tmp_path / "run")
    ours = runs["fedavg"]
    assert ours.summary["clients"] == 3
    for one, other in zip(ours.rounds, deployed.rounds, strict=True):
        assert one["loss"] == other["loss"]
        for column in ("val", "test"):
            mine = one["metrics"]["local"][column]
            theirs = other["metrics"]["local"][column]
            assert {name: mine[name] for name in theirs} == theirs
            assert 0 <= mine["auroc"] <= 1
            assert 0 < mine["auprc"] <= 1


def test_owners_in_a_stack_have_all_scores_of_owners_one_by_one(
    folder: Path, tmp_path: Path
) -> None:
    given = {**SHORT, "owners": str(folder), "output_dir": str(tmp_path)}
    alone, together = (
        simulate("fedavg", **given, evaluate="both", stacked=stacked)
        for stacked in ("false", "true")
    )
    assert alone.last is not None
    assert together.last is not None
    for column in ("val", "test"):
        assert together.last[column] == pytest.approx(alone.last[column], abs=1e-5)
    for scope in ("local", "global"):
        mine, theirs = (run.client_scores(2, scope) for run in (together, alone))
        assert mine.keys() == theirs.keys()
        for pid, scores in theirs.items():
            assert mine[pid]["test"] == pytest.approx(scores["test"], abs=1e-5)


def test_names_reach_the_run_folder_and_the_tables(runs: dict[str, Run]) -> None:
    run = runs["fedavg"]
    assert [c["name"] for c in run.clients if "name" in c] == list(NAMES)
    assert run.summary["dataset"] == "trees"
    assert "-fedavg-trees-0" in run.path.name
    scores = run.per_owner()
    assert list(scores) == list(NAMES)
    worst = min(scores, key=scores.__getitem__)
    areas = run.per_owner(metric="auroc")
    assert f"ash {100 * areas['ash']:.2f}, birch" in run.table()
    assert f"Worst owner {min(areas, key=areas.__getitem__)}" in run.table()
    total = run.best["test"]["num_nodes"]  # type: ignore[index]
    sizes = {c["name"]: c["num_test"] for c in run.clients if "name" in c}
    pooled = sum(scores[name] * sizes[name] for name in NAMES) / total
    assert pooled == pytest.approx(run.best["test"]["accuracy"])  # type: ignore[index]
    assert scores[worst] <= pooled


def test_no_owner_is_left_out_for_lack_of_an_area_under_the_curve(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    # the test nodes of one class have no AUROC
    shutil.copytree(runs["fedavg"].path, tmp_path / "run")
    file = tmp_path / "run" / "clients.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if row["partition_id"] == 1 and "metrics" in row:
            del row["metrics"]["local"]["test"]["auroc"]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    run = Run.load(tmp_path / "run")
    assert runs["fedavg"].owner_metric() == "auroc"
    assert run.owner_metric() == "accuracy"
    assert f"birch {100 * run.per_owner()['birch']:.2f}" in run.table()
    shutil.copytree(runs["local"].path, tmp_path / "local")
    for name in ("local", "run"):  # as of runs that AUROC selects
        file = tmp_path / name / "summary.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"metric": "auroc"}))
    command = ["compare", str(tmp_path / "local"), str(run.path), "--per-owner"]
    for column, score in {"test": "accuracy", "val": "auroc"}.items():
        shown = CliRunner().invoke(app, [*command, "--column", column]).output
        assert "of 3 owners gain" in shown
        assert f"({column} {score}," in shown
    shown = CliRunner().invoke(app, [*command, "--metric", "auroc"]).output
    assert "of 2 owners gain" in shown
    page = run.report().read_text()
    for name in NAMES:
        assert f"{100 * run.per_owner()[name]:.1f}" in page.partition("Owners")[2]


def test_the_gain_of_each_owner_is_the_difference_of_its_scores(
    runs: dict[str, Run],
) -> None:
    one, other = runs["local"], runs["fedavg"]
    gains = gains_per_owner([one], [other], column="test", metric="accuracy")
    before, after = one.per_owner(), other.per_owner()
    assert gains["gain"].to_dict() == {n: after[n] - before[n] for n in NAMES}
    assert gains["gain"].is_monotonic_decreasing
    with pytest.raises(RunError, match='No owner has a score "speed"'):
        gains_per_owner([one], [other], column="test", metric="speed")
    command = ["compare", str(one.path), str(other.path), "--per-owner"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    winners = (gains["gain"] > 0).sum()
    assert f"{winners} of 3 owners gain" in shown.output
    assert "Worst owner" in shown.output
    assert "birch" in shown.output


def test_the_report_names_the_owners(runs: dict[str, Run], tmp_path: Path) -> None:
    one, other = Run.of(runs["local"]), Run.of(runs["fedavg"])
    page = one.report(tmp_path / "one.html").read_text()
    scores = one.per_owner(metric="auroc")
    worst = min(scores, key=scores.__getitem__)
    assert f"{100 * scores[worst]:.1f} ({worst})" in page
    for picture in ("clients", "labels"):
        labels = one.plot(picture).axes[0].get_xticklabels()
        assert [label.get_text() for label in labels] == list(NAMES)
        assert one.plot(picture).axes[0].get_xlabel() == "owner"
    both = RunSet([one, other])
    gains = gains_per_owner([one], [other], column="test", metric="auroc")
    page = both.report(tmp_path / "both.html").read_text()
    won = (gains["gain"] > 0).sum()
    assert f'<td class="n">{won} of 3</td>' in page
    for gain in gains["gain"]:
        assert f">{100 * gain:+.1f}</td>" in page
    frame = both.per_owner()
    fedavg = frame[frame.method == "fedavg"].set_index("owner")
    assert fedavg.gain.to_dict() == pytest.approx(gains["gain"].to_dict())
    assert fedavg.score.to_dict() == pytest.approx(gains["other"].to_dict())
    assert frame[frame.method == "local"].gain.isna().all()


def test_classes_of_their_own_share_no_picture(place: Path, tmp_path: Path) -> None:
    graphs = owner_graphs()
    graphs[1] = in_own_order(graphs[1], ("cold", "flu"))
    folder = save(tmp_path / "own", graphs)
    run = Run.of(
        simulate(
            "fedavg",
            owners=str(folder),
            class_align="local",
            output_dir=str(tmp_path),
            **SHORT,
        )
    )
    assert "labels" not in draw_run(run)
    assert "Owners" in run.report().read_text()


def test_another_number_of_clients_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds 3 graphs, one client each, but clien"):
        simulate(owners=str(folder), clients=4, output_dir=str(tmp_path))


@pytest.mark.parametrize("model", sorted({*MODELS} - {"gine", *TYPED}))
@pytest.mark.parametrize("readout", [False, True])
def test_the_first_layer_is_all_that_depends_on_the_feature_width(
    model: str, *, readout: bool
) -> None:
    def build(width: int) -> Any:
        return build_model(
            model,
            in_channels=width,
            hidden_channels=8,
            num_outputs=3,
            num_layers=2,
            dropout=0.0,
            readout=readout,
            initialise=False,
        )

    kept = [local_names(build, d, first_layer=True, head=False) for d in (4, 9)]
    assert kept[0] == kept[1]
    shapes = [state_shapes(build(d)) for d in (4, 9)]
    assert kept[0]
    for name in shapes[0].keys() - kept[0]:
        assert shapes[0][name] == shapes[1][name]
    head = local_names(build, 4, first_layer=False, head=True)
    assert head == {name for name in shapes[0] if name.startswith("classifier.")}


@pytest.mark.parametrize(
    ("method", "half"),
    [
        ("fedavg", FedAvgClientApp),
        ("fedprox", FedProxClientApp),
        ("fedper", FedPerClientApp),
    ],
)
def test_a_local_layer_is_never_uploaded_and_stays_as_trained(
    method: str, half: Any
) -> None:
    owned = {"owners": "somewhere", "feature-align": "project", "model": "gin:3x8"}
    client = random_client(method, settings=owned)
    first = {name for name in client.state_shapes() if name.startswith("encoder.0.")}
    assert client.local_names() == first
    app_half = half()
    spec = app_half.download_spec(client)
    assert spec
    assert not first & spec.keys()
    download = Weights({name: torch.zeros(shape) for name, shape in spec.items()})
    fit = app_half.fit(client, 1, download)
    assert fit.upload.tensors.keys() == spec.keys()
    trained = state_of(fit.model)
    client.state.set_group("model", trained)
    again = (
        app_half.assemble(Group(client), [download])
        if method == "fedper"
        else client.receive(download.tensors)
    ).state_dict()
    for name in first:
        assert torch.equal(again[name], trained[name])
    for name in spec:
        assert not again[name].any()


def test_owners_of_other_widths_train_with_their_own_first_layer(
    uneven: Path, tmp_path: Path
) -> None:
    run = simulate(
        "fedavg",
        owners=str(uneven),
        feature_align="project",
        secure_aggregation=True,
        output_dir=str(tmp_path),
        **SHORT,
    )
    assert run.status == "completed"
    assert [c["num_features"] for c in run.clients if "name" in c] == [8, 5, 8]
    assert not (run.path / "model.safetensors").exists()  # no complete global model
    losses = [row["loss"] for row in run.rounds]
    assert losses[1] < losses[0]
    with pytest.raises(RunError, match="Nothing of sgc is left to average"):
        simulate(
            "fedavg",
            owners=str(uneven),
            feature_align="project",
            class_align="local",
            model="sgc",
            output_dir=str(tmp_path),
            **SHORT,
        )


@pytest.mark.parametrize("method", ["fedsst", "fedstar", "gcfl+"])
def test_methods_that_share_some_layers_only_take_owners_of_other_widths(
    method: str, uneven: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {**SHORT, "model": "gin", "output_dir": str(tmp_path)}
    run = simulate(
        method,
        owners=str(uneven),
        feature_align="project",
        class_align="local",
        **settings,
    )
    assert run.status == "completed"
    assert not run.summary["failures"]
    assert [c["num_features"] for c in run.clients if "name" in c] == [8, 5, 8]
    assert set(run.per_owner()) == set(NAMES)
    sent = run.rounds[-1]["bytes"]["up"]
    assert sent["weights"] % len(NAMES) == 0  # the shared layers of all are as large


def test_an_owner_without_labels_or_with_one_class_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = owner_graphs()
    nothing = torch.full_like(graphs[0].graph.y, -1)
    graphs[0] = replace(graphs[0], graph=replace(graphs[0].graph, y=nothing))
    y = graphs[1].graph.y.clone()
    y[y != 0] = -1
    graphs[1] = replace(graphs[1], graph=replace(graphs[1].graph, y=y))
    masks = dict(graphs[2].graph.masks)
    masks["val"] = torch.zeros_like(masks["val"])
    graphs[2] = replace(graphs[2], graph=replace(graphs[2].graph, masks=masks))
    folder = save(tmp_path / "bare", graphs)
    with caplog.at_level(logging.WARNING):
        run = simulate(owners=str(folder), output_dir=str(tmp_path), **SHORT)
    assert "Clients [0] have no training nodes and are only evaluated." in caplog.text
    assert "Owner ash: There are no labelled training nodes." in caplog.text
    assert "Owner birch: All labelled training nodes have the class flu." in caplog.text
    assert "Owner cedar: There are no labelled validation nodes." in caplog.text
    assert "ash" not in run.per_owner()


@pytest.mark.parametrize("setting", ["transductive", "edge"])
def test_a_single_class_is_nothing_to_learn(setting: str, tmp_path: Path) -> None:
    nodes = [f"n{i},{i % 7},alike" for i in range(40)]
    edges = [f"n{i},n{(i + k) % 40},alike" for i in range(40) for k in (1, 2)]
    (tmp_path / "nodes.csv").write_text("\n".join(["id,size,label", *nodes]))
    (tmp_path / "edges.csv").write_text("\n".join(["source,target,label", *edges]))
    settings = {**SHORT, "clients": 2, "setting": setting, "partition": "uniform"}
    with pytest.raises(RunError, match='one class, "alike": nothing can be learned'):
        simulate("fedavg", str(tmp_path), output_dir=str(tmp_path / "runs"), **settings)


def test_training_items_of_one_class_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = []
    for graph in owner_graphs():
        y = graph.graph.y.clone()
        y[graph.graph.masks["train"]] = 0
        graphs.append(replace(graph, graph=replace(graph.graph, y=y)))
    with caplog.at_level(logging.WARNING):
        for name, found in (("one", graphs), ("more", owner_graphs())):
            caplog.clear()
            folder = save(tmp_path / name, found)
            simulate(owners=str(folder), output_dir=str(tmp_path), **SHORT)
            text = 'training items are of the class "flu". Check the labels'
            assert (text in caplog.text) == (name == "one")


@pytest.mark.thorough
def test_whole_sets_of_graphs_keep_their_own_heads(
    real_data: Path, tmp_path: Path
) -> None:
    run = simulate(
        "fedavg",
        owners="tu:MUTAG,tu:PROTEINS",
        setting="graph",
        feature_align="project",
        model="gin",
        data_dir=str(real_data),
        output_dir=str(tmp_path),
        **SHORT,
    )
    assert run.summary["dataset"] == "MUTAG+PROTEINS"
    about = {c["name"]: c for c in run.clients if "name" in c}
    assert about["MUTAG"]["num_nodes"] == 188
    assert about["PROTEINS"]["num_nodes"] == 1113
    assert "class_names" not in run.summary
    # of two layers and a head only the second layer is exchanged: 8·8 + 8 + 8·8 + 8
    assert run.rounds[0]["bytes"]["down"]["weights"] >= 2 * 4 * 144
    assert run.rounds[0]["bytes"]["down"]["weights"] < 2 * 4 * 144 + 2000


def test_an_interrupted_run_with_local_layers_resumes_as_if_nothing_happened(
    uneven: Path, tmp_path: Path
) -> None:
    def interrupt(row: Any) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    settings: dict[str, Any] = {
        **SHORT,
        "owners": str(uneven),
        "feature_align": "project",
        "rounds": 4,
        "checkpoint_every": 2,
        "num_layers": 3,  # of two, FedPer's body would be the local layer alone
    }
    with pytest.raises(KeyboardInterrupt):
        simulate("fedper", run_dir=str(tmp_path / "a"), on_round=interrupt, **settings)
    resumed = resume(tmp_path / "a")
    whole = simulate("fedper", run_dir=str(tmp_path / "b"), **settings)
    assert comparable(resumed) == comparable(whole)


def test_a_finished_run_of_an_experiment_is_not_run_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    file = tmp_path / "trees.toml"
    file.write_text(
        f'draws = 1\n[config]\nowners = "{folder.name}"\nrounds = 1\n'
        f'hidden-channels = 8\noutput-dir = "{tmp_path / "runs"}"\n'
        '[[case]]\nname = "local"\nmethod = "local"\n'
    )
    first, again = (
        CliRunner().invoke(app, ["run", str(file), "--quiet"]) for _ in range(2)
    )
    assert first.exit_code == 0, first.output
    assert again.exit_code == 0, again.output
    assert "already complete" not in first.output
    assert "local-draw0: already complete" in again.output
    # the run has the absolute path of its owners, the file a relative one
    cells, _ = tabulate_runs(select_runs(str(tmp_path / "runs" / "trees")))
    assert cells[0].place["dataset"] == "trees"
    assert str(folder) not in cells[0].to_json()


def test_a_table_of_cells_shows_each_owners_gain_over_local(
    runs: dict[str, Run],
) -> None:
    one, other = Run.of(runs["local"]), Run.of(runs["fedavg"])
    cells = [
        make_cell([run], experiment="x", row=name)
        for name, run in (("local", one), ("fedavg", other))
    ]
    text = format_table(ResultsTable(cells, metric="mean_auroc"), layout="owners")
    before, after = (run.per_owner(metric="auroc") for run in (one, other))
    scores = " | ".join(f"{100 * after[name]:.2f}" for name in NAMES)
    mean = 100 * sum(after.values()) / len(NAMES)
    worst = min(after, key=after.__getitem__)
    lowest = 100 * after[worst]
    assert f"| fedavg | {scores} | {mean:.2f} | {lowest:.2f} | {worst} |" in text
    gains = [round(after[n], 6) - round(before[n], 6) for n in NAMES]
    shown = " | ".join(f"{100 * gain:+.2f}".replace("-", "−") for gain in gains)
    won = sum(gain > 0 for gain in gains)
    assert f"| fedavg | {shown} |" in text
    assert f"{won} of 3 |" in text
    with pytest.raises(ConfigError, match='needs "hits" of natural owners'):
        format_table(
            ResultsTable([replace(cells[0], draws=[_with_hits(cells[0])])],
                         metric="hits"),
            layout="owners",
        )  # fmt: skip


def test_means_and_lowest_scores_of_owners_spread_over_draws() -> None:
    def cell(name: str, *draws: dict[str, float]) -> Cell:
        made = [
            make_draw(
                seed,
                0.5,
                owners={"own": {o: {"auroc": value} for o, value in scores.items()}},
                scores={"own": {"test": {"mean_auroc": fmean(scores.values())}}},
            )
            for seed, scores in enumerate(draws)
        ]
        return make_row(name, [], draws=made)

    cells = [
        cell("local", {"ash": 0.5, "oak": 0.7}, {"ash": 0.6, "oak": 0.4}),
        cell("fedavg", {"ash": 0.6, "oak": 0.8}, {"ash": 0.8, "oak": 0.6}),
    ]
    text = format_table(ResultsTable(cells, metric="mean_auroc"), layout="owners")
    # Local: means of the draws 60 and 50, lowest 50 and 40, deviation 10 / √2
    assert (
        "| 70.00 ± 14.14 | 70.00 ± 14.14 | 70.00 ± 0.00 | 60.00 ± 0.00 | ash |" in text
    )
    assert "| 55.00 ± 7.07 | 55.00 ± 21.21 | 55.00 ± 7.07 | 45.00 ± 7.07 |" in text
    assert "| +15.00 ± 7.07 | +15.00 ± 7.07 | +15.00 ± 7.07 | 2 of 2 |" in text
    # no sentence explains marks and tests, which this layout does not have
    table, _, notes = text.partition("\n- ")
    for sign in ("Bold", "| **", "≈", "↑", "t-test", "Holm"):
        assert sign not in table + notes
    assert notes.startswith(
        "Values and gains: mean over the draws ± standard deviation. Gains are paired by "
        "draw, in points over local. Single owners are not tested."
    )


def _with_hits(cell: Cell) -> Draw:
    """Return the draw of a cell with a score that owners lack."""
    scores = {"own": {"test": {"hits": 0.5}}}
    return replace(cell.draws[0], scores=scores)


def test_a_run_is_selected_by_another_validation_score(runs: dict[str, Run]) -> None:
    run = Run.of(runs["fedavg"])
    rows = [row for row in run.rounds if row.get("metrics")]
    rows = [json.loads(json.dumps(row)) for row in rows]
    for row, score in zip(rows, (0.9, 0.1), strict=True):
        row["metrics"]["local"]["val"]["mean_auroc"] = score
    chosen = replace(run, rounds=rows).selected_by("mean_auroc")
    assert chosen.best is not None
    assert chosen.best["round"] == 1
    assert chosen.best["test"] == rows[0]["metrics"]["local"]["test"]
    assert chosen.per_owner() == {
        name: row["metrics"]["local"]["test"]["accuracy"]
        for name, row in zip(
            NAMES, [c for c in run.clients if c["round"] == 1], strict=True
        )
    }
    cell = make_cell([chosen], experiment="x", row="fedavg")
    assert cell.draws[0].best_round == {"own": 1}
    text = format_table(ResultsTable([cell]))
    assert "best by validation AUROC, averaged over owners" in text
    with pytest.raises(RunError, match='no validation score "speed"'):
        run.selected_by("speed")


ENGINES = """
from flower_fgl.simulation.run import run_one
from tests.support.short_runs import comparable
if __name__ == "__main__":
    values = {values}
    runs = [
        run_one(values, engine=engine, workers=workers)
        for engine, workers in (("local", 1), ("local", 2), ("ray", 1))
    ]
    same = {{comparable(run) for run in runs}}
    print("numbers of", len(same), "kind from", len(runs), "engines")
"""


@pytest.mark.slow
def test_all_engines_give_the_same_numbers(uneven: Path, tmp_path: Path) -> None:
    values = {
        "method": "fedavg",
        "owners": str(uneven),
        "feature-align": "project",
        "rounds": 2,
        "hidden-channels": 8,
        "output-dir": str(tmp_path / "runs"),
    }
    script = tmp_path / "compare_engines.py"
    script.write_text(ENGINES.format(values=values))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "numbers of 1 kind from 3 engines" in done.stdout, done.stderr[-3000:]


def test_a_run_without_an_owner_equals_one_that_never_had_it(
    place: Path, tmp_path: Path
) -> None:
    owners = save(tmp_path / "all", owner_graphs())
    run = simulate("fedavg", owners=str(owners), output_dir=str(tmp_path), **SHORT)
    command = ["run", str(run.path), "--without", "birch", "--quiet"]
    folder = tmp_path / "again"
    result = CliRunner().invoke(app, [*command, "--set", f"run-dir={folder}"])
    assert result.exit_code == 0, result.output
    two = save(tmp_path / "two", owner_graphs())
    (two / "birch.npz").unlink()
    never = simulate("fedavg", owners=str(two), output_dir=str(tmp_path), **SHORT)
    again = Run.load(folder)
    assert comparable(again) == comparable(never)
    assert again.config["without-owners"] == "birch"
    assert "birch: trained without them" in (folder / "card.md").read_text()
    assert "birch" not in (never.path / "card.md").read_text()
    models = [(one.path / "model.safetensors").read_bytes() for one in (again, never)]
    assert models[0] == models[1]
    # a further owner leaves the run that was made without the first
    command = ["run", str(folder), "--without", "ash", "--quiet"]
    result = CliRunner().invoke(app, [*command, "--set", f"run-dir={tmp_path / 'one'}"])
    assert result.exit_code == 0, result.output
    alone = Run.load(tmp_path / "one")
    assert alone.config["without-owners"] == "birch,ash"
    assert alone.summary["clients"] == 1


def test_owners_that_cannot_be_left_out_are_named(tmp_path: Path) -> None:
    owners = str(save(tmp_path / "all", owner_graphs()))
    with pytest.raises(ConfigError, match=r'names "brich".*Did you mean "birch"'):
        simulate("fedavg", owners=owners, without_owners="brich", **SHORT)
    with pytest.raises(ConfigError, match="leaves no owner"):
        simulate("fedavg", owners=owners, without_owners=",".join(NAMES), **SHORT)
    with pytest.raises(ConfigError, match="set owners too"):
        simulate("fedavg", without_owners="ash", **SHORT)
    result = CliRunner().invoke(app, ["run", "--without", "ash"])
    assert "name its folder" in str(result.exception)
