"""Gain of each natural owner: paired scores of two methods, owner by owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from flower_fgl.core.errors import RunError
from flower_fgl.runs.compare import paired_runs
from flower_fgl.runs.run import Run

__all__ = ["OwnerGain", "gains_per_owner"]


@dataclass(frozen=True)
class OwnerGain:
    """Scores of one owner in paired runs of A and B.

    Parameters
    ----------
    name : str
        Name of the owner.
    one, other : tuple of float
        Length n: scores of A and B, by pair.
    """

    name: str
    one: tuple[float, ...]
    other: tuple[float, ...]

    @property
    def gain(self) -> float:
        """Mean of B minus mean of A."""
        return fmean(self.other) - fmean(self.one)

    @property
    def wins(self) -> int:
        """Number of pairs in which B is better."""
        return sum(b > a for a, b in zip(self.one, self.other, strict=True))


def gains_per_owner(
    one: Sequence[Run], other: Sequence[Run], *, column: str, metric: str
) -> list[OwnerGain]:
    """Compare two methods owner by owner.

    Parameters
    ----------
    one, other : sequence of Run
        Runs of A, usually Local, and of B. Only completed runs with the same data,
        partition, number of clients and seed are compared.
    column, metric : str
        Node set and score of :meth:`Run.per_owner`.

    Returns
    -------
    list of OwnerGain
        By descending gain.

    Raises
    ------
    RunError
        If no two runs form a pair, or no owner has the score in both runs of a pair.
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
            "accuracy, macro_f1 or auroc, and --column test or val."
        )
    gains = [OwnerGain(name, *zip(*both, strict=True)) for name, both in found.items()]
    return sorted(gains, key=lambda entry: (-entry.gain, entry.name))
