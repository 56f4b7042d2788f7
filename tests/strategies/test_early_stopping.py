"""``should_stop`` of ``Strategy.start``, and early stopping by validation scores."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
from flwr.serverapp.strategy import Result, Strategy

from flower_fgl import Run, simulate
from flower_fgl.runs.summary import rounds_without_gain, score_text, summarise
from flower_fgl.strategies.base import FglStrategy
from tests.support.short_runs import SMALL, comparable


def row(number: int, accuracy: float | None, nodes: int = 10) -> dict[str, Any]:
    val = {"num_nodes": nodes, "accuracy": accuracy}
    scores = {"local": {"val": val}} if accuracy is not None else {}
    return {"round": number, "phase": "train", "status": "ok", "metrics": scores}


def as_error(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a run with the negative of the scores as RMSE."""
    out = []
    for one in rows:
        val = dict(one["metrics"].get("local", {}).get("val", {}))
        value = val.pop("accuracy", None)
        val["rmse"] = None if value is None else -value
        metrics = {"local": {"val": val}} if one["metrics"] else {}
        out.append({**one, "metrics": metrics, "metric": "rmse"})
    return out


@pytest.mark.parametrize(
    ("scores", "waited"),
    [
        ([], 0),
        ([0.5], 0),
        ([0.5, 0.6, 0.7], 0),
        ([0.5, 0.7, 0.6, 0.7], 2),  # an equal score is no gain
        ([0.7, None, None, 0.6], 1),  # rounds that were not evaluated do not count
        ([0.7, math.nan, 0.6], 1),
    ],
)
def test_evaluated_rounds_since_the_best_are_counted(
    scores: list[float | None], waited: int
) -> None:
    rows = [row(number, score) for number, score in enumerate(scores, start=1)]
    assert rounds_without_gain(rows) == waited
    assert rounds_without_gain(as_error(rows)) == waited
    best, error = (_best_round(found) for found in (rows, as_error(rows)))
    assert best == error


def _best_round(rows: list[dict[str, Any]]) -> int | None:
    known = dict.fromkeys(
        ("method", "dataset", "clients", "seed", "engine", "partition_sha256")
    )
    found = summarise(rows, evaluate=None, status="running", **known)
    return found["best"] and int(found["best"]["round"])


def test_the_best_round_of_numbers_has_the_lowest_error_and_is_the_latest() -> None:
    errors = [1.2, math.nan, 0.9, 0.9, 1.1]
    rows = as_error([row(k, -error) for k, error in enumerate(errors, start=1)])
    assert _best_round(rows) == 4
    assert score_text(rows[0] | {"loss": 0.5}) == "loss 0.500  val RMSE 1.2"


def test_a_round_that_scored_fewer_nodes_is_no_gain_and_no_loss() -> None:
    rows = [row(1, 0.5), row(2, 0.9, nodes=4), row(3, 0.4)]
    assert rounds_without_gain(rows) == 1
    assert rounds_without_gain([*rows, row(4, 0.1, nodes=12)]) == 0  # one joined


def test_failed_rounds_and_fine_tuning_do_not_count() -> None:
    rows = [row(1, 0.5), row(2, 0.4) | {"status": "failed"}]
    rows += [row(3, 0.4) | {"phase": "finetune"}]
    assert rounds_without_gain(rows) == 0


def test_start_has_every_argument_of_flowers_and_that_of_1_43() -> None:
    ours = inspect.signature(FglStrategy.start).parameters
    assert list(inspect.signature(Strategy.start).parameters.keys() - ours) == []
    assert ours["should_stop"].default is None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Six rounds that are all run."""
    folder = tmp_path_factory.mktemp("whole")
    return run(folder, rounds=6)


def run(folder: Path, **changes: Any) -> Run:
    settings = {**SMALL, "clients": 2, "lr": 0.5, **changes}
    return simulate("fedavg", output_dir=str(folder), **settings)


def test_a_run_ends_after_round_patience_rounds_without_a_better_score(
    whole: Run, tmp_path: Path
) -> None:
    waited = [rounds_without_gain(whole.rounds[:n]) for n in range(1, 7)]
    assert 2 in waited, "the seed must give two rounds without gain"
    last = waited.index(2) + 1
    assert last < 6
    short = run(tmp_path, rounds=6, round_patience=2, keep_checkpoint=True)
    assert short.status == "completed"
    assert short.summary["rounds"] == last
    for mine, right in zip(short.rounds, whole.rounds[:last], strict=True):
        assert mine | {"seconds": {}} == right | {"seconds": {}}
    kept = list((short.path / "checkpoint").glob("*"))
    assert kept, "the last round's checkpoint is kept"


def test_enough_patience_changes_nothing(whole: Run, tmp_path: Path) -> None:
    assert comparable(run(tmp_path, rounds=6, round_patience=6)) == comparable(whole)


def test_should_stop_gets_the_metrics_of_each_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[int, dict[str, Any]]] = []
    start = FglStrategy.start

    def should_stop(server_round: int, result: Result) -> bool:
        assert server_round in result.train_metrics_clientapp
        calls.append((server_round, dict(result.evaluate_metrics_clientapp)))
        return server_round == 2

    monkeypatch.setattr(
        FglStrategy,
        "start",
        lambda self, grid, **_: start(self, grid, should_stop=should_stop),
    )
    made = run(tmp_path, rounds=4)
    assert [number for number, _ in calls] == [1, 2]
    seen = calls[-1][1]
    assert sorted(seen) == [1, 2]
    for number, metrics in seen.items():
        scores = made.rounds[number - 1]["metrics"]["local"]
        assert metrics["local/val"] == pytest.approx(scores["val"]["accuracy"])
    assert made.summary["rounds"] == 2
