"""Names, scores, costs and failures of runs, as the report and the commands show them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import nearest
from flower_fgl.core.score_names import (
    EXTRA_SCORES,
    NO_SCORES,
    SETTING_COLUMNS,
    number_scores,
)
from flower_fgl.core.targets import EDGE, LINK
from flower_fgl.lab.tables.compare import common_scale, one_metric
from flower_fgl.runs.files import grouped
from flower_fgl.runs.run import RunFolder
from flower_fgl.runs.summary import is_scored, main_scope

__all__ = ["Cost", "cost_until", "selecting_metric"]

CALIBRATION = [
    *("ece", "ece_calibrated", "brier", "brier_calibrated"),
    *("coverage", "set_share", "interval"),
]
"""Scores of calibration, in display order."""


def about(run: RunFolder) -> str:
    """Return a run's name: method and dataset."""
    return f"{run.summary['method']} on {run.summary['dataset']}"


def item_kind(runs: Sequence[RunFolder]) -> str:
    """Return what the runs classify: ``nodes``, ``graphs``, ``links``, ``edges``."""
    names = {"graph": "graphs", LINK: "links", EDGE: "edges"}
    kinds = {names.get(str(run.config.get("setting")), "nodes") for run in runs}
    return " or ".join(sorted(kinds, key=["nodes", "graphs", "links", "edges"].index))


def last_mixture(run: RunFolder) -> Mapping[str, Any] | None:
    """Return the last round's mixtures of a personalized average, ``None`` without any."""
    for row in reversed(run.rounds):
        if "mixture" in row:
            kept = {"round": row["round"], "numbers": row.get("numbers", {})}
            return {**row["mixture"], **kept}
    return None


def columns_of(runs: Sequence[RunFolder]) -> list[str]:
    """Return the node sets that were scored, in display order."""
    scored = (run.best or {} for run in runs)
    found = dict.fromkeys(key for entry in scored for key in entry if key != "round")
    first = [name for name in ("val", "test", *SETTING_COLUMNS) if name in found]
    return first + [name for name in found if name not in first]


def own_columns_of(runs: Sequence[RunFolder]) -> list[str]:
    """Return the scored node sets besides validation and test."""
    return [name for name in columns_of(runs) if name in SETTING_COLUMNS]


def setting_of(run: RunFolder) -> str:
    """Return the value of ``setting``, which defines the training and test data."""
    return str(run.config.get("setting", "transductive"))


def settings_of(runs: Sequence[RunFolder]) -> dict[str, list[str]]:
    """Return the additional node sets of each setting that has any."""
    groups = grouped(runs, setting_of)
    found = {setting: own_columns_of(group) for setting, group in groups.items()}
    return {setting: own for setting, own in found.items() if own}


def column_name(column: str) -> str:
    """Return the display name of a node set."""
    return {"val": "validation", **SETTING_COLUMNS}.get(column, column)


def metrics_of(runs: Sequence[RunFolder]) -> list[tuple[str, str]]:
    """Return keys and display names of the scores; AUROC etc. only if a run has it."""
    if runs[0].target:
        names = number_scores(runs[0].target)
        return [(name, common_scale(name, runs).title) for name in names]
    shown = [("accuracy", "accuracy"), ("macro_f1", "macro-F1")]
    shown += [("macro_recall", "recall"), ("mean_accuracy", "per client")]
    rows = [entry.get("test", {}) for run in runs for _, entry in score_rows(run)]
    for name, title in EXTRA_SCORES.items():
        if any(name in scores for scores in rows):
            shown.append((name, title))
    return shown


def shown_score(runs: Sequence[RunFolder]) -> str:
    """Return the score that figures show: the one that selects rounds in all runs."""
    return one_metric(str(run.summary.get("metric", "accuracy")) for run in runs)


def client_scores(run: RunFolder, score: str = "accuracy") -> dict[int, float | None]:
    """Return each client's test score that stands for the run, by partition ID."""
    number = (run.final or {}).get("round")
    found = run.client_scores(number, run.final_scope)
    return {pid: columns.get("test", {}).get(score) for pid, columns in found.items()}


def calibration_rows(run: RunFolder) -> list[tuple[str, dict[str, float | None]]]:
    """Return name and scores of calibration of each client, empty without any.

    They are those of the calibrated global model, else those that stand for the run.
    """
    entry = run.summary.get("calibrated")
    scope = "global" if entry else run.final_scope
    entry, names = entry or run.final or {}, run.owner_names
    scores = run.client_scores(entry.get("round"), scope)
    found = {
        pid: test for pid, columns in scores.items() if (test := columns.get("test"))
    }
    keys = [key for key in CALIBRATION if any(key in test for test in found.values())]
    return [
        (names.get(pid, str(pid)), {key: test.get(key) for key in keys})
        for pid, test in (found if keys else {}).items()
    ]


def reliability_of(run: RunFolder) -> dict[str, list[list[float]]]:
    """Return the reliability diagrams before and after calibration, empty without any."""
    return next((row["reliability"] for row in run.rounds if "reliability" in row), {})


def owner_reliability(run: RunFolder) -> dict[str, dict[str, list[list[float]]]]:
    """Return the diagrams of each client by name, empty without any.

    They are of the models whose scores stand for the run.
    """
    number, names = (run.final or {}).get("round"), run.owner_names
    rows = {
        int(row["partition_id"]): row["reliability"].get(run.final_scope, {})
        for row in run.clients
        if "reliability" in row and row["round"] == number
    }
    return {names.get(pid, str(pid)): rows[pid] for pid in sorted(rows) if rows[pid]}


def idle_clients(run: RunFolder) -> tuple[int, str]:
    """Return the number of clients that do not train, and a description of them."""
    about = [row for row in run.clients if "trains" in row]
    number = sum(not row["trains"] for row in about)
    is_few_shot = run.config.get("setting") == "few-shot"
    return number, "do not participate" if is_few_shot else "are only evaluated"


def pooled_test_score(run: RunFolder, score: str = "accuracy") -> float | None:
    """Return the pooled test score that stands for the run."""
    value: float | None = (run.final or {}).get("test", {}).get(score)
    return value


def score_rows(run: RunFolder) -> list[tuple[str, Mapping[str, Any]]]:
    """Return name and scores of each row of the results table."""
    is_last = run.summary["selection"] == "last"
    chosen = "last round (no validation score)"  # maybe nodes, but of one class
    names = {
        "best": chosen if is_last else "best validation round",
        "last": "last round",
        "global best": "best round, aggregated model",
        "global last": "last round, aggregated model",
        "finetuned": "after fine-tuning",
        "calibrated": "calibrated aggregated model",
    }
    return [(names[key], entry) for key, entry in run.entries.items()]


def dropped_replies(run: RunFolder) -> list[dict[str, Any]]:
    """Count dropped replies by reason, with the affected clients and rounds."""
    found: dict[str, list[tuple[Any, int]]] = {}
    for row in run.rounds:
        for failure in row.get("failures", ()):
            lost = found.setdefault(failure["reason"], [])
            lost.append((failure.get("partition_id"), row["round"]))
    return [
        {
            "reason": reason,
            "count": len(lost),
            "clients": ", ".join(sorted({str(pid) for pid, _ in lost})),
            "first": min(number for _, number in lost),
            "last": max(number for _, number in lost),
        }
        for reason, lost in found.items()
    ]


def selecting_metric(run: RunFolder) -> str:
    """Return the validation score that selects a run's best round."""
    return str(run.summary.get("metric", "accuracy"))


@dataclass(frozen=True)
class Cost:
    """Communication and time until a run reached a score.

    ``server_round`` is the first evaluated round that reached it, ``best`` the best
    score of all evaluated rounds; ``None`` if there is none. ``num_bytes`` (both
    directions, all clients) and ``seconds`` count until the end of that round, or of
    the run, with the exchanges before round 1.
    """

    server_round: int | None
    best: float | None
    num_bytes: int
    seconds: float


def cost_until(
    run: RunFolder, target: float, *, column: str = "test", metric: str = ""
) -> Cost:
    """Sum the bytes and seconds of a run until its pooled score reached ``target``.

    The target is in (0, 1], or above 0 of errors. With ``evaluate-every`` above 1, the
    run may have reached the score some rounds before the evaluation that shows it.
    Raises a ConfigError if the target is out of range, or the run has no such node set
    or score.
    """
    metric = metric or selecting_metric(run)
    scale = run.scale_of(metric)
    if not 0 < target <= (math.inf if scale.is_error else 1):
        most = "" if scale.is_error else " and at most 1"
        raise ConfigError(f"The {metric} must be greater than 0{most}, got {target}.")
    scored = [
        row["metrics"].get(main_scope(run.rounds), {}) if is_scored(row) else {}
        for row in run.rounds
    ]
    known = sorted({name for columns in scored for name in columns})
    if known and column not in known:
        raise ConfigError(
            f'{run.path.name} has no column "{column}". {nearest(column, known)}'
        )
    rows = [columns.get(column, {}) for columns in scored]
    names = {name for row in rows for name in row} - NO_SCORES
    if names and metric not in names:
        raise ConfigError(
            f'{run.path.name} has no score "{metric}" of "{column}". '
            f"{nearest(metric, names)}"
        )
    values = [row.get(metric) for row in rows]
    hits = [
        i
        for i, value in enumerate(values)
        if value is not None and not scale.is_better(target, value)
    ]
    spent = run.rounds[: hits[0] + 1] if hits else run.rounds
    return Cost(
        server_round=run.rounds[hits[0]]["round"] if hits else None,
        best=max(
            (value for value in values if value is not None),
            key=scale.goodness,
            default=None,
        ),
        num_bytes=sum(
            sum(sent.values()) for row in spent for sent in row["bytes"].values()
        ),
        seconds=sum(row["seconds"]["total"] for row in spent),
    )
