"""Gain of each natural owner: paired scores of two methods, owner by owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean

from flower_fgl.core.errors import RunError
from flower_fgl.core.score_names import ScoreScale, is_better
from flower_fgl.lab.tables.compare import one_metric, paired_runs
from flower_fgl.runs.run import RunFolder

__all__ = ["OwnerGain", "OwnerRow", "gains_per_owner", "owner_metric", "rows_per_owner"]


@dataclass(frozen=True)
class OwnerGain:
    """Scores of one owner in paired runs of A and B; ``metric`` is their name."""

    name: str
    one: tuple[float, ...]
    other: tuple[float, ...]
    metric: str = "accuracy"

    @property
    def gain(self) -> float:
        """How much the mean of B is better than that of A."""
        return ScoreScale(self.metric).gain(fmean(self.other), fmean(self.one))

    @property
    def wins(self) -> int:
        """Number of pairs in which B is better."""
        pairs = zip(self.one, self.other, strict=True)
        return sum(is_better(self.metric, b, a) for a, b in pairs)


@dataclass(frozen=True)
class OwnerRow:
    """Mean scores of one owner in groups of runs, and mean paired gains over a base."""

    name: str
    means: tuple[float | None, ...]
    gains: tuple[float | None, ...]


def owner_metric(runs: Sequence[RunFolder], column: str = "test") -> str:
    """Return the owners' score that all scored runs have, else ``accuracy``."""
    return one_metric(run.owner_metric(column) for run in runs if run.best is not None)


def rows_per_owner(
    groups: Sequence[Sequence[RunFolder]],
    base: int | None = None,
    *,
    column: str = "test",
    metric: str = "accuracy",
) -> list[OwnerRow]:
    """Score groups of runs, which differ in their seeds, by owner; gains over ``base``."""
    tables = [[run.per_owner(column, metric) for run in runs] for runs in groups]
    names = dict.fromkeys(name for table in tables for row in table for name in row)
    gains: list[dict[str, float]] = []
    for number, runs in enumerate(groups):
        found: list[OwnerGain] = []
        if base is not None and number != base:
            with suppress(RunError):  # no pairs: the table shows the scores alone
                found = gains_per_owner(
                    groups[base], runs, column=column, metric=metric
                )
        gains.append({entry.name: entry.gain for entry in found})

    def mean(table: Sequence[Mapping[str, float]], name: str) -> float | None:
        known = [row[name] for row in table if name in row]
        return fmean(known) if known else None

    return [
        OwnerRow(
            name,
            tuple(mean(table, name) for table in tables),
            tuple(gain.get(name) for gain in gains),
        )
        for name in names
    ]


def gains_per_owner(
    one: Sequence[RunFolder], other: Sequence[RunFolder], *, column: str, metric: str
) -> list[OwnerGain]:
    """Compare two methods owner by owner, by descending gain of B over A (usually Local).

    Raises a RunError if no two runs form a pair, or no owner has the score in both.
    """
    done = [[run for run in runs if run.status == "completed"] for runs in (one, other)]
    pairs = paired_runs(*done)
    if not pairs:
        raise RunError(
            "No completed run of A has the dataset, partition, clients and seed of a run "
            "of B. Run both methods with the same partition-seed and seed."
        )
    found: dict[str, list[tuple[float, float]]] = {}
    for first, second in pairs:
        scores = [run.per_owner(column, metric) for run in (first, second)]
        for name in scores[0].keys() & scores[1].keys():
            found.setdefault(name, []).append((scores[0][name], scores[1][name]))
    if not found:
        raise RunError(
            f'No owner has "{metric}" of "{column}" in both runs of a pair. Use --metric '
            "accuracy, macro_f1, auroc or rmse, and --column test or val."
        )
    gains = [
        OwnerGain(name, tuple(a for a, _ in both), tuple(b for _, b in both), metric)
        for name, both in found.items()
    ]
    return sorted(gains, key=lambda entry: (-entry.gain, entry.name))
