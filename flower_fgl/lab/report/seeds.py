"""Table over seeds: means, standard deviations, and significant differences."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flower_fgl.core.errors import RunError
from flower_fgl.core.score_names import SCORE_NAMES, SETTING_COLUMNS
from flower_fgl.lab.report.numbers import about, pooled_test_score
from flower_fgl.lab.tables.cells import PLACE
from flower_fgl.lab.tables.compare import PER_RUN, compare_accuracy, main_metric
from flower_fgl.lab.tables.statistics import PairedTest, compare_all
from flower_fgl.runs.files import flatten_config
from flower_fgl.runs.names import tell_apart
from flower_fgl.runs.run import Run

__all__ = ["Group", "average_groups", "mark_best", "mark_better", "over_seeds"]
__all__ += ["scored_runs"]

FINETUNED = ", after fine-tuning"
KINDS: dict[str, Callable[[Run], Mapping[str, Any] | None]] = {
    "": lambda run: run.best,
    ", aggregated model": lambda run: run.summary.get("global", {}).get("best"),
    FINETUNED: lambda run: run.summary.get("finetuned"),
}
"""Scores of a run to average, by the suffix of the row's name."""


def scored_runs(runs: Sequence[Run]) -> list[tuple[Run, dict[str, Any]]]:
    """Return the completed runs with scores, and their settings without seeds."""
    return [
        (run, {k: v for k, v in flatten_config(run.config) if k not in PER_RUN})
        for run in runs
        if run.status == "completed" and pooled_test_score(run) is not None
    ]


@dataclass(frozen=True)
class Group:
    """Completed runs that differ only in their seeds.

    Parameters
    ----------
    label : str
        Method, and the settings in which it differs from other groups of the method.
    runs : list of Run
        At least one run.
    """

    label: str
    runs: list[Run]


def average_groups(runs: Sequence[Run], *, smallest: int = 2) -> list[Group]:
    """Group completed runs with scores that differ only in their seeds.

    Parameters
    ----------
    runs : sequence of Run
        Runs, finished or not.
    smallest : int
        Groups of fewer runs are left out.
    """
    groups: dict[str, list[Run]] = {}
    configs: dict[str, dict[str, Any]] = {}
    for run, config in scored_runs(runs):
        key = json.dumps([about(run), run.summary["clients"], sorted(config.items())])
        groups.setdefault(key, []).append(run)
        configs[key] = {"method": run.summary["method"], **config}
    kept = {key: group for key, group in groups.items() if len(group) >= smallest}
    labels = tell_apart([configs[key] for key in kept], but={"dataset", "clients"})
    return [
        Group(label, group) for label, group in zip(labels, kept.values(), strict=True)
    ]


def over_seeds(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Average completed runs that differ only in their seeds.

    The aggregated model and fine-tuning have additional rows if the runs scored them. The
    rows that are compared are those after fine-tuning, where the runs have it.
    """
    groups = [
        {
            "name": f"{group.label} on {group.runs[0].summary['dataset']}{kind}",
            "runs": group.runs,
            "is_compared": kind == _compared_kind(group.runs),
            "is_better": False,
            "has_other_draws": False,
            "versus": "",
            "rank": "",
            "score": main_metric(group.runs[0]),
            "clients": group.runs[0].summary["clients"],
            "seeds": _seeds(group.runs),
            **{
                f"{column}_{metric}": _mean_std(entries, column, metric)
                for column in ("val", "test", *SETTING_COLUMNS)
                for metric in (*SCORE_NAMES, "auroc", "mean_accuracy")
            },
        }
        for group in average_groups(runs)
        for kind, entry_of in KINDS.items()
        if any(entries := [entry_of(run) or {} for run in group.runs])
    ]
    mark_best([group for group in groups if group["is_compared"]])
    return groups


def _compared_kind(runs: Sequence[Run]) -> str:
    """Return the kind of the row that stands for the runs, see :attr:`Run.final`."""
    return FINETUNED if any(KINDS[FINETUNED](run) for run in runs) else ""


def mark_best(groups: Sequence[dict[str, Any]]) -> None:
    """Set ``rank`` to ``best`` or ``tied`` among rows of the same data and draws.

    The best has the highest mean test score. A tied one differs from it by less than
    one point, by the paired equivalence test of
    :mod:`flower_fgl.lab.tables.statistics`; too few common draws, or a large spread,
    are no tie. The p-values of all rows are adjusted together, by Holm's method. Where
    the draws of the rows differ, no row is best: their means are not comparable. Then
    ``has_other_draws`` is set.
    """
    places: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        places.setdefault(_place(group["runs"][0]), []).append(group)
    tests: list[tuple[dict[str, Any], PairedTest]] = []
    for rivals in places.values():
        scores = [_main_score(group["runs"]) for group in rivals]
        if len(rivals) < 2 or max(scores) == -math.inf:
            continue
        scored = zip(rivals, scores, strict=True)
        draws = {_draws(group["runs"]) for group, x in scored if x > -math.inf}
        if len(draws) > 1:
            for group in rivals:
                group["has_other_draws"] = True
            continue
        best = rivals[scores.index(max(scores))]
        best["rank"] = "best"
        tests += [
            (group, test)
            for group in rivals
            if group is not best
            and (test := _paired(best["runs"], group["runs"])) is not None
        ]
    compared = compare_all([test for _, test in tests])
    for (group, _), found in zip(tests, compared, strict=True):
        if found.is_tied:
            group["rank"] = "tied"


def _place(run: Run) -> str:
    """Return what runs must share to be compared: the data, and how clients hold it."""
    held = [run.summary["dataset"], run.summary["clients"]]
    parts = [run.config.get(key) for key in PLACE if key not in ("dataset", "clients")]
    return json.dumps(held + parts)


def _draws(runs: Sequence[Run]) -> tuple[tuple[str, str], ...]:
    """Return the partitions and seeds of runs, as the paired test matches them."""
    draws = [(run.summary.get("partition_sha256"), run.summary["seed"]) for run in runs]
    return tuple(sorted((str(partition), str(seed)) for partition, seed in draws))


def _main_score(runs: Sequence[Run]) -> float:
    """Return the mean of the test score that papers on the runs' setting report.

    Returns ``-inf`` if a run has none, since means over other draws do not compare.
    """
    scores = [(run.final or {})["test"].get(main_metric(run)) for run in runs]
    return -math.inf if None in scores else statistics.fmean(scores)


def _paired(best: Sequence[Run], other: Sequence[Run]) -> PairedTest | None:
    """Return the paired test of two rows, ``None`` if they have no pairs."""
    try:
        return compare_accuracy(best, other)
    except RunError:  # e.g. two runs with one seed, which cannot be paired
        return None


def mark_better(groups: Sequence[dict[str, Any]], against: str) -> None:
    """Set ``is_better`` and ``versus``, the comparison with a method in words.

    The p-values of all rows are adjusted together, by Holm's method.

    Raises
    ------
    RunError
        If the method has no runs over several seeds, or several groups of runs on the
        same clients.
    """
    groups = [group for group in groups if group["is_compared"]]
    bases = [g for g in groups if g["runs"][0].summary["method"] == against]
    places = [_place(group["runs"][0]) for group in bases]
    if not bases:
        methods = sorted({group["runs"][0].summary["method"] for group in groups})
        raise RunError(
            f'"{against}" needs completed runs of at least two seeds. Methods with such '
            f"runs: {', '.join(methods) or 'none'}."
        )
    if any(places.count(place) > 1 for place in places):
        raise RunError(
            f'"{against}" must have one group of completed runs that differ only in their '
            f"seeds for each dataset and way to divide it, got {len(bases)} groups. "
            "Pass only the group to compare with."
        )
    base_of = dict(zip(places, bases, strict=True))
    tests = [
        (group, test)
        for group in groups
        if (base := base_of.get(_place(group["runs"][0]))) is not None
        and base is not group
        and (test := compare_accuracy(group["runs"], base["runs"])) is not None
    ]
    compared = compare_all([test for _, test in tests])
    for (group, _), found in zip(tests, compared, strict=True):
        group["is_better"] = found.is_significant and found.difference > 0
        group["versus"] = str(found)


def _seeds(runs: Sequence[Run]) -> str:
    """Return the seeds of runs as text, with the partition seeds if these differ."""
    seeds = ", ".join(str(run.summary["seed"]) for run in runs)
    parts = [run.config.get("partition-seed") for run in runs]
    if len(set(parts)) == 1:
        return seeds
    partitions = f"partitions {', '.join(map(str, parts))}"
    is_one = len({run.summary["seed"] for run in runs}) == 1
    return partitions if is_one else f"{seeds}; {partitions}"


def _mean_std(
    entries: Sequence[Mapping[str, Mapping[str, float]]], column: str, metric: str
) -> str:
    """Format mean and standard deviation in percent, a dash with fewer than two runs."""
    values = [entry.get(column, {}).get(metric) for entry in entries]
    known = [100 * value for value in values if value is not None]
    if len(known) < 2:
        return "–"
    return f"{statistics.mean(known):.1f} ± {statistics.stdev(known):.1f}"
