"""The report shows the calibration of each client, and reliability diagrams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flower_fgl import simulate
from flower_fgl.algorithms.calibration import calibration_error
from flower_fgl.cli.main import app
from flower_fgl.lab import plots
from flower_fgl.lab.report.numbers import (
    calibration_rows,
    owner_reliability,
    reliability_of,
)
from flower_fgl.lab.report.page import write_report
from tests.support.number_targets import number_files
from tests.support.owners import run_owners
from tests.support.short_runs import SMALL


@pytest.mark.parametrize("calibration", ["owner", "shared"])
def test_the_report_has_a_table_of_calibration(
    calibration: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {**SMALL, "clients": 3, "coverage": 0.7}
    run = simulate(
        "fedavg", run_dir=str(tmp_path / "run"), calibration=calibration, **settings
    )
    rows = calibration_rows(run)
    assert [name for name, _ in rows] == ["0", "1", "2"]
    scope, number = "local", run.best["round"] if run.best else 0
    if calibration == "shared":
        scope, number = "global", run.summary["calibrated"]["round"]
    own = [row for row in run.clients if row["round"] == number and "metrics" in row]
    for (_, found), row in zip(rows, own, strict=True):
        test = row["metrics"][scope]["test"]
        assert found == {key: test.get(key) for key in found}
        assert {"ece", "brier", "ece_calibrated"} <= found.keys()
        assert "interval" not in found
    command = ["reach", "0.9", str(run.path), "--metric", "ece"]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    if calibration == "owner":
        assert "best test ECE ↓, %" in done.output  # shares are shown in percent
    page = write_report([run]).read_text(encoding="utf-8")
    assert "<h2>Calibration</h2>" in page
    assert "ECE calibrated" in page
    diagrams, by_owner = reliability_of(run), owner_reliability(run)
    assert set(diagrams) == ({"before", "after"} if calibration == "shared" else set())
    assert "Accuracy by confidence" in page
    assert list(by_owner) == (["0", "1", "2"] if calibration == "owner" else [])
    for (_, found), each in zip(rows, by_owner.values(), strict=False):
        for name, key in (("before", "ece"), ("after", "ece_calibrated")):
            assert calibration_error(torch.tensor(each[name])) == pytest.approx(
                found[key]
            )


@pytest.mark.parametrize("evaluate", ["local", "global"])
def test_the_calibration_after_fine_tuning_is_shown(
    evaluate: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {**SMALL, "clients": 3, "calibration": "owner"}
    settings |= {"evaluate": evaluate, "fedavg.finetune-epochs": 2}
    run = simulate("fedavg", run_dir=str(tmp_path / "run"), **settings)
    number = run.summary["finetuned"]["round"]
    own = [row for row in run.clients if row["round"] == number and "metrics" in row]
    tests = [row["metrics"]["local"]["test"] for row in own]
    assert [found["ece"] for _, found in calibration_rows(run)] == [
        test["ece"] for test in tests
    ]
    drawn = [each["after"] for each in owner_reliability(run).values()]
    assert drawn == [row["reliability"]["local"]["after"] for row in own]


def test_each_owner_has_a_panel_with_two_lines() -> None:
    sums = [[4.0, 0.0, 1.0], [1.0, 0.0, 0.9], [2.0, 0.0, 1.0]]
    owners = {f"bank{k}": {"before": sums, "after": sums} for k in range(4)}
    figure = plots.owner_reliability(owners)
    used = [panel for panel in figure.axes if panel.lines]
    assert [panel.get_title(loc="left") for panel in used] == [*owners]
    assert [len(panel.lines) for panel in used] == [3] * 4


def test_the_report_has_a_table_of_intervals(tmp_path: Path) -> None:
    nodes = number_files(tmp_path / "files")
    run = run_owners(
        nodes, tmp_path / "run", target_kind="numbers", calibration="owner"
    )
    (_, found), *_ = calibration_rows(run)
    assert list(found) == ["coverage", "interval"]
    assert "interval" in write_report([run]).read_text(encoding="utf-8")


def test_a_run_without_calibration_has_no_such_section(tmp_path: Path) -> None:
    run = simulate("fedavg", run_dir=str(tmp_path / "run"), clients=3, **SMALL)
    assert calibration_rows(run) == []
    assert "<h2>Calibration</h2>" not in write_report([run]).read_text(encoding="utf-8")


def test_a_diagram_has_one_point_for_each_bin_with_items() -> None:
    sums = [[4.0, 0.0, 1.0], [1.0, 0.0, 0.9], [2.0, 0.0, 1.0]]
    figure = plots.reliability({"before": sums})
    _, line = figure.axes[0].lines
    assert line.get_xydata().tolist() == [[0.25, 0.5], [0.9, 1.0]]
