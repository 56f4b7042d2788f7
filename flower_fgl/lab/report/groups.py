"""Groups of runs on a page: over seeds, by a setting's value, and as lines of figures.

The methods of a page get their colours, and from the ninth on their dashes, in the order in
which they first appear. Lines of one method differ by their marker; where all lines belong
to one method, they have colours instead.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from flower_fgl.core.errors import RunError
from flower_fgl.core.score_names import (
    NOTHING,
    NUMBER_SCORES,
    SCORE_NAMES,
    SETTING_COLUMNS,
    ScoreScale,
)
from flower_fgl.lab import plots
from flower_fgl.lab.report.numbers import pooled_test_score, shown_score
from flower_fgl.lab.tables.compare import (
    common_scale,
    group_runs,
    main_metric,
    own_settings,
)
from flower_fgl.lab.tables.frame import Scores, frame_of_runs, place_of
from flower_fgl.lab.tables.statistics import Comparison, compare_all, compare_series
from flower_fgl.runs.files import grouped
from flower_fgl.runs.run import RunFolder

__all__ = ["Line", "Sweep", "average_groups", "find_sweeps"]
__all__ += ["has_one_objective", "lines_of", "looks_of", "over_seeds", "scored_runs"]

KINDS = {"own": "", "global": ", aggregated model"}
"""Rows of a group by evaluated model, with the end of their name."""
TUNED_KINDS = {
    "before": "",
    "global": ", aggregated model",
    "own": ", after fine-tuning",
}
"""The same of runs that end with fine-tuning."""


def scored_runs(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """Return the completed runs with scores."""
    return [
        run
        for run in runs
        if run.status == "completed"
        and pooled_test_score(run, "rmse" if run.target else "accuracy") is not None
    ]


def average_groups(runs: Sequence[RunFolder]) -> list[tuple[str, list[RunFolder]]]:
    """Group completed runs with scores that differ only in their seeds, by their name.

    Of several runs of one draw, which would hide the spread, the last one counts.
    """
    draws = {}
    for run in scored_runs(runs):
        summary, seed = run.summary, run.config.get("partition-seed")
        keys = ("method", "dataset", "clients", "seed", "partition_sha256")
        about = [seed, *(summary.get(key) for key in keys)]
        draws[json.dumps([about, sorted(own_settings(run).items())])] = run
    return group_runs(draws.values(), but={"dataset", "clients"}, smallest=2)


def over_seeds(runs: Sequence[RunFolder], against: str = "") -> list[dict[str, Any]]:
    """Average completed runs that differ only in their seeds: one mapping per table row.

    The aggregated model and fine-tuning have rows of their own; the rows after
    fine-tuning are compared. ``rank`` is ``best`` (mean test score) or ``tied``
    (differs from it by less than the margin) among rows of the same data and draws.
    Where the draws of the rows differ, no row is best: then ``has_other_draws`` is set.
    ``is_better`` and ``versus`` are the comparison with ``against``: a method, or a row
    such as ``local, dropout=0.5``. The p-values of either kind of comparison are adjusted
    together.
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
                "label": label.replace(" · ", ", "),
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
    tests: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for rivals in grouped(rows, lambda row: row["place"]).values():
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
            key=lambda row, s=scale: s.goodness(fmean(row["main"])),  # type: ignore[misc]
        )
        best["rank"] = "best"
        tests += [(best, row) for row in scored if row is not best]
    for _, row, found in _compared(tests):
        if found.is_tied:
            row["rank"] = "tied"


def _mark_better(rows: Sequence[dict[str, Any]], against: str) -> None:
    """Set ``is_better`` and ``versus``, see :func:`over_seeds`."""
    bases = [
        row
        for row in rows
        if against in (row["runs"][0].summary["method"], row["label"])
    ]
    places = [row["place"] for row in bases]
    if not bases:
        methods = sorted({str(row["runs"][0].summary["method"]) for row in rows})
        raise RunError(
            f'"{against}" is no row, or a method, with completed runs of at least two '
            f"seeds. Methods with such runs: {', '.join(methods) or 'none'}."
        )
    if any(places.count(place) > 1 for place in places):
        labels = "; ".join(dict.fromkeys(row["label"] for row in bases))
        raise RunError(
            f'"{against}" must have one group of completed runs that differ only in their '
            f"seeds for each dataset and way to divide it, got {len(bases)} groups. Name "
            f"one of the rows {labels}, or pass only the group to compare with."
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


@dataclass(frozen=True)
class Sweep:
    """Test scores of runs that differ only in one setting, ``key``, and their seeds.

    ``lines`` are the methods by name of the runs, with at least two values each;
    ``metrics`` the shown scores with their display names.
    """

    key: str
    lines: Mapping[str, str]
    metrics: Mapping[str, str]
    scores: Scores

    @property
    def values(self) -> list[float]:
        """All values of the setting, ascending."""
        return sorted(set(self.scores.frame["place"]))

    def at(self, line: str, value: float, metric: str) -> list[float]:
        """Return the scores of the runs of a line at a value."""
        return self.scores.values(value, line, "own", "test", metric)

    def show(self, line: str, value: float) -> str:
        """Format mean and standard deviation, if any, of each score at a value."""
        shown = {m: self.at(line, value, m) for m in self.metrics}
        return " / ".join(
            ScoreScale(m).show_mean(found if len(set(found)) > 1 else found[:1], 1)
            for m, found in shown.items()
        )


def find_sweeps(runs: Sequence[RunFolder]) -> list[Sweep]:
    """Find the numeric settings that have several values among completed, scored runs."""
    settings = [(run, own_settings(run)) for run in scored_runs(runs)]
    tried: dict[str, set[float]] = {}
    for _, config in settings:
        for key, value in config.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                tried.setdefault(key, set()).add(value)
    scored = [run for run, _ in settings]
    main = shown_score(scored)
    second = "spearman" if any(run.target for run in scored) else "macro_f1"
    metrics = {name: common_scale(name, scored).title for name in (main, second)}
    sweeps = []
    for key in [key for key, values in tried.items() if len(values) > 1]:
        value_of = {id(run): own[key] for run, own in settings if key in own}
        having = [run for run in scored if id(run) in value_of]
        groups = group_runs(having, smallest=2, varying=key)
        if groups:
            lines = {name: str(same[0].summary["method"]) for name, same in groups}
            frame = frame_of_runs(
                (value_of[id(run)], name, run) for name, same in groups for run in same
            )
            sweeps.append(Sweep(key, lines, metrics, Scores(frame)))
    return sweeps


@dataclass(frozen=True)
class Line:
    """Runs that the figures show as one line: one run, or the mean over seeds.

    If there are several datasets, ``panel`` is the line's, and ``name`` its name beside
    lines of the same dataset.
    """

    label: str
    runs: Sequence[RunFolder]
    look: Mapping[str, Any] = field(default_factory=dict)
    panel: str = ""
    name: str = ""

    @property
    def method(self) -> str:
        """Method of the runs."""
        return str(self.runs[0].summary["method"])


def lines_of(runs: Sequence[RunFolder], labels: Sequence[str]) -> list[Line]:
    """Return the lines of several runs; those that differ only in seeds share one."""
    data = {run.summary["dataset"] for run in runs}
    sizes = {(run.summary["dataset"], run.summary["clients"]) for run in runs}
    found = []
    for label, group in average_groups(runs):
        about = group[0].summary
        label += f" on {about['dataset']}" if len(data) > 1 else ""
        if len(sizes) > len(data):
            label += f" · {about['clients']} clients"
        found.append((label, group))
    averaged = {id(run) for _, members in found for run in members}
    found += [
        (label, [run])
        for label, run in zip(labels, runs, strict=True)
        if id(run) not in averaged
    ]
    repeated = Counter(label for label, _ in found)
    lines = []
    for label, members in found:
        label += f" ({members[0].path.name})" if repeated[label] > 1 else ""
        panel = str(members[0].summary["dataset"]) if len(data) > 1 else ""
        name = re.sub(rf" (on|·) {re.escape(panel)}(?= · | \(|$)", "", label, count=1)
        lines.append(Line(label, members, panel=panel, name=name if panel else label))
    methods = {line.name: line.method for line in lines}
    order = dict.fromkeys(str(run.summary["method"]) for run in runs)
    looks = dict(
        zip(methods, looks_of(list(methods.values()), list(order)), strict=True)
    )
    return [replace(line, look=looks[line.name]) for line in lines]


def looks_of(methods: Sequence[str], order: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return colour, dash and marker of each line by its method, see this module."""
    if len(set(methods)) == 1 and len(methods) > 1:
        return [plots.look_of(number) for number in range(len(methods))]
    numbers = {name: n for n, name in enumerate(dict.fromkeys([*order, *methods]))}
    seen: Counter[str] = Counter()
    looks = []
    for method in methods:
        looks.append(plots.variant_look(numbers[method], seen[method]))
        seen[method] += 1
    return looks


def has_one_objective(runs: Sequence[RunFolder]) -> bool:
    """Return whether losses can be compared: same method, its settings, data and task."""
    objectives = [
        (
            run.summary["method"],
            run.summary["dataset"],
            run.config.get("setting"),
            run.config.get(str(run.summary["method"])),
        )
        for run in runs
    ]
    return all(objective == objectives[0] for objective in objectives)
