"""Figures of the report, drawn from run folders."""

import base64
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import fmean

import pandas as pd
from matplotlib.figure import Figure

from flower_fgl.core.score_names import ScoreScale
from flower_fgl.lab import plots
from flower_fgl.lab.report import numbers
from flower_fgl.lab.report.groups import Line, Sweep, has_one_objective, looks_of
from flower_fgl.lab.tables.compare import common_scale
from flower_fgl.runs.run import RunFolder
from flower_fgl.runs.summary import is_scored, main_scope

__all__ = ["draw_run", "draw_runs", "draw_sweeps", "to_data_uri"]

NAN = float("nan")
Pictures = dict[str, Figure]
"""Figures by their name in the template; those without content are omitted."""


def draw_run(run: RunFolder) -> Pictures:
    """Draw all figures of one run, finished or not."""
    lines = [Line("", [run])]
    score = numbers.shown_score([run])
    curves = [_curve(run, "", score)]
    pictures = _progress(curves) | _columns(lines, curves) | _distances(lines)
    pictures |= _by_cost(curves)
    owners = run.owner_names
    if scores := numbers.client_scores(run, score):
        values = [_number(value) for value in scores.values()]
        pictures["clients"] = plots.client_bars(
            [owners.get(pid, pid) for pid in scores],
            values,
            numbers.pooled_test_score(run, score),
            items=numbers.item_kind([run]),
            score=run.scale_of(score).title,
            is_percent=not run.scale_of(score).kind.has_units,
        )
    counted = [r for r in run.clients if r.get("class_counts")]
    # owners with classes of their own share no axis
    if len({tuple(row.get("class_names") or ()) for row in counted}) == 1:
        counted.sort(key=lambda row: int(row["partition_id"]))
        counts = [row["class_counts"] for row in counted]
        indices = [str(c) for c in range(len(counts[0]))]
        names = counted[0].get("class_names") or run.summary.get("class_names")
        pictures["labels"] = plots.label_heat_map(
            counts,
            [f"class {n}" if n.isdigit() else n for n in names or indices],
            [owners.get(row["partition_id"], row["partition_id"]) for row in counted],
            items=numbers.item_kind([run]),
        )
    if diagrams := numbers.reliability_of(run):
        pictures["reliability"] = plots.reliability(diagrams)
    if by_owner := numbers.owner_reliability(run):
        pictures["reliability"] = plots.owner_reliability(by_owner)
    if table := numbers.last_mixture(run):
        names = [owners.get(pid, pid) for pid in table["clients"]]
        pictures["mixture"] = plots.mixture_heat_map(table["weights"], names)
    return pictures | _costs(lines)


def draw_runs(lines: Sequence[Line]) -> Pictures:
    """Draw all figures that compare several runs; lines of several runs are averaged."""
    runs = [run for line in lines for run in line.runs]
    score = numbers.shown_score(runs)
    curves = [
        replace(
            _mean_curve([_curve(run, line.name, score) for run in line.runs]),
            look=line.look,
            panel=line.panel,
        )
        for line in lines
    ]
    per_client = [
        [
            _number(v)
            for run in line.runs
            for v in numbers.client_scores(run, score).values()
        ]
        for line in lines
    ]
    one = has_one_objective(runs)
    pictures = _progress(curves, has_loss=one) | _by_cost(curves)
    pictures |= _columns(lines, curves) | _distances(lines)
    if any(per_client):
        pictures["clients"] = plots.client_spread(
            [line.name for line in lines],
            per_client,
            [_mean_score(line.runs, score) for line in lines],
            [line.look["color"] for line in lines],
            score=common_scale(score, runs).title,
            is_percent=not ScoreScale(score).kind.has_units,
            panels=[line.panel for line in lines],
        )
    return pictures | _costs(lines)


def draw_sweeps(sweeps: Sequence[Sweep], methods: Sequence[str] = ()) -> Pictures:
    """Draw the scores of each sweep by the value of its setting: ``setting-<key>``.

    ``methods`` are those of the page, which give the lines their colours.
    """
    pictures = {}
    for sweep in sweeps:
        titles = {f"Test {name}": metric for metric, name in sweep.metrics.items()}
        values = sweep.values
        panels = {
            title: [
                (
                    line.label,
                    [_number(line.mean(value, metric)) for value in values],
                    [line.deviation(value, metric) for value in values],
                )
                for line in sweep.lines
            ]
            for title, metric in titles.items()
        }
        looks = looks_of([line.method for line in sweep.lines], methods)
        pictures[f"setting-{sweep.key}"] = plots.by_value(
            values,
            panels,
            xlabel=sweep.key,
            plain=[t for t, m in titles.items() if ScoreScale(m).kind.has_units],
            looks=looks,
        )
    return pictures


def _progress(curves: Sequence[plots.Curve], *, has_loss: bool = True) -> Pictures:
    """Draw score and loss by round, if there are any."""
    if not any(curve.rounds or curve.loss_rounds for curve in curves):
        return {}
    return {"convergence": plots.convergence(curves, has_loss=has_loss)}


def _by_cost(curves: Sequence[plots.Curve]) -> Pictures:
    """Draw the score by bytes and seconds, if there are two scored rounds."""
    if not any(len(curve.rounds) > 1 for curve in curves):
        return {}
    return {"cost": plots.by_cost([curve for curve in curves if curve.rounds])}


def _columns(lines: Sequence[Line], curves: Sequence[plots.Curve]) -> Pictures:
    """Draw the score by node set, for each setting with additional node sets."""
    groups: dict[str, list[plots.Curve]] = {}
    for line, curve in zip(lines, curves, strict=True):
        if curve.columns and curve.rounds:
            groups.setdefault(numbers.setting_of(line.runs[0]), []).append(curve)
    return {
        f"columns-{setting}": plots.column_curves(group)
        for setting, group in groups.items()
    }


def _distances(lines: Sequence[Line]) -> Pictures:
    """Draw the distance between uploaded encoders by round, if the runs have it."""
    curves, drawn = [], []
    for line in lines:
        known = [
            {
                row["round"]: row["numbers"]["distance"]
                for row in run.rounds
                if "distance" in row.get("numbers", {})
            }
            for run in line.runs
        ]
        rounds = _in_all([list(one) for one in known])
        if rounds:
            means = [fmean(one[number] for one in known) for number in rounds]
            curves.append((line.name, rounds, means))
            drawn.append(line)
    if not curves:
        return {}
    looks = [line.look for line in drawn]
    figure = plots.by_round(
        curves,
        ylabel="mean distance",
        looks=looks if all(looks) else (),
        panels=[line.panel for line in drawn],
    )
    return {"distance": figure}


def _costs(lines: Sequence[Line]) -> Pictures:
    """Draw bytes by payload and seconds by phase of a run, if there are any."""
    out = {}
    ways = [("up", "↑"), ("down", "↓")]
    labels = [line.label for line in lines]
    sent = [
        _mean_parts([run.summary["bytes"]["by_payload"][way] for run in line.runs])
        for line in lines
        for way, _ in ways
    ]
    names = [
        f"{label} {arrow}" for label in plots.distinct(labels) for _, arrow in ways
    ]
    if len(lines) == 1:
        names = ["to server", "to clients"]
    totals = [sum(part.values()) for part in sent]
    if any(totals):
        factor, unit = plots.scale_bytes(max(totals))
        out["bytes"] = plots.stacked_bars(names, _parts(sent, factor), unit)
    spent = [
        _mean_parts([run.summary["seconds"]["by_phase"] for run in line.runs])
        for line in lines
    ]
    if any(sum(part.values()) for part in spent):
        rows = [label or "all rounds" for label in labels]
        out["seconds"] = plots.stacked_bars(rows, _parts(spent, 1.0), "s")
    return out


def _mean_parts(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average mappings of runs key by key."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return {key: value / len(parts) for key, value in total.items()}


def _mean_score(runs: Sequence[RunFolder], score: str) -> float | None:
    """Return the mean test score of the runs that have one."""
    values = [numbers.pooled_test_score(run, score) for run in runs]
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _curve(run: RunFolder, label: str, score: str) -> plots.Curve:
    """Collect a score and the losses of a run by round."""
    train = [row for row in run.rounds if row.get("phase") == "train"]
    scored = [
        row
        for row in run.rounds
        if is_scored(row) and row["metrics"].get(main_scope(run.rounds))
    ]
    own = numbers.own_columns_of([run])
    columns = {
        name: [
            _number(row["metrics"][main_scope(run.rounds)].get(name, {}).get(score))
            for row in scored
        ]
        for name in ("val", "test", *own)
    }
    shown = ("test", *own) if own else ()
    has_loss = [row for row in train if row.get("loss") is not None]
    costs = _costs_until(run)
    return plots.Curve(
        label=label,
        rounds=[row["round"] for row in scored],
        val=columns["val"],
        test=columns["test"],
        loss_rounds=[row["round"] for row in has_loss],
        loss=[row["loss"] for row in has_loss],
        best_round=run.best["round"] if run.best else None,
        columns={
            "seen graph"
            if name == "test" and "unseen" in own
            else numbers.column_name(name): columns[name]
            for name in shown
        },
        bytes=[costs[row["round"]][0] for row in scored],
        seconds=[costs[row["round"]][1] for row in scored],
        score=run.scale_of(score).title,
        is_percent=not run.scale_of(score).kind.has_units,
    )


def _costs_until(run: RunFolder) -> dict[int, tuple[float, float]]:
    """Return the bytes and seconds from the start to the end of each training round."""
    each = [
        (
            sum(sum(way.values()) for way in row.get("bytes", {}).values()),
            row.get("seconds", {}).get("total") or 0.0,
        )
        for row in run.rounds
    ]
    sums = zip(*(accumulate(kind) for kind in zip(*each, strict=True)), strict=True)
    return {
        row["round"]: cost
        for row, cost in zip(run.rounds, sums, strict=True)
        if row.get("phase") == "train"
    }


def _mean_curve(curves: Sequence[plots.Curve]) -> plots.Curve:
    """Average curves over the rounds that all of them have."""
    first = curves[0]
    if len(curves) == 1:
        return first
    titles = [t for t in first.columns if all(t in curve.columns for curve in curves)]
    scores = [
        pd.DataFrame(
            {
                "val": curve.val,
                "test": curve.test,
                "bytes": curve.bytes,
                "seconds": curve.seconds,
                **{title: curve.columns[title] for title in titles},
            },
            curve.rounds,
            dtype=float,
        )
        for curve in curves
    ]
    losses = [
        pd.DataFrame({"loss": c.loss}, c.loss_rounds, dtype=float) for c in curves
    ]
    (mean, spread), (loss, _) = _over_runs(scores), _over_runs(losses)
    return replace(
        first,
        rounds=mean.index.tolist(),
        loss_rounds=loss.index.tolist(),
        loss=loss["loss"].tolist(),
        best_round=None,
        columns={title: mean[title].tolist() for title in titles},
        val_spread=spread["val"].tolist(),
        test_spread=spread["test"].tolist(),
        **{name: mean[name].tolist() for name in ("val", "test", "bytes", "seconds")},
    )


def _over_runs(runs: Sequence[pd.DataFrame]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return means and standard deviations by round, of the rounds that all runs have."""
    rounds = pd.concat(runs).replace([math.inf, -math.inf], math.nan).groupby(level=0)
    is_whole = rounds.size() == len(runs)
    return rounds.mean()[is_whole], rounds.std()[is_whole]


def _in_all(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the rounds that are in every row."""
    return sorted(set(rows[0]).intersection(*rows[1:]))


def _parts(
    rows: Sequence[Mapping[str, float]], factor: float
) -> dict[str, list[float]]:
    """Convert one mapping per bar to one list per part."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [row.get(key, 0) / factor for row in rows] for key in keys}


def to_data_uri(figure: Figure) -> str:
    """Return a figure as an SVG data URI, whose IDs cannot clash with the page's."""
    return (
        "data:image/svg+xml;base64," + base64.b64encode(plots.to_svg(figure)).decode()
    )


def _number(value: float | None) -> float:
    """Return the value, NaN for ``None``."""
    return NAN if value is None else value
