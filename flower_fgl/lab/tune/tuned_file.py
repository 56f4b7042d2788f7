"""What tuning writes: the study as JSON and CSV, and the tuned experiment file."""

import csv
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tomli_w

from flower_fgl.core.options import Scalar
from flower_fgl.core.score_names import score_title
from flower_fgl.lab.experiments.experiment_file import (
    PUBLISHED,
    REPLICATES,
    Experiment,
    describe_tuning,
)
from flower_fgl.lab.tables.cells import DEFAULT_SUFFIX
from flower_fgl.lab.tune.tuning import RowStudy
from flower_fgl.runs.writer import replace_file

__all__ = ["experiment_table", "hash_of_study", "write_study"]
__all__ += ["write_tuned_experiment"]


def write_study(
    experiment: Experiment, studies: Sequence[RowStudy], folder: Path, *, budget: int
) -> str:
    """Write ``study.json`` and ``trials.csv`` of finished studies; return their hash."""
    rows = {study.row.name: _study_entry(study) for study in studies}
    table = {
        "experiment": experiment.name,
        "budget": budget,
        "draws": list(experiment.tune_draws),
        "metric": _metric(studies),
        "commits": sorted({commit for study in studies for commit in study.commits}),
        "optuna": sorted({v for study in studies for v in study.optuna_versions}),
        "rows": rows,
    }
    text = json.dumps(table, indent=1, allow_nan=False)
    replace_file(folder / "study.json", f"{text}\n".encode())
    out = io.StringIO()
    keys = sorted({key for study in studies for key in study.row.space})
    writer = csv.writer(out)
    about = ["row", "trial", "score", "rounds", "bytes", "seconds", "error"]
    writer.writerow([*about, *keys])
    for study in studies:
        for trial in study.trials:
            outcomes = trial.outcomes.values()
            writer.writerow(
                [
                    study.row.name,
                    trial.index,
                    trial.score,
                    "/".join(str(o.server_round or "") for o in outcomes),
                    sum(o.num_bytes for o in outcomes),
                    f"{sum(o.seconds for o in outcomes):.1f}",
                    trial.error,
                    *(trial.settings.get(key, "") for key in keys),
                ]
            )
    replace_file(folder / "trials.csv", out.getvalue().encode())
    return hash_of_study(table)


def _metric(studies: Sequence[RowStudy]) -> str:
    """Return the score by which the trials of all rows are compared, in words."""
    names = {study.metric for study in studies}
    return f"validation {' or '.join(score_title(name) for name in sorted(names))}"


def hash_of_study(table: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a ``study.json`` as :func:`write_study` returned it."""
    content = [
        [row, trial["trial"], sorted(trial["settings"].items()), trial["score"]]
        for row, entry in table["rows"].items()
        for trial in entry["trials"]
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _study_entry(study: RowStudy) -> dict[str, Any]:
    best = study.best
    return {
        "best": best.index,
        "default-score": study.trials[0].score,
        "best-score": best.score,
        "trials": [
            {
                "trial": trial.index,
                "settings": dict(trial.settings),
                "score": trial.score,
                "draws": {str(d): asdict(o) for d, o in trial.outcomes.items()},
            }
            for trial in study.trials
        ],
    }


def write_tuned_experiment(
    experiment: Experiment,
    studies: Sequence[RowStudy],
    path: Path,
    *,
    budget: int,
    study: str,
    with_defaults: bool = True,
) -> None:
    """Write an experiment file in which each row has its best settings.

    With defaults, a row whose best trial is not its default also appears as ``"<row>,
    default"``. Grid values become settings of cases. The rows keep their names.
    """
    config = {k: v for k, v in experiment.config.items() if k != "output-dir"}
    cases: list[dict[str, Scalar]] = []
    for found in studies:
        name, best = found.row.name, found.best
        own = {
            k: v
            for k, v in found.row.settings.items()
            if k not in REPLICATES and experiment.config.get(k) != v
        }
        cases.append({"name": name, **own, **best.settings})
        if with_defaults and best.index:
            cases.append({"name": f"{name}{DEFAULT_SUFFIX}", **own})
    tuning = {
        "experiment": experiment.name,
        "budget": budget,
        "draws": list(experiment.tune_draws),
        "metric": _metric(studies),
        "study": study,
        "trials": {found.row.name: len(found.trials) for found in studies},
        "failed": {
            found.row.name: failed
            for found in studies
            if (failed := sum(trial.score is None for trial in found.trials))
        },
        "settings": {found.row.name: list(found.row.space) for found in studies},
        "lines": {run.row: run.line for run in experiment.runs()},
        "labels": {run.row: run.label for run in experiment.runs()},
    }
    tuned = replace(experiment, config=config, cases=cases, grid={}, tuning=tuning)
    table = experiment_table(tuned, str(experiment.config.get("output-dir", "")))
    head = f"# Written by flower-fgl tune: {describe_tuning(table['tuning'])}.\n"
    if any(case["name"].endswith(DEFAULT_SUFFIX) for case in table["case"]):
        head += '# Rows named "…, default" have the settings before tuning.\n'
    replace_file(path, f"{head}\n{tomli_w.dumps(table)}".encode())


def experiment_table(experiment: Experiment, output_dir: str = "") -> dict[str, Any]:
    """Return an experiment as its file holds it."""
    config = {k: v for k, v in experiment.config.items() if k != "run-dir"}
    found = experiment.published
    table: dict[str, Any] = {
        "title": experiment.title,
        "output-dir": output_dir,
        "draws": experiment.draws,
        "tuning": dict(experiment.tuning),
        "config": _nested(config),
        "case": [_nested(case) for case in experiment.cases],
        # not nested: a table would come last, and the order names the runs
        "grid": dict(experiment.grid),
        **{name: dict(found[key]) for name, key in PUBLISHED.items() if key in found},
    }
    return {key: value for key, value in table.items() if value or key == "config"}


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of methods as tables, as a TOML file holds them."""
    out: dict[str, Any] = {k: v for k, v in settings.items() if "." not in k}
    for key, value in settings.items():
        table, dot, name = key.partition(".")
        if dot:
            out.setdefault(table, {})[name] = value
    return out
