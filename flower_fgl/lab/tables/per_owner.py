"""Gain of each natural owner: paired scores of two methods, owner by owner."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from flower_fgl.core.errors import RunError
from flower_fgl.core.score_names import ScoreScale
from flower_fgl.lab.tables.compare import one_metric, paired_runs
from flower_fgl.runs.run import RunFolder

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["frames_per_owner", "gains_per_owner", "owner_metric"]


def owner_metric(runs: Sequence[RunFolder], column: str = "test") -> str:
    """Return the owners' score that all scored runs have, else ``accuracy``."""
    return one_metric(run.owner_metric(column) for run in runs if run.best is not None)


def _scores(runs: Sequence[RunFolder], column: str, metric: str) -> pd.DataFrame:
    """Return a row of owners' scores for each run."""
    import pandas as pd

    return pd.DataFrame([run.per_owner(column, metric) for run in runs], dtype=float)


def frames_per_owner(
    groups: Sequence[Sequence[RunFolder]],
    base: int | None = None,
    *,
    column: str = "test",
    metric: str = "accuracy",
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Score groups of runs, which differ in their seeds, by owner; gains over ``base``.

    Both frames have a row for each owner and a column for each group. NaN stands for an
    owner without scores or pairs.
    """
    import pandas as pd

    found = [_scores(runs, column, metric).mean() for runs in groups]
    means = pd.concat(found, axis=1)
    gains = pd.DataFrame(index=means.index, columns=means.columns, dtype=float)
    for number, runs in enumerate(groups):
        if base is not None and number != base:
            with suppress(RunError):  # no pairs: the table shows the scores alone
                gains[number] = gains_per_owner(
                    groups[base], runs, column=column, metric=metric
                )["gain"]
    return means, gains


def gains_per_owner(
    one: Sequence[RunFolder], other: Sequence[RunFolder], *, column: str, metric: str
) -> pd.DataFrame:
    """Compare two methods owner by owner, by descending gain of B over A (usually Local).

    The frame has the mean scores ``one`` and ``other`` of each owner in paired runs, the
    ``gain``, the number of ``pairs``, and in how many of them B is better (``wins``). A
    RunError says that no two runs form a pair, or no owner has the score in both.
    """
    import pandas as pd

    done = [[run for run in runs if run.status == "completed"] for runs in (one, other)]
    pairs = paired_runs(*done)
    if not pairs:
        raise RunError(
            "No completed run of A has the dataset, partition, clients and seed of a run "
            "of B. Run both methods with the same partition-seed and seed."
        )
    sides = (_scores(runs, column, metric) for runs in zip(*pairs, strict=True))
    first, second = next(sides).align(next(sides), join="inner", axis=1)
    gains = ScoreScale(metric).gain(second, first)
    known = gains.notna()
    frame = pd.DataFrame(
        {
            "one": first[known].mean(),
            "other": second[known].mean(),
            "gain": gains.mean(),
            "pairs": known.sum(),
            "wins": (gains > 0).sum(),
        }
    ).rename_axis("owner")
    frame = frame[frame["pairs"] > 0]
    if frame.empty:
        raise RunError(
            f'No owner has "{metric}" of "{column}" in both runs of a pair. Use --metric '
            "accuracy, macro_f1, auroc or rmse, and --column test or val."
        )
    return frame.sort_index().sort_values("gain", ascending=False, kind="stable")
