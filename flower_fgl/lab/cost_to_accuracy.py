"""The ``reach`` command: rounds, bytes and seconds until a run reaches a score."""

from __future__ import annotations

from dataclasses import dataclass

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import nearest
from flower_fgl.lab.report.numbers import scope_of
from flower_fgl.runs.run import Run
from flower_fgl.runs.summary import is_scored

__all__ = ["Cost", "cost_until", "selecting_metric"]


def selecting_metric(run: Run) -> str:
    """Return the validation score that selects a run's best round."""
    return str(run.summary.get("metric", "accuracy"))


@dataclass(frozen=True)
class Cost:
    """Communication and time until a run reached a score.

    Parameters
    ----------
    server_round : int or None
        First evaluated round that reached the score; ``None`` if none did.
    best : float or None
        Best score of all evaluated rounds; ``None`` if there is none.
    num_bytes : int
        Bytes in both directions, over all clients, until the end of that round, or of the
        run if no round reached the score. Exchanges before round 1 are included.
    seconds : float
        Duration of the same rounds.
    """

    server_round: int | None
    best: float | None
    num_bytes: int
    seconds: float


def cost_until(
    run: Run, target: float, *, column: str = "test", metric: str = ""
) -> Cost:
    """Sum the bytes and seconds of a run until it reached a score.

    Parameters
    ----------
    run : Run
        Run, finished or not.
    target : float in (0, 1]
        Target for the pooled score.
    column : str
        Node set: ``val``, ``test`` or one that only some settings score.
    metric : str
        ``accuracy``, ``macro_f1``, ``auroc``, …; by default the score that selects the
        run's best round, see :func:`selecting_metric`.

    Raises
    ------
    ConfigError
        If the target is out of range, or the run has no such node set or score.

    Notes
    -----
    1. With ``evaluate-every`` above 1, the run may have reached the score some rounds
       before the evaluation that shows it.
    """
    metric = metric or selecting_metric(run)
    if not 0 < target <= 1:
        raise ConfigError(
            f"The {metric} must be greater than 0 and at most 1, got {target}."
        )
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
    names = sorted({name for row in rows for name in row} - {"num_nodes"})
    if names and metric not in names:
        raise ConfigError(
            f'{run.path.name} has no "{metric}" of "{column}". {nearest(metric, names)}'
        )
    values = [row.get(metric) for row in rows]
    hits = [
        i for i, value in enumerate(values) if value is not None and value >= target
    ]
    spent = run.rounds[: hits[0] + 1] if hits else run.rounds
    return Cost(
        server_round=run.rounds[hits[0]]["round"] if hits else None,
        best=max((value for value in values if value is not None), default=None),
        num_bytes=sum(
            sum(sent.values()) for row in spent for sent in row["bytes"].values()
        ),
        seconds=sum(row["seconds"]["total"] for row in spent),
    )
