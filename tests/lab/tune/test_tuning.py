"""Tuning: equal budgets, validation scores only, studies that continue after a kill."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from flower_fgl import register, simulate
from flower_fgl.cli.main import app
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.core import extensions
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.core.options import Scalar
from flower_fgl.lab.experiments import jobs
from flower_fgl.lab.experiments.experiment_file import (
    Experiment,
    effective_settings,
    read_experiment,
)
from flower_fgl.lab.experiments.search_space import (
    Choices,
    Range,
    nearest_point,
    row_space,
    space_points,
    space_size,
)
from flower_fgl.lab.tune import trials
from flower_fgl.lab.tune.trials import ENDED, KILLED, Outcome, TrialProcesses, run_trial
from flower_fgl.lab.tune.tuned_file import (
    hash_of_study,
    write_study,
    write_tuned_experiment,
)
from flower_fgl.lab.tune.tuning import (
    RowStudy,
    Trial,
    _distribution,
    rows_to_tune,
    tune,
)
from flower_fgl.methods import parse_config
from flower_fgl.runs.files import flatten_config
from flower_fgl.simulation.run import run_one
from tests.engines.test_run import environment, marked
from tests.support.flower_deployment import wait_until
from tests.support.number_targets import number_files
from tests.support.thread_workers import use_threads

TEXT = """
title = "Two methods"
draws = 3
[config]
dataset = "synthetic"
clients = 3
rounds = 1
synthetic.nodes = 200
[[case]]
name = "plain"
method = "fedavg"
[[case]]
name = "near"
method = "fedprox"
fedprox.mu = 0.5
[tune]
lr = [0.003, 0.01, 0.03]
dropout = {low = 0.0, high = 0.8}
fedprox.mu = {low = 1e-4, high = 1.0, log = true}
[published]
near = 80.5
"""


def study_hash(studies: list[RowStudy]) -> str:
    """Return the SHA-256 of the settings and scores of all trials."""
    rows = {
        study.row.name: {
            "trials": [
                {"trial": t.index, "settings": t.settings, "score": t.score}
                for t in study.trials
            ]
        }
        for study in studies
    }
    return hash_of_study({"rows": rows})


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Experiment]:
    """Write and read an experiment file, with replaced parts."""

    def write(*replacements: tuple[str, str]) -> Experiment:
        text = TEXT
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        (path := tmp_path / "two.toml").write_text(text)
        return read_experiment(path)

    return write


def pretend(settings: Mapping[str, Scalar], folder: Path) -> Outcome:
    """Return a score that is best at lr 0.03, dropout 0.3 and a small mu."""
    lr = float(settings.get("lr", 0.01))
    dropout = float(settings.get("dropout", 0.5))
    score = 0.8 - abs(lr - 0.03) - 0.1 * abs(dropout - 0.3)
    score -= 0.01 * float(settings.get("fedprox.mu", 0))
    return Outcome(score + 0.001 * int(settings["seed"]), 1, 100, 0.5)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "run_trial", pretend)


def all_settings(studies: list[RowStudy]) -> list[list[Mapping[str, Scalar]]]:
    return [[trial.settings for trial in study.trials] for study in studies]


# ------------------------------------------------------------------------- search spaces
def test_a_row_has_the_general_keys_and_those_of_its_method(
    written: Callable[..., Experiment],
) -> None:
    experiment = written(("[tune]", "[tune]\nfedavg.dropout = []\nfedprox.lr = [0.1]"))
    plain, near = rows_to_tune(experiment)
    assert plain.space == {"lr": Choices((0.01, 0.003, 0.03))}
    assert near.space == {
        "lr": Choices((0.01, 0.1)),  # the method's list, and the row's own value first
        "dropout": Range(0.0, 0.8),
        "fedprox.mu": Range(1e-4, 1.0, log=True),
    }
    assert near.default == {"lr": 0.01, "dropout": 0.5, "fedprox.mu": 0.5}
    assert space_size(plain.space, plain.default) == 3
    assert space_size(near.space, near.default) is None
    assert "seed" not in plain.settings


def test_a_case_has_entries_of_its_own(written: Callable[..., Experiment]) -> None:
    experiment = written(
        (
            "[tune]",
            '[tune]\nfedprox.lr = [0.1]\n"a.b".fedprox.mu = []\n"a.b".lr = [0.3]',
        ),
        ('"near"', '"a.b"'),
        ("near = 80.5", '"a.b" = 80.5'),
    )
    plain, other = rows_to_tune(experiment)
    assert plain.space == {
        "lr": Choices((0.01, 0.003, 0.03)),
        "dropout": Range(0.0, 0.8),
    }
    assert other.space == {"lr": Choices((0.01, 0.3)), "dropout": Range(0.0, 0.8)}


def test_rows_over_owners_have_no_default_number_of_clients(
    written: Callable[..., Experiment],
) -> None:
    experiment = written(
        ('dataset = "synthetic"\nclients = 3\n', 'owners = "trees"\n'),
        ("synthetic.nodes = 200\n", ""),
    )
    assert all("clients" not in row.settings for row in rows_to_tune(experiment))


def test_own_values_are_those_of_the_method_and_the_case() -> None:
    space, default = row_space({"lr": Choices((1, 0.1))}, {"method": "fedpano"})
    assert default == {"lr": 0.1}
    assert space == {"lr": Choices((0.1, 1.0))}  # typed as the setting, without repeats


def test_without_optuna_nothing_is_written(
    written: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flower_fgl.lab.tune.tuning.find_spec", lambda _: None)
    experiment = written()
    with pytest.raises(ConfigError, match=r"needs Optuna\. Install it: pip install"):
        tune(experiment, rows_to_tune(experiment), tmp_path / "tune", budget=2)
    assert not (tmp_path / "tune").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "[0.003, 0.01, 0.03]",
            "0.003",
            r"tune.lr must be a list of values or a range",
        ),
        (
            "[0.003, 0.01, 0.03]",
            "{low = 1, high = 1}",
            r"tune.lr needs finite numbers low < hi",
        ),
        (
            "low = 0.0, high = 0.8",
            "low = 0.0",
            r"tune.dropout needs finite numbers low < high",
        ),
        ("high = 0.8}", "high = 0.8, q = 1}", r'tune.dropout has an unknown "q"'),
        (
            "low = 0.0, high = 0.8",
            "low = 0.0, high = 0.8, log = true",
            r"needs low > 0",
        ),
        ("high = 0.8", "high = inf", r"tune.dropout needs finite numbers"),
        ("high = 0.8", "high = 0.8, step = nan", r"tune.dropout needs finite numbers"),
        ("high = 0.8", "high = 0.8, step = inf", r"tune.dropout needs finite numbers"),
        (
            "high = 0.8",
            "high = 0.8, step = 1e-31",
            r"more than 1,000,000 steps of 1e-31",
        ),
        ("[tune]", "[tune]\nlrr = [1]", r'row "plain": tune.lrr: .*Did you mean "lr"'),
        ("[tune]", "[tune]\nlrr = []", r'row "plain": tune.lrr: .*Did you mean "lr"'),
        (
            "[tune]",
            "[tune]\nlrr = {low = 1e-4, high = 1.0}",
            r'tune.lrr: Unknown setting "lrr". Did you mean "lr"',
        ),
        (
            "[tune]",
            "[tune]\nfedprox.muu = {low = 0.1, high = 0.2}",
            r'tune.fedprox.muu: Unknown .*Did you mean "fedprox.mu"',
        ),
        ("[tune]", "[tune]\nfedprox.muu = []", r'Did you mean "fedprox.mu"'),
        ("[tune]", "[tune]\nnear.lrr = []", r'row "near": .*Did you mean "lr"'),
        (
            "high = 0.8",
            "high = 0.8, step = 0.09999999",  # Optuna would not store 0.5
            r"own value 0.5 is not reached in steps",
        ),
        (
            'name = "near"',
            'name = "plain, default"',
            r'the default of row "plain" would have the same folder, plain_default',
        ),
        (
            'name = "near"',
            'name = "plain_"',
            r'two: row "plain" and row "plain_" would have the same folder, plain, in',
        ),
        ("[tune]", "[tune]\nmodel = ['x']", r"tune.model = 'x'"),
        ("[tune]", "[tune]\nrounds = [5, 10]", r"tune.rounds: all rows share"),
        ("[tune]", "[tune]\nseed = [5, 10]", r"tune.seed: all rows share"),
        # validation nodes or numbers of their own
        *(
            ("[tune]", f"[tune]\n{key} = ['x']", rf"tune.{key}: all rows share")
            for key in (
                *("split-by", "without-owners", "target-kind", "target-node"),
                *("target-relation", "types"),
            )
        ),
        (
            'method = "fedavg"\n',
            'method = "fedpano"\n',  # participants = 5 by default
            r"tune.participation: fedpano has participants = 5 .*fedpano.participation = ",
        ),
        (
            "[tune]",
            "[tune]\nmoon.mu = [1.0]",
            r"tune.moon.mu belongs to moon, which is",
        ),
        ("[tune]", "[tune]\nplain.moon.mu = []", r"method of this case is fedavg"),
        ("high = 0.8", "high = 0.4", r"own value 0.5 is outside the range 0 to 0.4"),
        ("high = 0.8", "high = 2.0", r"tune.dropout = 2.0: dropout must be"),
        (
            "high = 0.8",
            "high = 0.8, step = 0.2",
            r"own value 0.5 is not reached in steps of 0.2 from 0",
        ),
        (
            "[tune]",
            "[tune]\nlocal-epochs = {low = 1, high = 9, step = 1.5}",
            r"tune.local-epochs is a whole number, and so must be low, high and step",
        ),
        ("[published]", "[grid]\nlr = [0.1]\n[published]", r"lr is in \[grid\]"),
        ("draws = 3", "tune-draws = [7]", r"two has no draws"),
        ("draws = 3", "draws = 3\ntune-draws = [1, 1]", r"a list of distinct draws"),
        (
            "draws = 3",
            "draws = 3\ntune-draws = [2, 3]",
            r"\[2\] are draws of the table",
        ),
        (
            "[published]",
            "[tuning]\nexperiment = 'x'\nbudget = 2\ndraws = [3]\nmetric = 'x'\n"
            "study = 'y'\n[published]",
            r"tuned already",
        ),
    ],
)
def test_a_wrong_space_is_reported_before_a_trial_runs(
    old: str, new: str, message: str, written: Callable[..., Experiment]
) -> None:
    also = [("[tune]", "[tune]\nparticipation = [0.5]")] * ("fedpano" in new)
    with pytest.raises(ConfigError, match=message):
        rows_to_tune(written((old, new), *also, ("near = 80.5", "")))


# ------------------------------------------------------------------------------- studies
@pytest.mark.usefixtures("pretended")
def test_all_rows_get_the_same_trials_and_the_first_is_the_default(
    written: Callable[..., Experiment], tmp_path: Path
) -> None:
    experiment = written()
    rows = rows_to_tune(experiment)
    studies = tune(experiment, rows, tmp_path / "tune", budget=14)
    assert [len(study.trials) for study in studies] == [14, 14]
    for study, row in zip(studies, rows, strict=True):
        assert study.trials[0].settings == row.default
        points = [json.dumps(trial.settings) for trial in study.trials]
        assert len(set(points)) == 14
        assert study.best.score == max(trial.score or 0 for trial in study.trials)
        assert study.best.settings["lr"] == 0.03
        # the tuning draw is not one of the table's
        assert [list(trial.outcomes) for trial in study.trials] == [[3]] * 14


def test_an_error_is_tuned_like_the_share_that_it_lacks(
    written: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = written()
    rows = rows_to_tune(experiment)

    def pretend_error(settings: Mapping[str, Scalar], folder: Path) -> Outcome:
        share = pretend(settings, folder).score or 0.0
        return Outcome(1 - share, 1, 100, 0.5)

    monkeypatch.setattr(trials, "run_trial", pretend)
    shares = tune(experiment, rows, tmp_path / "shares", budget=14)
    monkeypatch.setattr(trials, "run_trial", pretend_error)
    monkeypatch.setattr(
        "flower_fgl.lab.tune.tuning.parse_config",
        lambda settings: replace(parse_config(settings), main_score="rmse"),
    )
    errors = tune(experiment, rows, tmp_path / "errors", budget=14)
    assert [study.metric for study in errors] == ["rmse", "rmse"]
    assert all_settings(errors) == all_settings(shares)
    for one, other in zip(errors, shares, strict=True):
        assert one.best.index == other.best.index
    write_study(experiment, errors, tmp_path, budget=14)
    table = json.loads((tmp_path / "study.json").read_text())
    assert table["metric"] == "validation RMSE"


@pytest.mark.usefixtures("pretended")
def test_a_study_is_the_same_after_a_kill_and_with_a_larger_budget_later(
    written: Callable[..., Experiment], tmp_path: Path
) -> None:
    experiment = written(("draws = 3", "draws = 3\ntune-draws = [7, 8]"))
    rows = rows_to_tune(experiment)
    whole = tune(experiment, rows, tmp_path / "whole", budget=11)
    seen: list[int] = []

    def stop(study: RowStudy, trial: Trial) -> None:
        seen.append(trial.index)
        if len(seen) in (3, 9):
            raise KeyboardInterrupt

    for budget in (7, 11):
        with pytest.raises(KeyboardInterrupt):
            tune(experiment, rows, tmp_path / "cut", budget=budget, on_trial=stop)
        journal = tmp_path / "cut" / "study.log"
        journal.write_bytes(journal.read_bytes() + b'{"op_code": 4, "wor')
        kept = tmp_path / f"journal-{budget}"
        os.link(journal, kept)  # shows whether the journal is rewritten in place
    parts = tune(experiment, rows, tmp_path / "cut", budget=11, on_trial=stop)
    assert (tmp_path / "journal-11").read_bytes().endswith(b'"wor')
    assert all_settings(parts) == all_settings(whole)
    assert study_hash(parts) == study_hash(whole)
    assert len(seen) == 22  # no trial ran twice
    trial = parts[0].trials[0]
    assert trial.score == pytest.approx(
        (trial.outcomes[7].score + trial.outcomes[8].score) / 2  # type: ignore[operator]
    )


@pytest.mark.usefixtures("pretended")
def test_proposals_from_lists_are_those_of_published_studies(
    written: Callable[..., Experiment], tmp_path: Path
) -> None:
    pytest.importorskip("optuna")
    experiment = written(
        ("{low = 0.0, high = 0.8}", "[0.0, 0.3, 0.5, 0.8]"),
        ("{low = 1e-4, high = 1.0, log = true}", "[0.01, 0.1, 0.5, 1.0]"),
    )
    rows = rows_to_tune(experiment)[1:]
    (study,) = tune(experiment, rows, tmp_path, budget=12)
    # Optuna 4.9.0 and 5.0.0 with multivariate = True, which published studies had
    assert [tuple(trial.settings.values()) for trial in study.trials[8:]] == [
        (0.003, 0.0, 0.1),
        (0.03, 0.3, 0.01),
        (0.03, 0.5, 0.1),
        (0.01, 0.0, 0.1),
    ]


@pytest.mark.usefixtures("pretended")
def test_another_optuna_continues_a_study_only_with_the_same_proposals(
    written: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optuna = pytest.importorskip("optuna")
    experiment = written()
    rows = rows_to_tune(experiment)
    monkeypatch.setattr(optuna, "__version__", "4.9.0")
    tune(experiment, rows[1:], tmp_path, budget=8)
    monkeypatch.setattr(optuna, "__version__", "5.0.0")
    (study,) = tune(experiment, rows[1:], tmp_path, budget=12)
    assert study.optuna_versions == ["4.9.0", "5.0.0"]
    write_study(experiment, [study], tmp_path, budget=12)
    kept = json.loads((tmp_path / "study.json").read_text())
    assert kept["optuna"] == ["4.9.0", "5.0.0"]

    monkeypatch.setattr(optuna, "__version__", "6.0.0")
    sampler = optuna.samplers.TPESampler
    monkeypatch.setattr(
        optuna.samplers,
        "TPESampler",
        lambda **options: sampler(**{**options, "multivariate": False}),
    )
    tune(experiment, rows[1:], tmp_path, budget=12)  # nothing is missing
    journal = tmp_path / "study.log"
    with pytest.raises(
        RunError,
        match=r'row "near" whose trial 8 was proposed by Optuna 4\.9\.0 and 5\.0\.0\. '
        r"Optuna 6\.0\.0 proposes another one",
    ):
        tune(experiment, rows[1:], tmp_path, budget=16)
    # a study from before the version was recorded
    lines = journal.read_text().splitlines()
    unnamed = [line for line in lines if '"optuna"' not in line]
    assert len(unnamed) == len(lines) - 2
    journal.write_text("\n".join(unnamed) + "\n")
    with pytest.raises(RunError, match=r"trial 8 was proposed by another Optuna\."):
        tune(experiment, rows[1:], tmp_path, budget=16)
    monkeypatch.setattr(optuna.samplers, "TPESampler", sampler)
    (study,) = tune(experiment, rows[1:], tmp_path, budget=16)
    assert len(study.trials) == 16


@pytest.mark.usefixtures("pretended")
def test_a_space_as_small_as_the_budget_is_covered(
    written: Callable[..., Experiment], tmp_path: Path
) -> None:
    experiment = written(("{low = 0.0, high = 0.8}", "[0.0, 0.5]"))
    rows = rows_to_tune(experiment)[:1]
    for budget in (3, 9):
        (study,) = tune(experiment, rows, tmp_path, budget=budget)
    points = {(t.settings["lr"], t.settings["dropout"]) for t in study.trials}
    assert len(study.trials) == 6
    assert points == {(lr, d) for lr in (0.003, 0.01, 0.03) for d in (0.0, 0.5)}


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("budget", [5, 8, 12])
@pytest.mark.parametrize(
    ("key", "entry", "values"),
    [
        ("local-epochs", "{low = 1, high = 5}", [1, 2, 3, 4, 5]),
        ("local-epochs", "{low = 1, high = 10, step = 2}", [1, 3, 5, 7, 9]),
        ("local-epochs", "{low = 1, high = 6, log = true}", [1, 2, 3, 4, 5, 6]),
        ("dropout", "{low = 0, high = 0.9, step = 0.1}", [k / 10 for k in range(10)]),
    ],
)
def test_a_range_with_steps_is_covered(
    written: Callable[..., Experiment],
    tmp_path: Path,
    key: str,
    entry: str,
    values: list[float],
    budget: int,
) -> None:
    experiment = written(
        ("lr = [0.003, 0.01, 0.03]", f"{key} = {entry}"),
        ("dropout = {low = 0.0, high = 0.8}", "lr = [0.01]"),
    )
    rows = rows_to_tune(experiment)[:1]
    for _ in range(2):  # the second time there is nothing left to try
        (study,) = tune(experiment, rows, tmp_path, budget=budget)
    points = sorted(float(trial.settings[key]) for trial in study.trials)
    assert len(set(points)) == len(points) == min(budget, len(values))
    if budget >= len(values):
        assert points == pytest.approx(values)


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("budget", [6, 7])
def test_the_last_step_is_not_above_the_bound_by_a_rounding_error(
    written: Callable[..., Experiment], tmp_path: Path, budget: int
) -> None:
    experiment = written(
        ("[0.003, 0.01, 0.03]", "[]"),
        ("low = 0.0, high = 0.8", "low = 0.1, high = 0.7, step = 0.1"),
    )
    (study,) = tune(experiment, rows_to_tune(experiment)[:1], tmp_path, budget=budget)
    points = sorted(float(trial.settings["dropout"]) for trial in study.trials)
    assert len(points) == budget
    if budget == 7:
        assert points == pytest.approx([k / 10 for k in range(1, 8)])
        assert points[-1] == 0.7  # 6 * 0.1 + 0.1 is more


@pytest.mark.parametrize("low", [0.0, 0.1, 0.05, 1.1])
@pytest.mark.parametrize("step", [0.1, 0.3, 0.07, 1e-3])
@pytest.mark.parametrize("number", [1, 3, 6, 17])
def test_optuna_accepts_all_points_of_a_range_with_steps(
    low: float, step: float, number: int
) -> None:
    pytest.importorskip("optuna")
    high = float(f"{low + number * step:.6g}")
    dimension, default = Range(low, high, step=step), {"x": high}
    points = space_points({"x": dimension}, default)
    stored = _distribution(dimension, high)
    assert len(points) == number + 1
    assert points[-1] == default
    assert all(stored._contains(float(point["x"])) for point in points)


def test_points_that_differ_by_a_rounding_error_are_one(
    written: Callable[..., Experiment], tmp_path: Path
) -> None:
    optuna = pytest.importorskip("optuna")
    experiment = written(
        ("lr = [0.003, 0.01, 0.03]\n", ""),
        ("low = 0.0, high = 0.8", "low = 0.0, high = 0.9, step = 0.1"),
        ('method = "fedavg"', 'method = "fedavg"\ndropout = 0.3'),
    )
    row = rows_to_tune(experiment)[0]
    for seed in range(3):  # Optuna's 0.3 is 0.30000000000000004
        study = RowStudy(optuna.storages.InMemoryStorage(), row, [3], seed)
        while batch := study.next_batch(9):
            for trial in batch:
                trial.outcomes[3] = Outcome(0.5)
                study.record(trial)
        values = [float(trial.settings["dropout"]) for trial in study.trials]
        assert len({round(value, 6) for value in values}) == len(values) == 9
    assert nearest_point(row.space, row.default, {"dropout": 0.1 * 3}) == row.default
    # a stored trial of an earlier version counts, and keeps its value
    storage = optuna.storages.InMemoryStorage()
    study = RowStudy(storage, row, [3], 0)
    for index, value in enumerate([0.3, *(k * 0.1 for k in range(8))]):
        trial = Trial(index, {"dropout": value}, {3: Outcome(0.5)})
        study.record(trial)
    study = RowStudy(storage, row, [3], 0)
    assert study.trials[4].settings == {"dropout": 0.1 * 3}
    rest = study.next_batch(10)
    assert {trial.settings["dropout"] for trial in rest} <= {0.8, 0.9}


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    ("rates", "drops", "budget"), [(3, 1, 2), (3, 2, 5), (5, 2, 9)]
)
def test_a_budget_just_below_the_size_of_a_space_is_spent(
    written: Callable[..., Experiment],
    tmp_path: Path,
    rates: int,
    drops: int,
    budget: int,
) -> None:
    lists = [0.01, 0.003, 0.03, 0.1, 0.3][:rates], [0.5, 0.0][:drops]
    experiment = written(
        ("[0.003, 0.01, 0.03]", str(lists[0])),
        ("{low = 0.0, high = 0.8}", str(lists[1])),
    )
    rows = rows_to_tune(experiment)[:1]
    (study,) = tune(experiment, rows, tmp_path, budget=budget)
    points = {tuple(sorted(trial.settings.items())) for trial in study.trials}
    assert len(points) == len(study.trials) == budget


@pytest.mark.usefixtures("pretended")
def test_rows_with_more_trials_than_the_budget_are_refused(
    written: Callable[..., Experiment], tmp_path: Path
) -> None:
    experiment = written()
    rows = rows_to_tune(experiment)
    tune(experiment, rows[:1], tmp_path, budget=12)
    with pytest.raises(RunError, match=r'"plain" already has 12 trials.*--budget 12'):
        tune(experiment, rows, tmp_path, budget=4)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[0.003, 0.01, 0.03]", "[0.003, 0.01]", "its space differs in lr"),
        (
            "synthetic.nodes = 200",
            "synthetic.nodes = 300",
            "its settings differ in synthetic",
        ),
        ("draws = 3", "draws = 4", r"its draws are \[3\], now \[4\]"),
    ],
)
@pytest.mark.usefixtures("pretended")
def test_a_study_of_another_experiment_is_refused(
    old: str,
    new: str,
    message: str,
    written: Callable[..., Experiment],
    tmp_path: Path,
) -> None:
    experiment = written()
    tune(experiment, rows_to_tune(experiment), tmp_path / "tune", budget=2)
    other = written((old, new))
    with pytest.raises(
        RunError, match=f"a study of row .plain. that was made otherwise: {message}"
    ):
        tune(other, rows_to_tune(other), tmp_path / "tune", budget=2)


def test_a_failed_trial_is_recorded_and_never_the_best(
    written: Callable[..., Experiment],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(settings: Mapping[str, Scalar], folder: Path) -> Outcome:
        if settings["lr"] == 0.03 or settings["method"] == "fedprox":
            return Outcome(None, error="RunError: no client replied")
        return pretend(settings, folder)

    monkeypatch.setattr(trials, "run_trial", fails)
    experiment = written()
    for _ in range(2):  # also when it is read again
        plain, near = tune(experiment, rows_to_tune(experiment), tmp_path, budget=8)
        failed = [t for t in plain.trials if t.score is None]
        assert 0 < len(failed) < 8
        assert {t.error for t in failed} == {"RunError: no client replied"}
        assert plain.best.settings["lr"] != 0.03
        with pytest.raises(
            RunError, match=r'All 8 trials of row "near" failed.*replied'
        ):
            _ = near.best


@pytest.mark.usefixtures("pretended")
def test_a_trial_on_a_full_disk_does_not_count(
    written: Callable[..., Experiment],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = written()
    rows = rows_to_tune(experiment)
    whole = tune(experiment, rows, tmp_path / "whole", budget=5)
    done: list[int] = []

    def full(settings: Mapping[str, Scalar], folder: Path) -> Outcome:
        done.append(len(done))
        if len(done) == 4:
            return Outcome(None, error=f"{trials.CANNOT_WRITE}: Cannot write x.")
        return pretend(settings, folder)

    with monkeypatch.context() as patch:
        patch.setattr(trials, "run_trial", full)
        with pytest.raises(RunError, match="does not count"):
            tune(experiment, rows, tmp_path / "full", budget=5)
    again = tune(experiment, rows, tmp_path / "full", budget=5)
    assert study_hash(again) == study_hash(whole)


def test_a_run_without_disk_space_has_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    outcome = run_trial({"clients": 2, "rounds": 1}, tmp_path / "run")
    assert outcome.error.startswith(f"{trials.CANNOT_WRITE}: Cannot write")


def test_a_run_that_fails_is_an_outcome_and_leaves_no_folder(tmp_path: Path) -> None:
    outcome = run_trial({"dataset": "/no/graph.npz", "clients": 2}, tmp_path / "run")
    assert outcome.score is None
    assert "/no/graph.npz" in outcome.error
    assert not (tmp_path / "run").exists()


def test_trials_of_several_numbers_are_compared_by_the_score_that_the_file_names(
    written: Callable[..., Experiment], tmp_path: Path
) -> None:
    """RMSE of logS and logP has no common unit: nRMSE selects rounds and trials."""
    number_files(tmp_path / "owners")
    experiment = written(
        ('dataset = "synthetic"\nclients = 3\n', f'owners = "{tmp_path / "owners"}"\n'),
        ("synthetic.nodes = 200\n", 'target-kind = "numbers"\n'),
        ("fedprox.mu = {low = 1e-4, high = 1.0, log = true}", ""),
        ("near = 80.5", ""),
    )
    rows = rows_to_tune(experiment)[:1]
    (study,) = studies = tune(experiment, rows, tmp_path / "tune", budget=2)
    path = tmp_path / "tuned.toml"
    write_tuned_experiment(experiment, studies, path, budget=2, study="abc")
    assert read_experiment(path).tuning["metric"] == "validation nRMSE"
    settings = effective_settings({**rows[0].settings, **study.best.settings}, 3)
    settings["run-dir"] = str(tmp_path / "run")
    run = run_one(settings, engine="local", workers=1)
    assert study.best.score == run.best["val"]["nrmse"]


def test_a_trial_with_fine_tuning_is_scored_after_it(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = {"fedavg": {"finetune_epochs": 4}}
    run = simulate("fedavg", **small, **tuned)
    score = run.summary["finetuned"]["val"]["accuracy"]
    assert score != run.best["val"]["accuracy"]
    settings = dict(flatten_config(run.config))
    assert run_trial(settings, tmp_path / "one").score == score

    def fail(*_: object) -> Fit:
        raise RunError("no fine-tuning")

    monkeypatch.setattr(FedAvgClientApp, "finetune", fail)
    monkeypatch.setattr(FedAvgClientApp, "personal_model", lambda *_: None)
    outcome = run_trial(settings, tmp_path / "two")
    assert outcome.score is None
    assert "fine-tuning after the last round has no scores" in outcome.error


# ----------------------------------------------------------------------------- processes
class KilledWorker(jobs.Worker):
    """A process that is killed when it gets the trial "two"."""

    def take(self, job: jobs.Job) -> None:
        super().take(job)
        if job.name == "two":
            os.kill(self.process.pid or 0, signal.SIGKILL)


@pytest.mark.thorough
def test_a_process_runs_a_trial_while_another_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty: dict[str, Any] = {"methods": {}, "backbones": {}, "datasets": {}}
    monkeypatch.setattr(extensions, "_registered", empty)

    class OwnNetwork(torch.nn.Module):
        def __init__(self, in_channels, hidden_channels, num_layers, dropout):
            super().__init__()

    register(backbone=OwnNetwork, name="own-network")
    script, mark = tmp_path / "script.py", tmp_path / "imported"
    script.write_text(f"open({str(mark)!r}, 'w').close()")
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", str(script), raising=False)
    monkeypatch.setattr(main, "__spec__", None, raising=False)
    monkeypatch.setattr(jobs, "Worker", KilledWorker)
    with TrialProcesses(2) as processes:
        own = {"dataset": "/no.npz", "clients": 2, "model": "own-network"}
        processes.submit("one", own, tmp_path / "one")
        processes.submit("two", {"rounds": 500, "clients": 2}, tmp_path / "two")
        assert not processes.has_room
        found: dict[str, Outcome] = {}
        while len(found) < 2:
            found |= dict(processes.outcomes())
        assert processes.has_room
    assert found["two"] == Outcome(None, error=KILLED)
    assert "no.npz" in found["one"].error
    assert not mark.exists()


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_trial_ends_in_mid_round_with_a_killed_study(
    by: signal.Signals, tmp_path: Path
) -> None:
    mark = f"FGL_TEST_{os.getpid()}_{by.name}"
    settings = {"rounds": 1, "local-epochs": 1_000_000, "clients": 2}
    script = (
        "from pathlib import Path\n"
        "from flower_fgl.lab.tune.trials import TrialProcesses\n"
        "with TrialProcesses(2) as processes:\n"
        f"    processes.submit('trial', {settings}, Path('trial'))\n"
        "    list(processes.outcomes())\n"
    )
    study = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment(FGL_MARK=mark),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: [*tmp_path.rglob("summary.json")], 60)
        assert len(marked(mark)) > 1
        study.send_signal(by)
        wait_until(lambda: marked(mark) == [], 20)
    finally:
        study.kill()
        study.wait()
        for found in marked(mark):
            found.kill()


def test_a_process_that_ended_by_itself_is_no_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = jobs.Job("trial", {"run-dir": str(tmp_path / "trial")})
    monkeypatch.setattr(jobs.WorkerPool, "start", lambda *_: None)
    monkeypatch.setattr(jobs.WorkerPool, "num_busy", 1)
    monkeypatch.setattr(
        jobs.WorkerPool, "wait", lambda pool: pool._receive(job, "died", 3)
    )
    with TrialProcesses(2) as processes:
        processes.submit("trial", {}, tmp_path / "trial")
        assert processes.outcomes() == [("trial", Outcome(None, error=ENDED.format(3)))]


@pytest.mark.parametrize(
    ("needs", "at_once", "why"),
    [
        (6, 1, "at least 6.0 GiB of memory, and 1 of the runs beside it leave 4.0"),
        (4, 2, "at least 4.0 GiB of memory, and 2 of the runs beside it leave 2.0"),
        (2, 3, ""),
        (12, 1, "at least 12.0 GiB"),  # alone, a trial reports it itself
    ],
)
def test_trials_side_by_side_share_the_memory(
    needs: int, at_once: int, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    active, most = [0], [0]

    def run(settings: Mapping[str, Scalar], folder: Path) -> Outcome:
        active[0] += 1
        most[0] = max(most[0], active[0])
        time.sleep(0.05)
        active[0] -= 1
        return Outcome(0.5)

    sizes = needs << 30, 10 << 30
    use_threads(monkeypatch, trials._run_in_worker, sizes)
    monkeypatch.setattr(trials, "run_trial", run)
    notes: list[str] = []
    found: dict[int, Outcome] = {}
    keys = list(range(6))
    with TrialProcesses(3, notes.append) as processes:
        while len(found) < 6:
            while keys and processes.has_room:
                processes.submit(key := keys.pop(0), {}, tmp_path / f"plain-{key}")
            found |= dict(processes.outcomes())
    assert set(found.values()) == {Outcome(0.5)}
    assert most == [at_once]
    assert len(notes) == bool(why)  # one line, whatever the number of trials
    assert all(note.startswith("plain-") and why in note for note in notes)


@pytest.mark.parametrize("kills", [1, 2])
def test_a_trial_whose_process_died_runs_once_more_alone(
    kills: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    active: list[str] = []
    beside: list[int] = []

    def run(settings: Mapping[str, Scalar], folder: Path) -> Outcome:
        name = folder.name
        if name == "trial-1":
            beside.append(len(active))
            if len(beside) <= kills:
                raise EOFError  # ends the thread, as a kill ends a process
        active.append(name)
        time.sleep(0.05)
        active.remove(name)
        return Outcome(0.5)

    use_threads(monkeypatch, trials._run_in_worker)
    monkeypatch.setattr(trials, "run_trial", run)
    found: list[tuple[int, Outcome]] = []
    keys = list(range(7))
    with TrialProcesses(3) as processes:
        while len(found) < 7:
            while keys and processes.has_room:
                processes.submit(key := keys.pop(0), {}, tmp_path / f"trial-{key}")
            found += processes.outcomes()
        assert processes.outcomes() == []
    assert sorted(key for key, _ in found) == list(range(7))
    failed = Outcome(None, error=KILLED)
    expected = {key: Outcome(0.5) for key in range(7)}
    assert dict(found) == (expected if kills == 1 else {**expected, 1: failed})
    assert len(beside) == 2
    assert beside[1] == 0
    assert found[-1][0] != 1  # it does not wait for trials that have not started


def test_a_study_is_the_same_when_the_process_of_a_trial_is_killed(
    written: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[str] = []

    def run(settings: Mapping[str, Scalar], folder: Path) -> Outcome:
        if len(killed) < 2 and folder.name not in killed:
            killed.append(folder.name)
            raise EOFError
        return pretend(settings, folder)

    use_threads(monkeypatch, trials._run_in_worker)
    monkeypatch.setattr(trials, "run_trial", pretend)
    experiment = written()
    rows = rows_to_tune(experiment)
    whole = tune(experiment, rows, tmp_path / "whole", budget=7, jobs=3)
    monkeypatch.setattr(trials, "run_trial", run)
    other = tune(experiment, rows, tmp_path / "other", budget=7, jobs=3)
    assert len(killed) == 2
    assert study_hash(other) == study_hash(whole)


def test_an_idle_process_that_was_killed_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_threads(monkeypatch, trials._run_in_worker)
    monkeypatch.setattr(trials, "run_trial", lambda *_: Outcome(0.5))
    with TrialProcesses(2) as processes:
        processes.submit("one", {}, tmp_path / "one")
        assert processes.outcomes() == [("one", Outcome(0.5))]
        (before,) = processes._workers
        with socket.socket(fileno=os.dup(before.connection.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_RDWR)  # ends the thread
        wait_until(lambda: not before.process.is_alive(), 10)
        processes.submit("two", {}, tmp_path / "two")
        assert processes.outcomes() == [("two", Outcome(0.5))]
        (after,) = processes._workers
        assert after is not before
        assert not processes._repeated


@pytest.mark.slow
def test_a_study_is_the_same_with_several_processes(
    written: Callable[..., Experiment], tmp_path: Path
) -> None:
    experiment = written()
    rows = rows_to_tune(experiment)
    one = tune(experiment, rows, tmp_path / "one", budget=6, jobs=1)
    two = tune(experiment, rows, tmp_path / "two", budget=6, jobs=2)
    assert study_hash(one) == study_hash(two)
    assert all(trial.score for study in two for trial in study.trials)
    assert not (tmp_path / "two" / "running").exists()


# ------------------------------------------------------------------- validation scores only
def save_graph(path: Path, *, seed: int | None) -> None:
    """Write a graph whose test labels are permuted by ``seed``."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 240)
    features = rng.normal(size=(240, 6)) + 0.8 * np.eye(6)[labels]
    pairs = rng.integers(0, 240, (2, 1500))
    same = labels[pairs[0]] == labels[pairs[1]]
    pairs = pairs[:, (same | (rng.random(1500) < 0.3)) & (pairs[0] != pairs[1])]
    part = np.arange(240) % 3
    test = np.flatnonzero(part == 2)
    if seed is not None:
        labels[test] = np.random.default_rng(seed).permutation(labels[test])
    np.savez(
        path,
        x=features.astype(np.float32),
        y=labels,
        edge_index=np.unique(np.hstack([pairs, pairs[::-1]]), axis=1),
        train_mask=part == 0,
        val_mask=part == 1,
        test_mask=part == 2,
        class_names=np.array(["a", "b", "c"]),
    )


def test_permuted_test_labels_give_the_same_study(
    written: Callable[..., Experiment], tmp_path: Path
) -> None:
    found, tests = [], []
    for seed in (None, 5):
        (folder := tmp_path / f"labels-{seed}").mkdir()
        save_graph(folder / "graph.npz", seed=seed)
        data = f'dataset = "{folder}/graph.npz"\nsplit = "public"\nmodel = "mlp"'
        experiment = written(
            ('dataset = "synthetic"\n', f"{data}\n"),
            ("rounds = 1\nsynthetic.nodes = 200", "rounds = 3"),
        )
        studies = tune(experiment, rows_to_tune(experiment)[:1], folder, budget=4)
        found.append(study_hash(studies))
        assert not any(trial.error for trial in studies[0].trials)
        assert len({trial.score for trial in studies[0].trials}) > 1
        from flower_fgl.simulation.local import run_local

        settings = {**studies[0].row.settings, "run-dir": str(folder / "run")}
        run = run_local(settings)
        tests.append(run.best and run.best["test"]["accuracy"])
    assert found[0] == found[1]
    assert tests[0] != tests[1]  # the permutation does change test scores


# --------------------------------------------------------------------- the tuned experiment
@pytest.mark.usefixtures("pretended")
def test_the_tuned_file_keeps_draws_rows_and_published_values(
    written: Callable[..., Experiment], tmp_path: Path
) -> None:
    experiment = written(
        ("[published]", "[grid]\nlocal-epochs = [1, 2]\n[published]"),
        ("near = 80.5", '"near/2" = 80.5'),
    )
    rows = rows_to_tune(experiment)
    assert [row.name for row in rows] == ["plain/1", "plain/2", "near/1", "near/2"]
    chosen = ["plain/2", "near, local-epochs=1"]  # a row, and a line of the table
    assert [row.is_named(chosen) for row in rows] == [False, True, True, False]
    assert [row.is_named(["near"]) for row in rows] == [False, False, True, True]
    assert rows[0].label == "plain, local-epochs=1"
    studies = tune(experiment, rows, tmp_path / "tune", budget=5)
    path = tmp_path / "two-tuned.toml"
    write_tuned_experiment(experiment, studies, path, budget=5, study="abc")
    tuned = read_experiment(path)
    assert tuned.draws == 3
    assert tuned.published == experiment.published
    assert tuned.tuning["budget"] == 5
    assert {run.line for run in tuned.runs() if not run.line.endswith("default")} == {
        f"{case}, local-epochs={n}" for case in ("plain", "near") for n in (1, 2)
    }
    # with their grid values in the name, rows that differ in them are not unequal
    assert {run.label for run in tuned.runs()} >= {
        "near, local-epochs=2",
        "near, local-epochs=2, default",
    }
    assert tuned.tuning["settings"]["near/2"] == ["lr", "dropout", "fedprox.mu"]
    runs = {
        run.row: parse_config({**run.settings, "clients": 3}) for run in tuned.runs()
    }
    assert len(runs) == 8  # each row, and its default
    before = {run.row: run.settings for run in experiment.runs()}
    assert tuned.tuning["metric"] == "validation accuracy"
    for study in studies:
        name, config = study.row.name, runs[study.row.name].flat()
        assert {k: config[k] for k in study.best.settings} == study.best.settings
        default = runs[f"{name}, default"].flat()
        expected = parse_config({**before[name], "seed": 2, "partition-seed": 2}).flat()
        assert default == expected
    write_tuned_experiment(
        experiment, studies, path, budget=5, study="abc", with_defaults=False
    )
    assert len(read_experiment(path).runs()) == 4 * 3


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Scalar]]:
    """Pretend to run trials, and list the settings of each."""
    out: list[dict[str, Scalar]] = []

    def run(settings: Mapping[str, Scalar], folder: Path) -> Outcome:
        out.append(dict(settings))
        found = pretend(settings, folder)
        better = settings.get("server-optimizer") == "momentum"
        return replace(found, score=1.0) if better else found

    monkeypatch.setattr(trials, "run_trial", run)
    return out


def test_trials_have_the_files_of_the_tuning_draw_and_the_tuned_file_those_of_each(
    written: Callable[..., Experiment],
    tmp_path: Path,
    tried: list[dict[str, Scalar]],
) -> None:
    experiment = written(
        ('dataset = "synthetic"\nclients = 3\n', 'owners = "files/{draw}/shops"\n'),
        ("synthetic.nodes = 200\n", ""),
    )
    studies = tune(experiment, rows_to_tune(experiment), tmp_path / "tune", budget=2)
    assert {(t["owners"], t["seed"]) for t in tried} == {("files/3/shops", 3)}
    path = tmp_path / "tuned.toml"
    write_tuned_experiment(experiment, studies, path, budget=2, study="abc")
    runs = read_experiment(path).runs()
    assert {(run.settings["owners"], run.settings["seed"]) for run in runs} == {
        (f"files/{draw}/shops", draw) for draw in range(3)
    }


def test_a_tuned_row_has_the_settings_of_its_best_trial(
    written: Callable[..., Experiment],
    tmp_path: Path,
    tried: list[dict[str, Scalar]],
) -> None:
    # a setting that the row as it stands does not read, but its best trial does
    experiment = written(
        ("rounds = 1", "rounds = 1\nserver-lr = 0.7"),
        ('name = "near"', 'name = "near"\nserver-optimizer = "adam"'),
        ("dropout = {low = 0.0, high = 0.8}", ""),
        ("fedprox.mu = {low = 1e-4, high = 1.0, log = true}", ""),
        ("[tune]", '[tune]\nplain.server-optimizer = ["momentum"]'),
    )
    rows = rows_to_tune(experiment)
    studies = tune(experiment, rows, tmp_path / "tune", budget=12)
    for settings in tried:
        has_server_lr = settings.get("server-optimizer", "none") != "none"
        assert settings.get("server-lr") == (0.7 if has_server_lr else None)
    path = tmp_path / "tuned.toml"
    write_tuned_experiment(experiment, studies, path, budget=12, study="abc")
    tuned = {run.row: run.settings for run in read_experiment(path).runs()}
    for study in studies:
        best = effective_settings({**study.row.settings, **study.best.settings}, 2)
        assert parse_config(tuned[study.row.name]) == parse_config(best)
    assert tuned["plain"]["server-optimizer"] == "momentum"


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    "dataset",
    ['dataset = "questions"', 'dataset = "cora"\npositive-class = "Theory"'],
)
def test_the_tuned_file_names_the_score_that_selects(
    written: Callable[..., Experiment], tmp_path: Path, dataset: str
) -> None:
    experiment = written(
        ('dataset = "synthetic"', dataset),
        ("synthetic.nodes = 200\n", ""),
    )
    studies = tune(experiment, rows_to_tune(experiment), tmp_path / "tune", budget=2)
    path = tmp_path / "tuned.toml"
    write_tuned_experiment(experiment, studies, path, budget=2, study="abc")
    assert read_experiment(path).tuning["metric"] == "validation AUROC"
    assert "by validation AUROC on draw 3" in path.read_text()


def test_no_jobs_are_one_per_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def record(*_: object, jobs: int, **__: object) -> list[object]:
        asked.append(jobs)
        return []

    monkeypatch.setattr("flower_fgl.lab.tune.tuning.tune", record)
    monkeypatch.setattr("flower_fgl.simulation.resources.num_cpus", lambda: 7)
    (tmp_path / "two.toml").write_text(f'output-dir = "{tmp_path}/runs"\n{TEXT}')
    for words in (["--jobs", "0"], ["--jobs", "3"], []):
        command = ["tune", str(tmp_path / "two.toml"), "--budget", "2", *words]
        done = CliRunner().invoke(app, [*command, "--case", "near"])
        assert done.exit_code == 0
    assert asked == [7, 3, 1]


@pytest.mark.usefixtures("pretended")
def test_the_command_writes_the_study_and_the_tuned_file(tmp_path: Path) -> None:
    text = f'output-dir = "{tmp_path}/runs"\n{TEXT}'
    (path := tmp_path / "two.toml").write_text(text)

    def command(*words: str) -> str:
        done = CliRunner().invoke(
            app, ["tune", str(path), *words], catch_exceptions=False
        )
        assert done.exit_code == 0
        return done.output

    shown = command("--budget", "3", "--case", "near")
    assert "near: trial 1 of 3, validation" in shown
    assert "Rows tuned: 1 of 2" in shown
    assert not (tmp_path / "two-tuned.toml").exists()
    shown = command("--budget", "3", "--quiet")
    assert "trial 1 of 3, validation" not in shown
    folder = tmp_path / "runs" / "two" / "tune"
    study = json.loads((folder / "study.json").read_text())
    assert [len(row["trials"]) for row in study["rows"].values()] == [3, 3]
    assert "test" not in (folder / "study.json").read_text()
    found = read_experiment(tmp_path / "two-tuned.toml").tuning["study"]
    assert hash_of_study(study) == found
    lines = (folder / "trials.csv").read_text().splitlines()
    assert len(lines) == 7
    assert lines[0].startswith("row,trial,score")
    tuned = read_experiment(tmp_path / "two-tuned.toml")
    assert tuned.tuning["trials"] == {"plain": 3, "near": 3}
    assert {run.row for run in tuned.runs()} > {"plain", "near"}
    assert '"…, default"' in (tmp_path / "two-tuned.toml").read_text()
    # the study is finished: the same command writes the file again, and runs no trial
    assert "trial 1 of 3, val" not in command("--budget", "3", "--no-defaults")
    without = read_experiment(tmp_path / "two-tuned.toml")
    assert {run.row for run in without.runs()} == {"plain", "near"}
    assert without.tuning == tuned.tuning
    assert '"…, default"' not in (tmp_path / "two-tuned.toml").read_text()
    done = (folder / "study.log").read_bytes()
    for words, message in (
        (["--budget", "3", "--case", "x"], 'has no row "x". Its rows: plain; near'),
        (["--budget", "3", "--out", str(path)], "two.toml is the experiment itself"),
        (
            ["--budget", "3", "--out", str(tmp_path / "x" / "y.toml")],
            r"Cannot write .*y.toml: .*x is no folder to write to",
        ),
        (["--budget", "1"], "--budget must be at least 2"),
        (["--budget", "3", "--set", "lr=0.1"], "fixes a setting that"),
        (["--budget", "3", "--set", "shots=2"], "shots has no effect"),
    ):
        with pytest.raises(ConfigError, match=message):
            command(*words)
    assert (folder / "study.log").read_bytes() == done  # no trial ran
    for wrong in (b"?\n", b"[]\n", b"{}\n"):
        (folder / "study.log").write_bytes(done + wrong)
        with pytest.raises(RunError, match=r"study\.log, line \d+ is damaged"):
            command("--budget", "3")
    (folder / "study.log").write_bytes(done)
    assert path.read_text() == text
    grid = "[grid]\nlocal-epochs = [1, 2]\n[published]"
    text = text.replace(f"{tmp_path}/runs", f"{tmp_path}/lines")
    path.write_text(text.replace("[published]\nnear = 80.5", grid))
    words = ["--budget", "2", "--case", "near, local-epochs=1"]  # a line of the table
    assert "Rows tuned: 1 of 4" in command(*words)
