"""What ``flower-fgl compare`` does: a paired t-test between two sets of runs."""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.runs.files import flatten_config
from flower_fgl.runs.names import in_folder_name
from flower_fgl.runs.run import Run

__all__ = [
    "LEVEL",
    "PER_RUN",
    "Comparison",
    "common_metric",
    "compare_runs",
    "is_better",
    "main_metric",
    "pair_scores",
    "paired_t_test",
    "select_runs",
    "without_seed",
]

LEVEL = 0.05
"""A difference is significant if its p is below this: at 95 %."""
PER_RUN = {"seed", "partition-seed", "output-dir", "run-dir", "state-dir"}
"""Settings in which runs that are averaged over seeds may differ."""
OF_PLACE = {"data-dir", "threads"}
"""Settings of the machine."""
PAIRED_BY = ("dataset", "partition_sha256", "clients", "seed")

SEEDS = re.compile(r"(^|-)((?:partition-)?seed)\d+(?=-|$)")
"""What the values of the grid's seeds add to the name of a run's folder."""

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Comparison:
    """Two sets of scores of the same experiments.

    Parameters
    ----------
    one, other : tuple of float
        Length n: scores of A and of B, pair by pair.
    t : float
        Positive where A is better; infinite if all differences are equal, NaN if all
        are 0.
    p : float in [0, 1]
        Two-sided.
    """

    one: tuple[float, ...]
    other: tuple[float, ...]
    t: float
    p: float

    @property
    def difference(self) -> float:
        """Mean of A minus mean of B."""
        return fmean(self.one) - fmean(self.other)

    @property
    def is_significant(self) -> bool:
        """Whether p is below :data:`LEVEL`."""
        return self.p < LEVEL


def paired_t_test(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Test whether the mean of paired differences is 0, Student's t, two-sided.

    Parameters
    ----------
    one, other : sequence of float
        Length n, at least 2, pair by pair.

    Returns
    -------
    t : float
        ``mean(d) / (std(d) / √n)`` of the differences d, with n − 1 degrees of freedom.
    p : float in [0, 1]
    """
    differences = [a - b for a, b in zip(one, other, strict=True)]
    if max(differences) == min(differences):  # no spread: scipy would divide by 0
        value = differences[0]
        return (math.copysign(math.inf, value), 0.0) if value else (math.nan, 1.0)
    from scipy import stats  # slow to import, and selecting runs does not need it

    result = stats.ttest_rel(one, other)
    return float(result.statistic), float(result.pvalue)


def select_runs(text: str) -> list[Run]:
    """Read the runs that one side of a comparison names.

    Parameters
    ----------
    text : str
        Paths, or patterns such as ``runs/cora/fedavg-*``, separated by commas: run
        folders, or folders of run folders. Behind a path, ``:name`` takes the runs of
        that method only, or of a case of an experiment that is called so.

    Returns
    -------
    list of Run
        Finished or not.

    Raises
    ------
    RunError
        If a path holds no run, or none of that name, or a run folder is damaged.
    """
    runs: dict[Path, Run] = {}
    for place, name in _places(text):
        folders = [Path(p) for p in sorted(glob.glob(place))] if "*" in place else []
        found = {
            file.parent.resolve(): Run.load(file.parent)
            for folder in folders or [Path(place)]
            for file in _config_files(folder)
        }
        if name:
            known = {str(run.summary["method"]) for run in found.values()}
            known |= {without_seed(path.name) for path in found}
            found = {
                p: run for p, run in found.items() if run.summary["method"] == name
            } or _of_case(found, name)
            if known and not found:
                raise RunError(
                    f'{place} holds no run of "{name}", only of '
                    f"{', '.join(sorted(known))}."
                )
        if not found:
            raise RunError(
                f"{place} holds no run folder. Give run folders that `flower-fgl run` "
                "wrote, a folder of them, or a quoted pattern."
            )
        runs |= found
    if not runs:
        raise RunError("Each side of a comparison needs at least one run folder.")
    return list(runs.values())


def _places(text: str) -> list[tuple[str, str]]:
    """Split a side's text into paths or patterns, each with a name or none.

    A comma is part of a case's name where what follows it is no path, and of a path that
    exists.
    """
    if os.path.exists(text):  # unlike Path's: false for a list too long for a path
        return [(text, "")]
    parts: list[str] = []
    for piece in text.split(","):
        is_place = "*" in piece or ":" in piece or Path(piece.strip()).exists()
        if parts and ":" in parts[-1] and not is_place:
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    stripped = [part.strip() for part in parts if part.strip()]
    return [(place, name) for place, _, name in (p.partition(":") for p in stripped)]


def _of_case(runs: Mapping[Path, Run], name: str) -> dict[Path, Run]:
    """Return the runs whose folder is named after a case: it, then the grid's values."""
    begin = in_folder_name(name)
    found = {}
    for path, run in runs.items():
        rest = path.name.removeprefix(begin)
        keys = {key.rpartition(".")[2] for key, _ in flatten_config(run.config)}
        is_grid = any(rest.startswith(f"-{key}") for key in keys)
        if path.name.startswith(begin) and (not rest or is_grid):
            found[path] = run
    return found


def without_seed(folder: str) -> str:
    """Leave the seeds out of a run folder's name."""
    return SEEDS.sub("", folder).removeprefix("-")


def _config_files(folder: Path) -> list[Path]:
    own = folder / "config.toml"
    return [own] if own.exists() else sorted(folder.glob("*/config.toml"))


def pair_scores(
    one: Sequence[Run], other: Sequence[Run], *, column: str, metric: str
) -> list[tuple[float, float]]:
    """Pair the scores of runs on the same data, partition, clients and seed.

    Parameters
    ----------
    one, other : sequence of Run
        Completed runs of A and of B.
    column : str
        Nodes that were scored: ``test``, ``val``, or a setting's own.
    metric : str
        ``accuracy``, ``macro_f1``, ``mean_accuracy``, …

    Returns
    -------
    list of (float, float)
        Ascending by key; runs without a partner are left out.

    Raises
    ------
    RunError
        If two runs of one side have the same key, or a run has no such score.
    """
    first, second = _by_key("A", one), _by_key("B", other)
    common = sorted(first.keys() & second.keys(), key=str)
    return [
        (_score(first[k], column, metric), _score(second[k], column, metric))
        for k in common
    ]


def _by_key(side: str, runs: Sequence[Run]) -> dict[Key, Run]:
    keyed: dict[Key, Run] = {}
    for run in runs:
        key = tuple(run.summary.get(name) for name in PAIRED_BY)
        if key in keyed:
            raise RunError(
                f"{side} holds two runs of the same data, partition, clients and seed: "
                f"{keyed[key].path} and {run.path}. Select one of each, e.g. with "
                '"folder:method" or a pattern.'
            )
        keyed[key] = run
    return keyed


def _score(run: Run, column: str, metric: str) -> float:
    best: Mapping[str, Any] = run.best or {}
    columns = [name for name in best if name != "round"]
    if column not in columns:
        raise RunError(
            f'{run.path} has no scores of "{column}", only of {", ".join(columns)}.'
        )
    value = best[column].get(metric)
    if value is None:
        raise RunError(
            f'{run.path} has no "{metric}" of "{column}". It has '
            f"{', '.join(name for name, v in best[column].items() if v is not None)}."
        )
    return float(value)


def compare_runs(
    one: Sequence[Run],
    other: Sequence[Run],
    *,
    column: str = "test",
    metric: str = "accuracy",
) -> Comparison:
    """Compare two methods on the experiments that both have finished.

    Parameters
    ----------
    one, other : sequence of Run
        Runs of A and of B; those that are not completed do not count.
    column, metric : str
        As for :func:`pair_scores`.

    Returns
    -------
    Comparison

    Raises
    ------
    ConfigError
        If one side holds runs of several methods, or with several settings.
    RunError
        If a run is on both sides, if fewer than two pairs are left, or as
        :func:`pair_scores`.
    """
    sides = {"A": one, "B": other}
    both = {run.path.resolve() for run in one} & {run.path.resolve() for run in other}
    if both:
        raise RunError(
            f"{min(both)} stands on both sides of the comparison: give two sets of runs."
        )
    for side, runs in sides.items():
        methods = sorted({str(run.summary["method"]) for run in runs})
        if len(methods) > 1:
            raise ConfigError(
                f"{side} holds runs of {', '.join(methods)}. Choose one: "
                f'"folder:{methods[0]}".'
            )
        _refuse_mixture(side, runs)
    done = [[r for r in runs if r.status == "completed"] for runs in sides.values()]
    pairs = pair_scores(done[0], done[1], column=column, metric=metric)
    if len(pairs) < 2:
        left_out = [
            f"{run.path} ({run.status})"
            for runs in sides.values()
            for run in runs
            if run.status != "completed"
        ]
        raise RunError(
            f"A paired t-test needs at least 2 pairs of completed runs with the same "
            f"data set, partition, clients and seed, got {len(pairs)} of "
            f"{len(done[0])} runs of A and {len(done[1])} of B."
            + (f" Not completed: {', '.join(left_out)}." if left_out else "")
        )
    scores = tuple(zip(*pairs, strict=True))
    return Comparison(scores[0], scores[1], *paired_t_test(scores[0], scores[1]))


def _refuse_mixture(side: str, runs: Sequence[Run]) -> None:
    """Refuse runs of one data set and number of clients that differ in a setting."""
    seen: dict[Key, dict[str, Any]] = {}
    for run in runs:
        own = {
            k: v for k, v in flatten_config(run.config) if k not in PER_RUN | OF_PLACE
        }
        place = (run.summary.get("dataset"), run.summary.get("clients"))
        first = seen.setdefault(place, own)
        keys = sorted(
            k for k in first.keys() | own.keys() if first.get(k) != own.get(k)
        )
        if keys:
            values = ", ".join(f"{k} {first.get(k)} and {own.get(k)}" for k in keys)
            raise ConfigError(
                f"{side} holds runs that differ in more than their seeds ({values}): a "
                "test over both says nothing of either. Choose the runs of one"
                f"{_pattern(runs[0])}."
            )


def _pattern(run: Run) -> str:
    """Show a pattern that takes a run and those of other seeds beside it, if any does."""
    name = SEEDS.sub(r"\1\2*", run.path.name)
    place = run.path.parent / name
    return f', e.g. with a pattern: "{place}"' if name != run.path.name else ""


def is_better(one: Sequence[Run], other: Sequence[Run]) -> bool:
    """Say whether A is significantly better than B in test accuracy.

    With few shots in the mean of the clients' accuracies, as papers of that setting do.

    Parameters
    ----------
    one, other : sequence of Run
        Completed runs of A and of B. With fewer than two pairs nothing is significant.

    Returns
    -------
    bool
    """
    metric = common_metric([*one, *other])
    pairs = pair_scores(one, other, column="test", metric=metric)
    if len(pairs) < 2:
        return False
    first, second = zip(*pairs, strict=True)
    t, p = paired_t_test(first, second)
    return t > 0 and p < LEVEL


def main_metric(run: Run) -> str:
    """Return what the papers of a run's setting report of the test nodes."""
    is_few_shot = run.config.get("setting") == "few-shot"
    return "mean_accuracy" if is_few_shot else "accuracy"


def common_metric(runs: Sequence[Run]) -> str:
    """Return the :func:`main_metric` of all runs; the accuracy if they differ."""
    metrics = {main_metric(run) for run in runs}
    return metrics.pop() if len(metrics) == 1 else "accuracy"


def describe(scores: Sequence[float]) -> str:
    """Write scores as mean ± standard deviation, in percent."""
    return f"{100 * fmean(scores):.2f} ± {100 * stdev(scores):.2f}"


def verdict(comparison: Comparison) -> str:
    """Say in words which side is better, if any."""
    if not comparison.is_significant:
        return "no significant difference at 95 %"
    return (
        f"{'A' if comparison.difference > 0 else 'B'} is significantly better at 95 %"
    )
