"""What ``flower-fgl reach`` does: rounds, bytes and seconds until an accuracy."""

from __future__ import annotations

from dataclasses import dataclass

from flower_fgl.core.errors import ConfigError
from flower_fgl.runs.report.numbers import scope_of
from flower_fgl.runs.run import Run
from flower_fgl.runs.summary import is_scored

__all__ = ["Cost", "cost_until"]


@dataclass(frozen=True)
class Cost:
    """What a run had spent at the end of a round.

    Parameters
    ----------
    server_round : int or None
        The first scored round with the accuracy; ``None`` if none has it.
    best : float or None
        The best accuracy of all scored rounds; ``None`` without scores.
    num_bytes : int
        Sent both ways, by all clients, up to the end of that round (of the run, if there
        is none), exchanges before round 1 included.
    seconds : float
        Of all these rounds.
    """

    server_round: int | None
    best: float | None
    num_bytes: int
    seconds: float


def cost_until(run: Run, accuracy: float, *, column: str = "test") -> Cost:
    """Add up what a run spent until it had reached an accuracy.

    Parameters
    ----------
    run : Run
        Finished or not.
    accuracy : float in (0, 1]
        To be reached by the pooled accuracy.
    column : str
        Which nodes' accuracy: ``val``, ``test`` or one of the setting's own.

    Returns
    -------
    Cost

    Raises
    ------
    ConfigError
        If the accuracy is out of range, or the run never scored such nodes.

    Notes
    -----
    1. With ``evaluate-every`` above 1 the accuracy may have been there some rounds before
       it was seen.
    """
    if not 0 < accuracy <= 1:
        raise ConfigError(
            f"The accuracy must be above 0 and at most 1, got {accuracy}."
        )
    scored = [
        row["metrics"].get(scope_of(run), {}) if is_scored(row) else {}
        for row in run.rounds
    ]
    known = sorted({name for columns in scored for name in columns})
    if known and column not in known:
        raise ConfigError(
            f'{run.path.name} has no column "{column}". Known: {", ".join(known)}.'
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
