"""Find the settings that runs vary, and average the scores by their values."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flower_fgl.core.score_names import ScoreScale
from flower_fgl.lab.report.numbers import shown_score
from flower_fgl.lab.report.seeds import scored_runs
from flower_fgl.lab.tables.compare import common_scale
from flower_fgl.runs.files import tell_apart
from flower_fgl.runs.run import RunFolder

__all__ = ["Sweep", "SweepLine", "find_sweeps"]


@dataclass(frozen=True)
class SweepLine:
    """Test scores of runs that differ only in one setting and their seeds, by its value."""

    label: str
    method: str
    scores: Mapping[float, Mapping[str, Sequence[float]]]

    def mean(self, value: float, metric: str) -> float | None:
        """Return the mean over the runs at a value, ``None`` without runs."""
        known = self.scores.get(value, {}).get(metric)
        return statistics.mean(known) if known else None

    def show(self, value: float, metric: str) -> str:
        """Format mean and standard deviation, a dash without runs."""
        scale, spread = ScoreScale(metric), self.deviation(value, metric)
        text = scale.show(self.mean(value, metric), 1)
        return f"{text} ± {scale.show(spread, 1)}" if spread else text

    def deviation(self, value: float, metric: str) -> float:
        """Return the standard deviation over the runs at a value, 0 for one run."""
        known = self.scores.get(value, {}).get(metric, ())
        return statistics.stdev(known) if len(known) > 1 else 0.0


@dataclass(frozen=True)
class Sweep:
    """A setting ``key`` with the scores at each of its values, at least two per line.

    ``metrics`` are the shown scores with their display names.
    """

    key: str
    lines: tuple[SweepLine, ...]
    metrics: Mapping[str, str]

    @property
    def values(self) -> list[float]:
        """All values of all lines, ascending."""
        return sorted({value for line in self.lines for value in line.scores})


def find_sweeps(runs: Sequence[RunFolder]) -> list[Sweep]:
    """Find the numeric settings that have several values among completed, scored runs."""
    scored = scored_runs(runs)
    tried: dict[str, set[float]] = {}
    for _, config in scored:
        for key, value in config.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                tried.setdefault(key, set()).add(value)
    main = shown_score([run for run, _ in scored])
    has_numbers = any(run.target for run, _ in scored)
    names = [main, "spearman" if has_numbers else "macro_f1"]
    metrics = {n: common_scale(n, [run for run, _ in scored]).title for n in names}
    found = [
        Sweep(key, tuple(_lines(key, scored, list(metrics))), metrics)
        for key, values in tried.items()
        if len(values) > 1
    ]
    return [sweep for sweep in found if sweep.lines]


def _lines(
    key: str,
    runs: Sequence[tuple[RunFolder, Mapping[str, Any]]],
    metrics: Sequence[str],
) -> list[SweepLine]:
    """Group the runs that differ only in one setting; drop groups with one value."""
    groups: dict[str, dict[float, list[RunFolder]]] = defaultdict(
        lambda: defaultdict(list)
    )
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
        SweepLine(
            label,
            str(others[name]["method"]),
            {v: _scores(same, metrics) for v, same in groups[name].items()},
        )
        for name, label in zip(kept, labels, strict=True)
    ]


def _scores(
    runs: Sequence[RunFolder], metrics: Sequence[str]
) -> dict[str, list[float]]:
    """Return the test scores of the runs by metric."""
    tests = [(run.final or {})["test"] for run in runs]
    return {
        metric: [test[metric] for test in tests if test.get(metric) is not None]
        for metric in metrics
    }
