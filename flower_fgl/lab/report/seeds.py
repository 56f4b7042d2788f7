"""Table over seeds: means, standard deviations, and significant differences."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from flower_fgl.core.errors import RunError
from flower_fgl.core.score_names import (
    NOTHING,
    NUMBER_SCORES,
    SCORE_NAMES,
    SETTING_COLUMNS,
    ScoreScale,
)
from flower_fgl.lab.report.numbers import pooled_test_score
from flower_fgl.lab.tables.compare import PER_RUN, common_scale, group_runs, main_metric
from flower_fgl.lab.tables.frame import Scores, frame_of_runs, place_of
from flower_fgl.lab.tables.statistics import Comparison, compare_all, compare_series
from flower_fgl.runs.files import flatten_config
from flower_fgl.runs.run import RunFolder

__all__ = ["average_groups", "over_seeds", "scored_runs"]

KINDS = {"own": "", "global": ", aggregated model"}
"""Rows of a group by evaluated model, with the end of their name."""
TUNED_KINDS = {
    "before": "",
    "global": ", aggregated model",
    "own": ", after fine-tuning",
}
"""The same of runs that end with fine-tuning."""


def scored_runs(runs: Sequence[RunFolder]) -> list[tuple[RunFolder, dict[str, Any]]]:
    """Return the completed runs with scores, and their settings without seeds."""
    return [
        (run, {k: v for k, v in flatten_config(run.config) if k not in PER_RUN})
        for run in runs
        if run.status == "completed"
        and pooled_test_score(run, "rmse" if run.target else "accuracy") is not None
    ]


def average_groups(runs: Sequence[RunFolder]) -> list[tuple[str, list[RunFolder]]]:
    """Group completed runs with scores that differ only in their seeds, by their name."""
    scored = [run for run, _ in scored_runs(runs)]
    return group_runs(scored, but={"dataset", "clients"}, smallest=2)


def over_seeds(runs: Sequence[RunFolder], against: str = "") -> list[dict[str, Any]]:
    """Average completed runs that differ only in their seeds: one mapping per table row.

    The aggregated model and fine-tuning have rows of their own; the rows after
    fine-tuning are compared. ``rank`` is ``best`` (mean test score) or ``tied``
    (differs from it by less than the margin) among rows of the same data and draws.
    Where the draws of the rows differ, no row is best: then ``has_other_draws`` is set.
    ``is_better`` and ``versus`` are the comparison with the method ``against``. The
    p-values of either kind of comparison are adjusted together.
    """
    groups = average_groups(runs)
    scores = Scores(
        frame_of_runs(
            (place_of(run), number, run)
            for number, (_, group) in enumerate(groups)
            for run in group
        )
    )
    shown = [
        (column, metric)
        for column in ("val", "test", *SETTING_COLUMNS)
        for metric in (*SCORE_NAMES, "auroc", "mean_accuracy", *NUMBER_SCORES)
    ]
    rows: list[dict[str, Any]] = []
    for number, (label, group) in enumerate(groups):
        first = group[0]
        place = place_of(first)
        is_tuned = any("finetuned" in run.summary for run in group)
        kinds = TUNED_KINDS if is_tuned else KINDS
        for model, kind in kinds.items():
            texts = {}
            for column, metric in shown:
                values = scores.values(place, number, model, column, metric)
                text = first.scale_of(metric).show_mean(values, digits=1)
                texts[f"{column}_{metric}"] = text if len(values) > 1 else NOTHING
            if model != "own" and set(texts.values()) == {NOTHING}:
                continue
            main = scores.series(place, number, model, "test", main_metric(first))
            row = {
                "name": f"{label} on {first.summary['dataset']}{kind}",
                "runs": group,
                "place": place,
                "main": main if len(main) == len(group) else main[:0],
                "is_compared": model == "own",
                "is_better": False,
                "has_other_draws": False,
                "versus": "",
                "rank": "",
                "score": main_metric(first),
                "scale": common_scale(main_metric(first), group),
                "clients": first.summary["clients"],
                "seeds": _seeds(group),
            }
            rows.append(row | texts)
    compared = [row for row in rows if row["is_compared"]]
    _mark_best(compared)
    if against:
        _mark_better(compared, against)
    return rows


def _mark_best(rows: Sequence[dict[str, Any]]) -> None:
    """Set ``rank`` and ``has_other_draws``, see :func:`over_seeds`."""
    places: dict[Hashable, list[dict[str, Any]]] = {}
    for row in rows:
        places.setdefault(row["place"], []).append(row)
    tests: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for rivals in places.values():
        scored = [row for row in rivals if len(row["main"])]
        if len(rivals) < 2 or not scored:
            continue
        if len({tuple(sorted(row["main"].index)) for row in scored}) > 1:
            for row in rivals:
                row["has_other_draws"] = True
            continue
        scale: ScoreScale = scored[0]["scale"]
        best = max(
            scored,
            key=lambda row, s=scale: s.goodness(statistics.fmean(row["main"])),  # type: ignore[misc]
        )
        best["rank"] = "best"
        tests += [(best, row) for row in scored if row is not best]
    for _, row, found in _compared(tests):
        if found.is_tied:
            row["rank"] = "tied"


def _mark_better(rows: Sequence[dict[str, Any]], against: str) -> None:
    """Set ``is_better`` and ``versus``, see :func:`over_seeds`."""
    bases = [row for row in rows if row["runs"][0].summary["method"] == against]
    places = [row["place"] for row in bases]
    if not bases:
        methods = sorted({str(row["runs"][0].summary["method"]) for row in rows})
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
    pairs = [(row, base_of.get(row["place"])) for row in rows]
    tests = [(row, base) for row, base in pairs if base is not None and base is not row]
    for row, _, found in _compared(tests):
        row["is_better"] = found.is_significant and found.difference > 0
        row["versus"] = found.brief


def _compared(
    pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]],
) -> Iterator[tuple[dict[str, Any], dict[str, Any], Comparison]]:
    """Yield pairs of rows that have common draws, with their adjusted comparisons."""
    found = [(a, b, compare_series(a["main"], b["main"], a["scale"])) for a, b in pairs]
    known = [(a, b, test) for a, b, test in found if test is not None]
    tests = compare_all([test for _, _, test in known])
    yield from ((a, b, test) for (a, b, _), test in zip(known, tests, strict=True))


def _seeds(runs: Sequence[RunFolder]) -> str:
    """Return the seeds of runs as text, with the partition seeds if these differ."""
    seeds = ", ".join(str(run.summary["seed"]) for run in runs)
    parts = [run.config.get("partition-seed") for run in runs]
    if len(set(parts)) == 1:
        return seeds
    partitions = f"partitions {', '.join(map(str, parts))}"
    is_one = len({run.summary["seed"] for run in runs}) == 1
    return partitions if is_one else f"{seeds}; {partitions}"
