"""The ``reach`` command: rounds, bytes and seconds until a run reaches an accuracy."""

from __future__ import annotations

from dataclasses import dataclass

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import nearest
from flower_fgl.runs.report.numbers import scope_of
from flower_fgl.runs.run import Run
from flower_fgl.runs.summary import is_scored

__all__ = ["Cost", "cost_until"]


@dataclass(frozen=True)
class Cost:
    """Communication and time until a run reached an accuracy.

    Parameters
    ----------
    server_round : int or None
        First evaluated round that reached the accuracy; ``None`` if none did.
    best : float or None
        Best accuracy of all evaluated rounds; ``None`` if there is none.
    num_bytes : int
        Bytes in both directions, over all clients, until the end of that round, or of the
        run if no round reached the accuracy. Exchanges before round 1 are included.
    seconds : float
        Duration of the same rounds.
    """

    server_round: int | None
    best: float | None
    num_bytes: int
    seconds: float


def cost_until(run: Run, accuracy: float, *, column: str = "test") -> Cost:
    """Sum the bytes and seconds of a run until it reached an accuracy.

    Parameters
    ----------
    run : Run
        Run, finished or not.
    accuracy : float in (0, 1]
        Target for the pooled accuracy.
    column : str
        Node set: ``val``, ``test`` or one that only some settings score.

    Raises
    ------
    ConfigError
        If the accuracy is out of range, or the run has no such node set.

    Notes
    -----
    1. With ``evaluate-every`` above 1, the run may have reached the accuracy some rounds
       before the evaluation that shows it.
    """
    if not 0 < accuracy <= 1:
        raise ConfigError(
            f"The accuracy must be greater than 0 and at most 1, got {accuracy}."
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
    values = [columns.get(column, {}).get("accuracy") for columns in scored]
    hits = [
        i for i, value in enumerate(values) if value is not None and value >= accuracy
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
