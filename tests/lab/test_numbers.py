"""Tables, comparisons and pictures of runs that predict numbers: less error is better."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from flower_fgl.cli.main import app
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.core.score_names import ScoreScale
from flower_fgl.lab.plots import client_bars
from flower_fgl.lab.report.groups import over_seeds
from flower_fgl.lab.report.numbers import cost_until
from flower_fgl.lab.report.page import write_report
from flower_fgl.lab.results import Run, RunSet, compare
from flower_fgl.lab.tables.cells import Cell, make_cell
from flower_fgl.lab.tables.compare import gains_per_owner
from flower_fgl.lab.tables.ranks import rank_rows
from flower_fgl.lab.tables.results_table import ResultsTable
from flower_fgl.lab.tables.statistics import paired_test
from flower_fgl.lab.tables.table_formats import format_table
from flower_fgl.lab.tabulate import _columns
from tests.support.written_cells import write_run

SOLUBILITY = {
    "kind": "numbers",
    "names": ["logS"],
    "units": ["log mol/L"],
    "scale": {"mean": [-3.0], "std": [2.0]},
}
TWO = {
    "kind": "numbers",
    "names": ["logP", "logS"],
    "units": ["", "log mol/L"],
    "scale": {"mean": [0.0, -3.0], "std": [1.0, 2.0]},
}
NOISE = (0.001, -0.002, 0.003, 0.0, -0.001, 0.002)
ERRORS = {"local": 0.7, "fedavg": 0.5, "fedprox": 0.501}
"""Errors in spreads; RMSE are twice as high."""


def runs_of(
    folder: Path, target: dict[str, Any] | None = SOLUBILITY, **settings: Any
) -> dict[str, list[Run]]:
    """Write six draws of each method; with classes the accuracy is 1 − error."""
    out: dict[str, list[Run]] = {}
    for method, error in ERRORS.items():
        for draw, change in enumerate(NOISE):
            # the second owner is worse; rows differ by other noise
            values = [error + change * (1 + len(method)) / 10, error + 0.1]
            if target is None:
                values = [1 - value for value in values]
            run = write_run(
                folder / f"{method}-{draw}",
                values,
                draw=draw,
                method=method,
                target=target,
                **settings,
            )
            out.setdefault(method, []).append(run)
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Run]]:
    return runs_of(tmp_path_factory.mktemp("numbers"), owners="a.npz,b.npz")


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Run]]:
    return runs_of(tmp_path_factory.mktemp("classes"), None, owners="a.npz,b.npz")


def cells_of(runs: dict[str, list[Run]]) -> list[Cell]:
    return [
        make_cell(found, experiment="x", row=method) for method, found in runs.items()
    ]


def test_a_run_shows_errors_in_units_and_names_the_worst_owner(
    runs: dict[str, list[Run]],
) -> None:
    text = repr(runs["fedavg"][3])
    assert "test RMSE ↓ (log mol/L)" in text
    assert "test MAE ↓ (log mol/L)" in text
    assert "nRMSE" not in text
    assert "Worst owner 1 1.2, mean 1.1, best owner 0 1" in text
    assert "val acc" not in text
    assert runs["fedavg"][3].target["std"] == [2.0]


def test_several_targets_are_compared_by_the_normalised_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.25], target=TWO)
    text = repr(run)
    assert "test nRMSE ↓" in text
    assert "test RMSE" not in text.partition("\n")[0]
    assert "Targets, test RMSE: logP 0.25, logS 0.5 log mol/L" in text
    (cell,) = [make_cell([run], experiment="x", row="fedavg")]
    assert cell.main_metric == "nrmse"
    assert ResultsTable([cell]).metric == "nrmse"


def test_a_run_in_progress_shows_errors_without_their_unit(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.5], target=SOLUBILITY)
    file = run.path / "summary.json"
    summary = json.loads(file.read_text()) | {"status": "running"}
    del summary["target"]
    file.write_text(json.dumps(summary))
    assert "test RMSE ↓ " in repr(Run.load(run.path))


def test_without_a_scale_the_spread_is_that_of_the_test_values(tmp_path: Path) -> None:
    unscaled = {**SOLUBILITY, "scale": {"mean": [0.0], "std": [1.0]}}
    settings = {"target-scale": "none"}
    run = write_run(tmp_path / "a", [0.5], target=unscaled, **settings)
    (std,) = run.target["std"]
    assert std == pytest.approx((8.75 / 4) ** 0.5)  # values 1, 2, 3, 5


def test_a_table_marks_the_lowest_error_and_gains_are_positive(
    runs: dict[str, list[Run]],
) -> None:
    cells = cells_of(runs)
    text = format_table(ResultsTable(cells))
    head, _, *lines = text.splitlines()
    assert "test RMSE ↓ (log mol/L)" in head
    assert "gain over local" in head
    row = {line.split("|")[1].strip(): line for line in lines if line.startswith("|")}
    assert "| **1.1" in row["fedavg"]
    assert "better" in row["fedavg"]
    assert "+0.3988, better" in row["fedavg"]
    assert "≈" in row["fedprox"]
    assert "worse" in row["local"]
    assert "−0.3988, worse" in row["local"]
    assert "Bold: lowest mean." in text
    assert "≈ tied: less than 1 % of the target's standard deviation." in text
    assert "one point" not in text
    reloaded = [Cell.from_json(cell.to_json(), "x.json") for cell in cells]
    assert reloaded == cells
    assert cells[0].draws[0].scores["own"]["test"]["worst_rmse"] == 1.6


def test_errors_give_the_same_best_row_verdicts_and_owners_as_shares(
    runs: dict[str, list[Run]], shares: dict[str, list[Run]]
) -> None:
    tables = [
        ResultsTable(cells_of(found), metric=f"mean_{score}")
        for found, score in ((runs, "rmse"), (shares, "accuracy"))
    ]
    blocks = [table.blocks[0] for table in tables]
    assert blocks[0].best is not None
    assert blocks[1].best is not None
    assert blocks[0].best.name == blocks[1].best.name
    for one, other in zip(blocks[0].lines, blocks[1].lines, strict=True):
        pairs = [
            (blocks[0].control, blocks[1].control),
            (blocks[0].best, blocks[1].best),
        ]
        for rival, twin in pairs:
            found = tables[0].versus(one, rival)
            expected = tables[1].versus(other, twin)
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                # an RMSE has twice the size, and so has its margin
                assert found.difference == pytest.approx(2 * expected.difference)
                assert found.p == pytest.approx(expected.p, abs=1e-6)
                assert found.is_tied == expected.is_tied
    groups = [over_seeds(_flat(found), "local") for found in (runs, shares)]
    for key in ("rank", "is_better"):
        assert [g[key] for g in groups[0]] == [g[key] for g in groups[1]]
    gains = [
        gains_per_owner(found["local"], found["fedavg"], column="test", metric=metric)
        for found, metric in ((runs, "rmse"), (shares, "accuracy"))
    ]
    assert list(gains[0].index) == list(gains[1].index)
    assert list(gains[0]["wins"]) == list(gains[1]["wins"])
    worst = [
        run.owner_lines()[1].split()[2]
        for run in (runs["local"][0], shares["local"][0])
    ]
    assert worst[0] == worst[1] == "1"


def _flat(runs: dict[str, list[Run]]) -> list[Run]:
    return [run for found in runs.values() for run in found]


def test_every_layout_and_format_shows_errors(runs: dict[str, list[Run]]) -> None:
    table = ResultsTable(cells_of(runs))
    assert "cora, RMSE ↓ (log mol/L)" in format_table(table, layout="overview")
    assert "better than local" in format_table(table, layout="summary")
    owners = format_table(table, layout="owners")
    assert "highest of a draw" in owners
    assert "| +0.4" in owners
    csv = pd.read_csv(io.StringIO(format_table(table, format="csv"))).set_index("row")
    assert "accuracy" not in " ".join(csv.columns)
    errors = csv["test_rmse_mean"]
    less = pytest.approx(errors["fedavg"] - errors["local"], abs=1e-6)
    assert csv["minus_control"]["fedavg"] == less
    assert csv["minus_control"]["fedavg"] < 0
    assert r"$\downarrow$" in format_table(table, format="latex")


def test_a_comparison_states_the_gain_in_units(runs: dict[str, list[Run]]) -> None:
    found = compare(runs["fedavg"], runs["local"])
    assert found.difference > 0
    text = repr(found)
    assert text.startswith("gain in RMSE ↓ (log mol/L) of fedavg over local = +0.")
    assert "fedavg is significantly better at 95 %" in text
    tied = repr(compare(runs["fedavg"], runs["fedprox"]))
    assert "by less than 1 % of the target's standard deviation" in tied


def test_a_tie_needs_the_spread_of_the_target() -> None:
    one = [1.0 + noise for noise in NOISE]
    other = [1.0 - noise for noise in NOISE]
    assert paired_test(one, other, ScoreScale("rmse", spread=2.0)).is_tied
    assert not paired_test(one, other, ScoreScale("rmse", spread=0.05)).is_tied
    unknown = paired_test(one, other, ScoreScale("rmse"))
    assert unknown.kind == "undecided"


def test_rows_of_different_target_kinds_are_refused(
    runs: dict[str, list[Run]], shares: dict[str, list[Run]], tmp_path: Path
) -> None:
    text = (
        r"rows with different target kinds cannot be compared: numbers \(local, fedavg, "
        r"fedprox\), classes \(local, fedavg, fedprox\)\."
    )
    with pytest.raises(RunError, match=text):
        ResultsTable(cells_of(runs) + cells_of(shares))
    with pytest.raises(RunError, match="different target kinds"):
        compare(runs["fedavg"], shares["local"])
    with pytest.raises(RunError, match="different target kinds"):
        write_report([*_flat(runs), *_flat(shares)], tmp_path / "x.html")


def test_ranks_of_errors_share_their_mean() -> None:
    scale = ScoreScale("rmse")
    errors = {"a": 0.5, "b": 0.7, "c": 0.7}
    found = rank_rows({name: [scale.goodness(e)] for name, e in errors.items()})
    assert dict(found.average) == {"a": 1.0, "b": 2.5, "c": 2.5}


def test_errors_have_four_digits_and_shares_are_in_percent() -> None:
    rmse = ScoreScale("rmse", "mg/L", 2.0)
    assert rmse.show_mean([1234.5678, 1234.5678]) == "1235 ± 0"
    assert rmse.show(0.0012345) == "0.001234"
    assert rmse.show_gain(-0.5) == "−0.5"
    assert rmse.margin == 0.02
    assert ScoreScale("nrmse").show(0.6124) == "61.24"
    assert ScoreScale("nrmse").title == "nRMSE ↓"
    assert ScoreScale("worst_rmse", "mg/L").name_of("worst") == "worst ↓ (mg/L)"


def test_the_cost_counts_until_an_error_is_low_enough(
    runs: dict[str, list[Run]],
) -> None:
    run = runs["fedavg"][0]
    best = run.final["test"]["rmse"] if run.final else 0
    assert cost_until(run, 2.0).server_round == 1
    assert cost_until(run, best).server_round == 1
    missed = cost_until(run, 0.9)
    assert missed.server_round is None
    assert missed.best == best
    with pytest.raises(ConfigError, match=r"must be greater than 0, got 0\."):
        cost_until(run, 0)
    place = str(run.path)
    done = CliRunner().invoke(app, ["reach", "2", place], env={"COLUMNS": "200"})
    assert "best test RMSE ↓ (log mol/L)" in done.output


def test_the_owners_of_two_methods_are_compared_on_the_command_line(
    runs: dict[str, list[Run]],
) -> None:
    sides = [
        str(runs[name][0].path.parent / f"{name}-*") for name in ("local", "fedavg")
    ]
    done = CliRunner().invoke(
        app, ["compare", *sides, "--per-owner"], env={"COLUMNS": "200"}
    )
    assert "local, RMSE ↓ (log mol/L)" in done.output
    assert "+0.4" in done.output
    assert "2 of 2 owners gain, 0 lose" in done.output
    assert "Worst owner: 1 1.6 with local, 1 1.2 with fedavg." in done.output


def test_runs_with_other_owners_or_settings_are_not_compared_owner_by_owner(
    runs: dict[str, list[Run]], tmp_path: Path
) -> None:
    def gains(one: list[Run], other: list[Run]) -> None:
        gains_per_owner(one, other, column="test", metric="accuracy")

    found = runs_of(tmp_path / "partitions", None)
    with pytest.raises(RunError, match="client 0 of one holds other data"):
        gains(found["local"], found["fedavg"])
    with pytest.raises(RunError, match="client 0 of one holds other data"):
        RunSet(found["local"]).per_owner()
    gains(found["local"][:1], found["fedavg"][:1])
    with pytest.raises(ConfigError, match="A holds runs of fedavg, local"):
        gains([*found["local"][:1], *found["fedavg"][1:2]], found["fedprox"][:2])
    cora, pubmed = (
        write_run(tmp_path / name, [0.5, 0.6], dataset=name, owners="a.npz,b.npz")
        for name in ("cora", "pubmed")
    )
    with pytest.raises(RunError, match=r"several datasets \(cora, pubmed\)"):
        RunSet([cora, pubmed]).per_owner()
    other = write_run(tmp_path / "lr", [0.5, 0.6], draw=7, lr=0.1, owners="a.npz,b.npz")
    with pytest.raises(ConfigError, match=r"lr 0\.01 and 0\.1"):
        RunSet([cora, other]).per_owner()
    with pytest.raises(RunError, match="two runs with the same"):
        RunSet([cora, Run.load(cora.path)]).per_owner()


def test_the_score_of_an_owner_is_that_of_completed_runs(tmp_path: Path) -> None:
    done, failed = (
        write_run(tmp_path / status, [score], draw=k, status=status, owners="a.npz")
        for k, (status, score) in enumerate([("completed", 0.8), ("failed", 0.2)])
    )
    assert list(RunSet([done, failed]).per_owner()["score"]) == [0.8]
    assert list(RunSet([failed]).per_owner()["score"]) == [0.2]


def test_frames_have_the_scores_of_all_targets_together(
    runs: dict[str, list[Run]],
) -> None:
    for per in ("run", "score", "round", "client"):
        frame = RunSet(_flat(runs)).to_frame(per)
        assert "targets" not in " ".join(frame.columns)
    client = RunSet(runs["fedavg"]).to_frame("client")
    assert "accuracy" not in client
    assert client["rmse"].iloc[1] == pytest.approx(1.2)
    assert "val RMSE ↓ (log mol/L)" in repr(RunSet(_flat(runs)))
    titles = [title for title, _ in _columns(runs["fedavg"])]
    assert titles[:2] == ["val RMSE ↓ (log mol/L)", "test RMSE ↓ (log mol/L)"]


def test_pages_show_errors_without_percent(
    runs: dict[str, list[Run]], tmp_path: Path
) -> None:
    one = write_report(runs["fedavg"][:1], tmp_path / "one.html").read_text()
    assert "test RMSE ↓ (log mol/L)" in one
    assert "accuracy" not in one.partition("<h2>Settings")[0]
    several = write_report(_flat(runs), tmp_path / "all.html", against="local")
    page = several.read_text()
    assert "R²" in page
    assert "Bold: the lowest mean test score" in page
    assert "gain over local" in page
    assert "better (p" in page
    assert "accuracy" not in page.partition("<h2>Settings")[0]


def test_bars_of_errors_are_scaled_to_the_largest() -> None:
    def shown(values: Sequence[float], *, is_percent: bool) -> tuple[float, list[str]]:
        figure: Figure = client_bars(
            ["a", "b"], values, 1.0, score="RMSE", is_percent=is_percent
        )
        (panel,) = figure.axes
        return panel.get_ylim()[1], [text.get_text() for text in panel.texts]

    assert shown([3.0, 1.5], is_percent=False) == (pytest.approx(3.18), ["3", "1.5"])
    assert shown([0.3, 0.15], is_percent=True) == (pytest.approx(1.06), ["30", "15"])
    assert shown([1.5, 0.9], is_percent=True) == (pytest.approx(1.59), ["150", "90"])
