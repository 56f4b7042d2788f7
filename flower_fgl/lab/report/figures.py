"""Figures of the report, drawn from run folders."""

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

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

Pictures = dict[str, Figure]
"""Figures by their name in the template; those without content are omitted."""


def draw_run(run: RunFolder) -> Pictures:
    """Draw all figures of one run, finished or not."""
    score = numbers.shown_score([run])
    pictures = _by_line([Line("", [run])], score)
    owners = run.owner_names
    if scores := numbers.client_scores(run, score):
        pictures["clients"] = plots.client_bars(
            [owners.get(pid, pid) for pid in scores],
            list(scores.values()),
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
    return pictures


def draw_runs(lines: Sequence[Line]) -> Pictures:
    """Draw all figures that compare several runs; lines of several runs are averaged."""
    runs = [run for line in lines for run in line.runs]
    score = numbers.shown_score(runs)
    pictures = _by_line(lines, score, has_loss=has_one_objective(runs))
    per_client = [
        [v for run in line.runs for v in numbers.client_scores(run, score).values()]
        for line in lines
    ]
    if any(per_client):
        pictures["clients"] = plots.client_spread(
            [line.name for line in lines],
            per_client,
            [_mean_score(line.runs, score) for line in lines],
            [line.look["color"] for line in lines],
            [line.panel for line in lines],
            score=common_scale(score, runs).title,
            is_percent=not ScoreScale(score).kind.has_units,
        )
    return pictures


def draw_sweeps(sweeps: Sequence[Sweep], methods: Sequence[str] = ()) -> Pictures:
    """Draw the scores of each sweep by the value of its setting: ``setting-<key>``.

    ``methods`` are those of the page, which give the lines their colours.
    """
    pictures = {}
    for sweep in sweeps:
        titles = {f"Test {name}": metric for metric, name in sweep.metrics.items()}
        values = sweep.values
        panels = {}
        for title, metric in titles.items():
            found = {n: [sweep.at(n, v, metric) for v in values] for n in sweep.lines}
            panels[title] = [
                (
                    name,
                    [fmean(scores) if scores else None for scores in each],
                    [stdev(scores) if len(scores) > 1 else 0.0 for scores in each],
                )
                for name, each in found.items()
            ]
        looks = looks_of(list(sweep.lines.values()), methods)
        pictures[f"setting-{sweep.key}"] = plots.by_value(
            values,
            panels,
            xlabel=sweep.key,
            plain=[t for t, m in titles.items() if ScoreScale(m).kind.has_units],
            looks=looks,
        )
    return pictures


def _by_line(lines: Sequence[Line], score: str, *, has_loss: bool = True) -> Pictures:
    """Draw the figures with a line or a bar for each line; those without are omitted."""
    curves = [_curve(line, score) for line in lines]
    pictures = {}
    if any(curve.rounds or curve.loss_rounds for curve in curves):
        pictures["convergence"] = plots.convergence(curves, has_loss=has_loss)
    if any(len(curve.rounds) > 1 for curve in curves):
        pictures["cost"] = plots.by_cost([curve for curve in curves if curve.rounds])
    if measured := [curve for curve in curves if curve.distance_rounds]:
        pictures["distance"] = plots.by_round(measured)
    settings: dict[str, list[plots.Curve]] = {}  # those with node sets of their own
    for line, curve in zip(lines, curves, strict=True):
        if curve.columns and curve.rounds:
            settings.setdefault(numbers.setting_of(line.runs[0]), []).append(curve)
    for setting, group in settings.items():
        pictures[f"columns-{setting}"] = plots.column_curves(group)
    return pictures | _costs(lines)


def _costs(lines: Sequence[Line]) -> Pictures:
    """Draw bytes by payload and seconds by phase of a run, if there are any."""
    out = {}
    ways = {"up": "↑", "down": "↓"}
    labels = [line.label for line in lines]
    sent = _mean_parts(
        [run.summary["bytes"]["by_payload"][way] for run in line.runs]
        for line in lines
        for way in ways
    )
    names = [f"{n} {arrow}" for n in plots.distinct(labels) for arrow in ways.values()]
    if len(lines) == 1:
        names = ["to server", "to clients"]
    if total := sent.sum(axis=1).max():
        factor, unit = plots.scale_bytes(total)
        out["bytes"] = plots.stacked_bars(names, (sent / factor).to_dict("list"), unit)
    spent = _mean_parts(
        [run.summary["seconds"]["by_phase"] for run in line.runs] for line in lines
    )
    if spent.to_numpy().any():
        rows = [label or "all rounds" for label in labels]
        out["seconds"] = plots.stacked_bars(rows, spent.to_dict("list"), "s")
    return out


def _mean_parts(bars: Iterable[Sequence[Mapping[str, float]]]) -> pd.DataFrame:
    """Return a row for each bar: the mean of each part over the runs of the bar."""
    means = [pd.DataFrame(runs, dtype=float).fillna(0).mean() for runs in bars]
    return pd.DataFrame(means).fillna(0)


def _mean_score(runs: Sequence[RunFolder], score: str) -> float | None:
    values = [numbers.pooled_test_score(run, score) for run in runs]
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _curve(line: Line, score: str) -> plots.Curve:
    """Average scores, losses and distances by round over the runs of a line."""
    first, is_single = line.runs[0], len(line.runs) == 1
    every = [set(numbers.own_columns_of([run])) for run in line.runs]
    own = [c for c in numbers.own_columns_of([first]) if all(c in one for one in every)]
    tables = [_rounds_of(run, ["val", "test", *own], score) for run in line.runs]
    averages = map(_over_runs, zip(*tables, strict=True))
    (mean, spread), (loss, _), (apart, _) = averages
    lists = mean.to_dict("list")
    return plots.Curve(
        label=line.name,
        rounds=mean.index.tolist(),
        loss_rounds=loss.index.tolist(),
        loss=loss["loss"].tolist(),
        distance_rounds=apart.index.tolist(),
        distance=apart["distance"].tolist(),
        best_round=first.best["round"] if is_single and first.best else None,
        columns={
            "seen graph"
            if name == "test" and "unseen" in own
            else numbers.column_name(name): lists[name]
            for name in (("test", *own) if own else ())
        },
        val_spread=() if is_single else spread["val"].tolist(),
        test_spread=() if is_single else spread["test"].tolist(),
        look=line.look,
        score=first.scale_of(score).title,
        is_percent=not first.scale_of(score).kind.has_units,
        panel=line.panel,
        **{name: lists[name] for name in ("val", "test", "bytes", "seconds")},
    )


def _rounds_of(
    run: RunFolder, columns: Sequence[str], score: str
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return a score by node set, with the bytes and seconds since the start.

    Further tables are the losses and the distances. Each has a row for each round that
    has them.
    """
    scope = main_scope(run.rounds)
    scored, losses, distances = {}, {}, {}
    sent, spent = 0, 0.0
    for row in run.rounds:
        sent += sum(sum(way.values()) for way in row.get("bytes", {}).values())
        spent += row.get("seconds", {}).get("total") or 0.0
        if is_scored(row) and (found := row["metrics"].get(scope)):
            scores = [found.get(name, {}).get(score) for name in columns]
            scored[row["round"]] = [*scores, sent, spent]
        if row.get("phase") == "train" and row.get("loss") is not None:
            losses[row["round"]] = [row["loss"]]
        if "distance" in row.get("numbers", {}):
            distances[row["round"]] = [row["numbers"]["distance"]]
    titles = [*columns, "bytes", "seconds"]
    return (
        pd.DataFrame.from_dict(scored, "index", float, titles),
        pd.DataFrame.from_dict(losses, "index", float, ["loss"]),
        pd.DataFrame.from_dict(distances, "index", float, ["distance"]),
    )


def _over_runs(runs: Sequence[pd.DataFrame]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return means and standard deviations by round, of the rounds that all runs have."""
    if len(runs) == 1:
        return runs[0], runs[0]
    rounds = pd.concat(runs).replace([math.inf, -math.inf], math.nan).groupby(level=0)
    is_whole = rounds.size() == len(runs)
    return rounds.mean()[is_whole], rounds.std()[is_whole]


def to_data_uri(figure: Figure) -> str:
    """Return a figure as an SVG data URI, whose IDs cannot clash with the page's."""
    return (
        "data:image/svg+xml;base64," + base64.b64encode(plots.to_svg(figure)).decode()
    )
