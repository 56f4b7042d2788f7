"""What the report says of a setting that was tried at several values."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flower_fgl.runs.report.numbers import tell_apart
from flower_fgl.runs.report.seeds import scored_runs
from flower_fgl.runs.run import Run

__all__ = ["SWEEP_METRICS", "Sweep", "SweepLine", "find_sweeps"]

SWEEP_METRICS = ("accuracy", "macro_f1")


@dataclass(frozen=True)
class SweepLine:
    """Scores of runs that differ in one setting and their seeds only.

    Parameters
    ----------
    label : str
        The method, and what tells the line from the others of that method.
    scores : mapping of float to mapping of str to list of float in [0, 1]
        Per value of the setting and per metric, one test score for each run.
    """

    label: str
    scores: Mapping[float, Mapping[str, Sequence[float]]]

    def mean(self, value: float, metric: str) -> float | None:
        """Return the mean over the runs at a value, ``None`` without any."""
        known = self.scores.get(value, {}).get(metric)
        return statistics.mean(known) if known else None

    def show(self, value: float, metric: str) -> str:
        """Write mean and deviation in percent; a dash without any run."""
        mean = self.mean(value, metric)
        if mean is None:
            return "–"
        spread = 100 * self.deviation(value, metric)
        return f"{100 * mean:.1f}" + (f" ± {spread:.1f}" if spread else "")

    def deviation(self, value: float, metric: str) -> float:
        """Return the standard deviation over the runs at a value, 0 for one run."""
        known = self.scores.get(value, {}).get(metric, ())
        return statistics.stdev(known) if len(known) > 1 else 0.0


@dataclass(frozen=True)
class Sweep:
    """A setting, the values that were tried, and what came of them.

    Parameters
    ----------
    key : str
        The setting.
    lines : tuple of SweepLine
        At least one, each with two values or more.
    """

    key: str
    lines: tuple[SweepLine, ...]

    @property
    def values(self) -> list[float]:
        """All values of all lines, ascending."""
        return sorted({value for line in self.lines for value in line.scores})


def find_sweeps(runs: Sequence[Run]) -> list[Sweep]:
    """Find the settings that completed runs were given at two values or more.

    Parameters
    ----------
    runs : sequence of Run
        Any; those that are not completed or not scored do not count.

    Returns
    -------
    list of Sweep
        One per setting whose values are numbers, in the order of the config. Runs share
        a line if nothing else than that setting and their seeds sets them apart.
    """
    scored = scored_runs(runs)
    tried: dict[str, set[float]] = {}
    for _, config in scored:
        for key, value in config.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                tried.setdefault(key, set()).add(value)
    found = [
        Sweep(key, tuple(_lines(key, scored)))
        for key, values in tried.items()
        if len(values) > 1
    ]
    return [sweep for sweep in found if sweep.lines]


def _lines(key: str, runs: Sequence[tuple[Run, Mapping[str, Any]]]) -> list[SweepLine]:
    """Group the runs that differ in one setting only; drop groups of one value."""
    groups: dict[str, dict[float, list[Run]]] = defaultdict(lambda: defaultdict(list))
    others: dict[str, dict[str, Any]] = {}
    for run, config in runs:
        if key in config:
            rest = {k: v for k, v in config.items() if k != key}
            name = json.dumps(rest, sort_keys=True)
            groups[name][config[key]].append(run)
            others[name] = rest
    kept = [name for name, by_value in groups.items() if len(by_value) > 1]
    labels = tell_apart([others[name] for name in kept])
    return [
        SweepLine(label, {v: _scores(same) for v, same in groups[name].items()})
        for name, label in zip(kept, labels, strict=True)
    ]


def _scores(runs: Sequence[Run]) -> dict[str, list[float]]:
    tests = [(run.best or {})["test"] for run in runs]
    return {metric: [test[metric] for test in tests] for metric in SWEEP_METRICS}
