"""Trackers get every round, and never end a run."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from flower_fgl import Run, resume, simulate
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.lab.tables.compare import PER_RUN
from flower_fgl.methods import parse_config
from flower_fgl.runs import trackers
from flower_fgl.runs.trackers import Tracker, open_trackers, scalars_of
from tests.support.short_runs import comparable


class Recorder(Tracker):
    """Keeps all calls; fails in the one that is named."""

    def __init__(self, fails_in: str = "") -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails_in = fails_in

    def _record(self, name: str, content: Any) -> None:
        self.calls.append((name, content))
        if name == self.fails_in:
            raise OSError("no connection")

    def on_start(self, folder: Path, config: Any, first_round: int) -> None:
        self._record("start", (folder, config["lr"], first_round))

    def on_round(self, row: Any) -> None:
        self._record("round", row)

    def on_end(self, summary: Any) -> None:
        self._record("end", summary)


def test_a_tracker_that_is_named_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # is installed
    found = open_trackers("mlflow, wandb,mlflow")
    assert [one.package for one in found] == ["mlflow", "wandb"]  # type: ignore[attr-defined]


def test_a_tracker_gets_settings_rounds_and_summary(small: dict[str, Any]) -> None:
    recorder = Recorder()
    run = simulate("fedavg", **small, track=recorder, calibration="shared")
    rounds = ["round"] * 3  # the last one scores the calibrated model, without a loss
    assert [name for name, _ in recorder.calls] == ["start", *rounds, "end"]
    assert recorder.calls[0][1] == (run.path, 0.01, 1)
    assert [row for name, row in recorder.calls if name == "round"] == run.rounds
    assert recorder.calls[-1][1] == run.summary


@pytest.mark.parametrize("place", ["start", "round", "end"])
def test_a_tracker_that_fails_warns_once_and_the_run_goes_on(
    small: dict[str, Any], place: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Recorder(place), Recorder()
    with caplog.at_level(logging.WARNING):
        run = simulate("fedavg", **small, track=[bad, good])
    assert run.status == "completed"
    texts = [
        r.getMessage() for r in caplog.records if "failed and gets" in r.getMessage()
    ]
    (text,) = texts
    assert "Recorder" in text
    assert "no connection" in text
    assert sum(name == place for name, _ in bad.calls) == 1  # not asked again
    assert [name for name, _ in good.calls] == ["start", "round", "round", "end"]


def test_a_tracker_learns_that_the_run_failed(small: dict[str, Any]) -> None:
    def fail(row: Any) -> None:
        raise RunError("no space left")

    recorder = Recorder()
    with pytest.raises(RunError, match="no space left"):
        simulate("fedavg", **small, on_round=fail, track=recorder)
    assert recorder.calls[-1][0] == "end"
    assert recorder.calls[-1][1]["status"] == "failed"


def test_tracking_changes_no_number_and_no_comparison(small: dict[str, Any]) -> None:
    plain = simulate("fedavg", **small)
    tracked = simulate("fedavg", **small, track=Recorder())
    assert comparable(tracked) == comparable(plain)
    assert "track" in PER_RUN


def test_the_numbers_of_a_round_have_names() -> None:
    row = {
        "round": 3,
        "phase": "train",
        "loss": 0.5,
        "replies": 2,
        "failures": [{"reason": "timeout"}],
        "metrics": {"local": {"test": {"accuracy": 0.25, "macro_f1": math.nan}}},
        "bytes": {"up": {"weights": 10}},
        "seconds": {"total": None},
        "numbers": {"distance": 2.0},
    }
    expected = {
        "loss": 0.5,
        "local/test/accuracy": 0.25,
        "replies": 2.0,
        "numbers/distance": 2.0,
        "bytes/up/weights": 10.0,
        "failures": 1.0,
    }
    assert dict(scalars_of(row)) == expected
    finetuned = dict(scalars_of({**row, "phase": "finetune"}))
    assert finetuned == {f"finetune/{key}": value for key, value in expected.items()}


def test_an_unknown_tracker_is_refused() -> None:
    message = r'Unknown tracker "tensorbord".*Did you mean "tensorboard"'
    with pytest.raises(ConfigError, match=message):
        parse_config({"track": "mlflow, tensorbord", "clients": 3})
    assert parse_config({"track": "mlflow, wandb", "clients": 3}).track


def test_a_missing_package_is_named_before_a_folder_is_made(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'flower-fgl\[wandb\]'"):
        simulate("fedavg", **small, track="wandb")
    assert not Path(str(small["output_dir"])).exists()
    assert open_trackers("") == []


def test_tensorboard_has_every_number(small: dict[str, Any]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = simulate("fedavg", **small, track="tensorboard")
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    found = events.Scalars("local/test/accuracy")
    scores = [row["metrics"]["local"]["test"]["accuracy"] for row in run.rounds]
    assert [event.step for event in found] == [1, 2]
    assert [event.value for event in found] == pytest.approx(scores)
    assert set(events.Tags()["scalars"]) == {
        name for row in run.rounds for name, _ in scalars_of(row)
    }


def interrupted(settings: dict[str, Any], track: str) -> Run:
    """Stop a run of four rounds in the third, and resume it."""

    def stop(row: Any) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    folder = Path(str(settings.pop("output_dir"))) / "one"
    settings |= {"rounds": 4, "checkpoint_every": 1, "run_dir": str(folder)}
    with pytest.raises(KeyboardInterrupt):
        simulate("fedavg", **settings, track=track, on_round=stop)
    return resume(folder)


@pytest.mark.filterwarnings("default")  # of the libraries that the tracker loads
def test_mlflow_has_settings_numbers_and_files(small: dict[str, Any]) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    run = interrupted(small, "mlflow")
    client = MlflowClient(tracking_uri=f"sqlite:///{run.path.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("flower-fgl")
    (logged,) = client.search_runs([experiment.experiment_id])
    assert logged.info.status == "FINISHED"
    assert logged.info.run_name == "one"
    assert logged.data.params["synthetic.nodes"] == "120"
    history = client.get_metric_history(logged.info.run_id, "local/test/accuracy")
    last = {metric.step: metric.value for metric in history}  # later ones replace
    assert last == {
        row["round"]: row["metrics"]["local"]["test"]["accuracy"] for row in run.rounds
    }
    best = run.best
    assert best is not None
    assert logged.data.metrics["best/test/accuracy"] == best["test"]["accuracy"]
    files = {file.path for file in client.list_artifacts(logged.info.run_id)}
    assert files == {"config.toml", "summary.json", "model.safetensors"}


@pytest.mark.filterwarnings("default")  # of the libraries that the tracker loads
def test_wandb_writes_files_in_offline_mode(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = interrupted(small, "wandb")
    written = sorted((run.path / "wandb").glob("offline-run-*/*.wandb"))
    own = json.loads((run.path / "trackers.json").read_text())["wandb"]
    assert len(written) == 2  # before the interruption, and after it
    assert {path.name for path in written} == {f"run-{own}.wandb"}
    content = b"".join(path.read_bytes() for path in written)
    for name in (b"local/test/accuracy", b"best/test/accuracy", b"synthetic.nodes"):
        assert name in content
