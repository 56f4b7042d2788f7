from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flower_fgl import Run, simulate
from flower_fgl.cli.main import app
from flower_fgl.core.errors import ConfigError
from flower_fgl.lab.report.numbers import Cost, cost_until


def row(number: int, accuracy: float | None, num_bytes: int = 5) -> dict[str, Any]:
    metrics = {} if accuracy is None else {"local": {"test": {"accuracy": accuracy}}}
    return {
        "round": number,
        "phase": "train",
        "status": "ok",
        "bytes": {"up": {"weights": num_bytes}, "down": {"weights": 1, "config": 1}},
        "seconds": {"total": 2.0},
        "metrics": metrics,
    }


def run_of(rows: list[dict[str, Any]]) -> Run:
    return Run(Path("a"), {}, {}, {"method": "fedavg"}, rows, [])


def test_costs_are_added_up_to_the_first_round_that_has_the_accuracy() -> None:
    # exchanges before round 1 and rounds without scores count
    rows = [row(0, None, 100), row(1, 0.5), row(2, None), row(3, 0.8), row(4, 0.9)]
    run = run_of(rows)
    assert cost_until(run, 0.8) == Cost(3, 0.9, 102 + 3 * 7, 8.0)
    assert cost_until(run, 0.5) == Cost(1, 0.9, 102 + 7, 4.0)
    assert cost_until(run, 0.95) == Cost(None, 0.9, 102 + 4 * 7, 10.0)


def test_failed_rounds_and_fine_tuning_reach_nothing_but_cost() -> None:
    failed = row(2, 0.95) | {"status": "failed"}
    after = row(4, 0.9) | {"phase": "finetune"}
    rows = [row(1, 0.3), failed, row(3, 0.5), after]
    assert cost_until(run_of(rows), 0.8) == Cost(None, 0.5, 4 * 7, 8.0)
    assert cost_until(run_of(rows), 0.5) == Cost(3, 0.5, 3 * 7, 6.0)


def test_a_run_without_scores_has_reached_nothing() -> None:
    assert cost_until(run_of([row(1, None)]), 0.5) == Cost(None, None, 7, 2.0)


def test_a_column_that_no_round_has_and_a_share_above_one_are_refused() -> None:
    run = run_of([row(1, 0.5)])
    with pytest.raises(ConfigError, match=r'no column "unseen"\. Known: test'):
        cost_until(run, 0.5, column="unseen")
    with pytest.raises(ConfigError, match="at most 1, got 80"):
        cost_until(run, 80)


def test_the_command_has_a_line_for_each_run(small: dict[str, Any]) -> None:
    paths = [str(simulate("fedavg", **{**small, "seed": s}).path) for s in (0, 1)]
    done = CliRunner().invoke(app, ["reach", "0.01", *paths], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if "fedavg" in line]
    assert len(lines) == 2
    assert "not reached" not in done.output
    done = CliRunner().invoke(app, ["reach", "1.0", *paths], env={"COLUMNS": "200"})
    assert done.output.count("not reached") == 2


def test_help_says_what_the_arguments_are() -> None:
    done = CliRunner().invoke(app, ["reach", "--help"], env={"COLUMNS": "200"})
    assert "Target accuracy, AUROC or RMSE, e.g. 0.8.  [required]" in done.output
