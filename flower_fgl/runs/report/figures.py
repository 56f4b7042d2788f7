"""Figures of the report: images, as data URIs, drawn from run folders."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from matplotlib.figure import Figure

from flower_fgl.runs import plots
from flower_fgl.runs.report.numbers import (
    client_accuracy,
    column_name,
    item_kind,
    own_columns_of,
    scope_of,
    setting_of,
    test_accuracy,
)
from flower_fgl.runs.report.sweeps import Sweep
from flower_fgl.runs.run import Run
from flower_fgl.runs.summary import is_scored

__all__ = ["draw_run", "draw_runs", "draw_sweeps", "to_data_uri"]

NAN = float("nan")
Lines = Sequence[tuple[str, Sequence[Run]]]
"""Lines to draw: the name of each, and the runs of which it is the mean."""


def draw_run(run: Run) -> dict[str, str]:
    """Draw all figures of one run.

    Parameters
    ----------
    run : Run
        Run, finished or not. Figures without content are omitted.

    Returns
    -------
    dict of str to str
        Images as data URIs, by their name in the template.
    """
    lines = [("", [run])]
    curves = [_curve(run, "")]
    pictures = _progress(curves) | _columns(lines, curves) | _distances(lines)
    if accuracy := client_accuracy(run):
        values = [_number(value) for value in accuracy.values()]
        figure = plots.client_bars(
            list(accuracy), values, test_accuracy(run), items=item_kind([run])
        )
        pictures["clients"] = to_data_uri(figure)
    counted = [r for r in run.clients if r.get("class_counts")]
    if counted:
        counted.sort(key=lambda row: int(row["partition_id"]))
        counts = [row["class_counts"] for row in counted]
        numbers = [str(c) for c in range(len(counts[0]))]
        names = counted[0].get("class_names") or run.summary.get("class_names")
        ids = [row["partition_id"] for row in counted]
        pictures["labels"] = to_data_uri(
            plots.label_heat_map(counts, names or numbers, ids, items=item_kind([run]))
        )
    return pictures | _costs([run], [""])


def draw_runs(
    runs: Sequence[Run], labels: Sequence[str], lines: Lines
) -> dict[str, str]:
    """Draw all figures that compare several runs.

    Parameters
    ----------
    runs : sequence of Run
        Length R, at least 2.
    labels : sequence of str
        Length R: names of the runs.
    lines : sequence of (str, sequence of Run)
        Name and runs of each curve; curves of several runs are averaged by round.

    Returns
    -------
    dict of str to str
        Images as data URIs, by their name in the template.
    """
    curves = [
        _mean_curve(label, [_curve(run, label) for run in members])
        for label, members in lines
    ]
    per_client = [
        [_number(value) for value in client_accuracy(run).values()] for run in runs
    ]
    pictures = _progress(curves) | _columns(lines, curves) | _distances(lines)
    if any(per_client):
        pooled = [test_accuracy(run) for run in runs]
        pictures["clients"] = to_data_uri(
            plots.client_spread(labels, per_client, pooled)
        )
    return pictures | _costs(runs, labels)


def draw_sweeps(sweeps: Sequence[Sweep]) -> dict[str, str]:
    """Draw test accuracy and macro-F1 by the value of each varied setting.

    Parameters
    ----------
    sweeps : sequence of Sweep
        Settings with their values and scores; may be empty.

    Returns
    -------
    dict of str to str
        Images as data URIs, by ``setting-<key>``.
    """
    titles = {"Test accuracy": "accuracy", "Test macro-F1": "macro_f1"}
    pictures = {}
    for sweep in sweeps:
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
        figure = plots.by_value(values, panels, xlabel=sweep.key)
        pictures[f"setting-{sweep.key}"] = to_data_uri(figure)
    return pictures


def _progress(curves: Sequence[plots.Curve]) -> dict[str, str]:
    """Draw accuracy and loss by round, if there are any."""
    if not any(curve.rounds or curve.loss_rounds for curve in curves):
        return {}
    return {"convergence": to_data_uri(plots.convergence(curves))}


def _columns(lines: Lines, curves: Sequence[plots.Curve]) -> dict[str, str]:
    """Draw accuracy by node set, for each setting with additional node sets."""
    groups: dict[str, list[plots.Curve]] = {}
    for (_, runs), curve in zip(lines, curves, strict=True):
        if curve.columns and curve.rounds:
            groups.setdefault(setting_of(runs[0]), []).append(curve)
    return {
        f"columns-{setting}": to_data_uri(plots.column_curves(group))
        for setting, group in groups.items()
    }


def _distances(lines: Lines) -> dict[str, str]:
    """Draw the distance between uploaded encoders by round, if the runs have it."""
    curves = []
    for label, runs in lines:
        known = [
            {
                row["round"]: row["numbers"]["distance"]
                for row in run.rounds
                if "distance" in row.get("numbers", {})
            }
            for run in runs
        ]
        rounds = _in_all([list(one) for one in known])
        if rounds:
            means = [fmean(one[number] for one in known) for number in rounds]
            curves.append((label, rounds, means))
    if not curves:
        return {}
    return {"distance": to_data_uri(plots.by_round(curves, ylabel="mean distance"))}


def _costs(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, str]:
    """Draw bytes by payload and seconds by phase, if there are any."""
    out = {}
    ways = [("up", "to server"), ("down", "to clients")]
    sent = [run.summary["bytes"]["by_payload"][way] for run in runs for way, _ in ways]
    names = [f"{label} {text}".strip() for label in labels for _, text in ways]
    totals = [sum(part.values()) for part in sent]
    if any(totals):
        factor, unit = plots.scale_bytes(max(totals))
        out["bytes"] = to_data_uri(
            plots.stacked_bars(names, _parts(sent, factor), unit)
        )
    spent = [run.summary["seconds"]["by_phase"] for run in runs]
    if any(sum(part.values()) for part in spent):
        rows = [label or "all rounds" for label in labels]
        out["seconds"] = to_data_uri(plots.stacked_bars(rows, _parts(spent, 1.0), "s"))
    return out


def _curve(run: Run, label: str) -> plots.Curve:
    """Collect the accuracies and losses of a run by round."""
    train = [row for row in run.rounds if row.get("phase") == "train"]
    scored = [
        row
        for row in run.rounds
        if is_scored(row) and row["metrics"].get(scope_of(run))
    ]
    own = own_columns_of([run])
    columns = {
        name: [
            _number(row["metrics"][scope_of(run)].get(name, {}).get("accuracy"))
            for row in scored
        ]
        for name in ("val", "test", *own)
    }
    shown = ("test", *own) if own else ()
    has_loss = [row for row in train if row.get("loss") is not None]
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
            else column_name(name): columns[name]
            for name in shown
        },
    )


def _mean_curve(label: str, curves: Sequence[plots.Curve]) -> plots.Curve:
    """Average curves over the rounds that all of them have."""
    if len(curves) == 1:
        return curves[0]
    rounds = _in_all([curve.rounds for curve in curves])
    loss_rounds = _in_all([curve.loss_rounds for curve in curves])

    def mean(
        where: Sequence[Sequence[int]], what: Sequence[Sequence[float]], of: list[int]
    ) -> list[float]:
        tables = [
            dict(zip(x, y, strict=True)) for x, y in zip(where, what, strict=True)
        ]
        found = [[t[r] for t in tables if math.isfinite(t[r])] for r in of]
        return [fmean(values) if values else NAN for values in found]

    scored = [curve.rounds for curve in curves]
    return plots.Curve(
        label=label,
        rounds=rounds,
        val=mean(scored, [c.val for c in curves], rounds),
        test=mean(scored, [c.test for c in curves], rounds),
        loss_rounds=loss_rounds,
        loss=mean(
            [c.loss_rounds for c in curves], [c.loss for c in curves], loss_rounds
        ),
        best_round=None,
        columns={
            title: mean(scored, [c.columns[title] for c in curves], rounds)
            for title in curves[0].columns
            if all(title in curve.columns for curve in curves)
        },
    )


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
