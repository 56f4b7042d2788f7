"""Progress of runs that Python starts."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from flower_fgl import resume, simulate
from flower_fgl.lab.simulate import show_progress
from flower_fgl.runs.summary import describe_round


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def row(number: int, phase: str = "train", **more: Any) -> dict[str, Any]:
    scores = {"val": {"accuracy": 0.5}, "test": {"accuracy": 0.25}}
    metrics = {"local": scores}
    return {"round": number, "phase": phase, "loss": 0.5, "metrics": metrics, **more}


def test_a_log_file_gets_about_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    with show_progress("fedavg", 95, lambda r: seen.append(r["round"])) as show:
        for number in range(1, 96):
            show(row(number))
        show(row(96, "finetune"))
    assert seen == list(range(1, 97))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fedavg, round 10 of 95: loss 0.500  val 50.0 %  test 25.0 %"
    assert lines[-2].startswith("fedavg, round 95 of 95")
    assert lines[-1].startswith("fedavg, finetune")
    assert len(lines) == 11


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with show_progress("fedavg", 4, first=2) as show:
        show(row(3))
        show(row(4))
    text = terminal.getvalue()
    assert "2/4" in text  # rounds of before are not run again
    last = text.split("\r")[-1]
    assert "fedavg: 100%" in last
    assert "4/4" in last
    assert "val 50.0 %" in last


def test_a_round_without_scores_shows_its_status() -> None:
    assert describe_round({"round": 1, "status": "failed"}) == "failed"
    nan = {"metrics": {"global": {"val": {"accuracy": float("nan")}}}, "loss": 1.0}
    assert describe_round(nan) == "loss 1.000"


def test_runs_show_progress_when_asked(
    small: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = simulate("fedavg", **small, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "fedavg on synthetic, round 1 of 2",
        "fedavg on synthetic, round 2 of 2",
    ]
    simulate("fedavg", **small)
    assert capsys.readouterr().err == ""
    resume(run.path, progress=True)  # a complete run is only read
    assert capsys.readouterr().err == ""


def test_a_resumed_run_names_the_round_of_its_checkpoint(
    small: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(row: Any) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    settings = {**small, "rounds": 4, "checkpoint_every": 2}
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        simulate("fedavg", **settings, run_dir=str(folder), on_round=stop)
    with caplog.at_level("INFO", logger="flower_fgl"):
        resume(folder)
    assert "Resumes after round 2 of 4." in caplog.messages
