"""The ``reach`` command: rounds, bytes and seconds until a run reaches a score."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import nearest
from flower_fgl.lab.report.numbers import scope_of
from flower_fgl.runs.run import RunFolder
from flower_fgl.runs.summary import is_scored

__all__ = ["Cost", "cost_until", "selecting_metric"]


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
        row["metrics"].get(scope_of(run), {}) if is_scored(row) else {}
        for row in run.rounds
    ]
    known = sorted({name for columns in scored for name in columns})
    if known and column not in known:
        raise ConfigError(
            f'{run.path.name} has no column "{column}". {nearest(column, known)}'
        )
    rows = [columns.get(column, {}) for columns in scored]
    names = sorted({name for row in rows for name in row} - {"num_nodes", "targets"})
    if names and metric not in names:
        raise ConfigError(
            f'{run.path.name} has no "{metric}" of "{column}". {nearest(metric, names)}'
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
