"""Curves by round: accuracy, training loss, and other values of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from flower_fgl.runs.plots.style import (
    PALETTE,
    add_legend,
    dashed_look,
    dress,
    line_of,
    look_of,
    mark_selected,
    new_figure,
)

__all__ = ["Curve", "by_round", "column_curves", "convergence"]


@dataclass(frozen=True)
class Curve:
    """Accuracies and losses of one run by round, for :func:`convergence`.

    Parameters
    ----------
    label : str
        Name of the run.
    rounds : sequence of int
        Evaluated rounds.
    val, test : sequence of float in [0, 1]
        Pooled accuracies in these rounds; NaN without nodes.
    loss_rounds : sequence of int
        Rounds with a training loss.
    loss : sequence of float
        Training losses in these rounds.
    best_round : int or None
        Round with the best validation accuracy.
    columns : mapping of str to sequence of float in [0, 1]
        Accuracies in ``rounds`` by column title, for :func:`column_curves`.
    """

    label: str
    rounds: Sequence[int]
    val: Sequence[float]
    test: Sequence[float]
    loss_rounds: Sequence[int]
    loss: Sequence[float]
    best_round: int | None
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def is_validated(self) -> bool:
        """Whether there is any validation accuracy."""
        return any(math.isfinite(value) for value in self.val)


def convergence(curves: Sequence[Curve]) -> Figure:
    """Draw accuracy and training loss by round.

    Parameters
    ----------
    curves : sequence of Curve
        Of one run, validation and test accuracy share a panel. For several runs, each
        score has its own panel.
    """
    is_single = len(curves) == 1
    columns = 3 if is_single else min(3, len(curves))
    legend_rows = 0 if is_single else -(-len(curves) // columns)
    figure = new_figure(3.1 + 0.22 * legend_rows)
    panels = (
        figure.subplots(1, 2, width_ratios=(3, 2))
        if is_single
        else (figure.subplots(1, 3))
    )
    titles = ["Accuracy"] if is_single else ["Validation accuracy", "Test accuracy"]
    for panel, title in zip(panels, [*titles, "Training loss"], strict=True):
        dress(panel, xlabel="round", title=title)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        panel.set_xlim(0, 1.02 * max([2, *(r for c in curves for r in c.loss_rounds)]))
    for panel in panels[:-1]:
        panel.yaxis.set_major_formatter(PercentFormatter(1))
    if is_single:
        _draw_one(panels, curves[0])
        return figure
    lines = []
    for number, curve in enumerate(curves):
        look = look_of(number)
        lines += panels[0].plot(
            curve.rounds, curve.val, **line_of(curve.rounds), **look
        )
        panels[1].plot(curve.rounds, curve.test, **line_of(curve.rounds), **look)
        panels[2].plot(
            curve.loss_rounds, curve.loss, **line_of(curve.loss_rounds), **look
        )
    if not any(curve.is_validated for curve in curves):
        panels[0].set_yticks([])
        panels[0].text(
            0.5,
            0.5,
            "no validation data",
            transform=panels[0].transAxes,
            ha="center",
        )
    add_legend(
        figure, lines, [c.label for c in curves], "outside lower center", columns
    )
    return figure


def _draw_one(panels: Any, curve: Curve) -> None:
    """Draw the accuracies and the loss of a single run."""
    accuracy, loss = panels
    shown = {"validation": (curve.val, PALETTE[0])} if curve.is_validated else {}
    shown["test"] = (curve.test, PALETTE[5])
    lines, names = [], list(shown)
    for values, color in shown.values():
        lines += accuracy.plot(
            curve.rounds, values, color=color, **line_of(curve.rounds)
        )
    if curve.best_round is not None:
        lines.append(mark_selected(accuracy, curve.best_round))
        names.append(f"selected: round {curve.best_round}")
    add_legend(accuracy, lines, names, "lower right", 3, bbox_to_anchor=(1.01, 0.985))
    loss.plot(
        curve.loss_rounds, curve.loss, color=PALETTE[2], **line_of(curve.loss_rounds)
    )
    loss.set_ylim(bottom=0)


def by_round(
    curves: Sequence[tuple[str, Sequence[int], Sequence[float]]], *, ylabel: str
) -> Figure:
    """Draw a value by round.

    Parameters
    ----------
    curves : sequence of (str, sequence of int, sequence of float)
        Name, rounds and values of each run.
    ylabel : str
        Name of the value.
    """
    columns = min(3, len(curves))
    legend_rows = -(-len(curves) // columns) if len(curves) > 1 else 0
    figure = new_figure(2.7 + 0.22 * legend_rows)
    panel = figure.subplots()
    dress(panel, xlabel="round", ylabel=ylabel)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    lines = []
    for number, (_, rounds, values) in enumerate(curves):
        lines += panel.plot(rounds, values, **line_of(rounds), **look_of(number))
    panel.set_ylim(bottom=0)
    if len(curves) > 1:
        names = [name for name, _, _ in curves]
        add_legend(figure, lines, names, "outside lower center", columns)
    return figure


def column_curves(curves: Sequence[Curve]) -> Figure:
    """Draw accuracy by round for each node set that a setting scores.

    Parameters
    ----------
    curves : sequence of Curve
        Of one run, all columns share a panel. For several runs, each column has a panel.

    Returns
    -------
    matplotlib.figure.Figure
        Columns without values are marked "(no nodes)".
    """
    titles = list(dict.fromkeys(title for curve in curves for title in curve.columns))
    drawn = {
        title: [(c.rounds, c.columns.get(title, _absent(c))) for c in curves]
        for title in titles
    }
    drawn = {
        title if _has_number(lines) else f"{title} (no nodes)": lines
        for title, lines in drawn.items()
    }
    if len(curves) == 1:
        names, look = list(drawn), dashed_look
        layout = {"Accuracy": [lines[0] for lines in drawn.values()]}
    else:
        names, look, layout = [curve.label for curve in curves], look_of, drawn
    selected = curves[0].best_round if len(curves) == 1 else None
    columns = min(5 if len(curves) == 1 else 3, len(names) + (selected is not None))
    figure = new_figure(3.1 + 0.22 * -(-len(names) // columns))
    panels = figure.subplots(1, len(layout), sharey=True, squeeze=False)[0]
    last = max([2, *(number for curve in curves for number in curve.rounds)])
    for panel, (title, shown) in zip(panels, layout.items(), strict=True):
        dress(panel, xlabel="round", title=title)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        panel.set_xlim(0, 1.02 * last)
        panel.yaxis.set_major_formatter(PercentFormatter(1))
        lines = [
            panel.plot(rounds, values, **line_of(rounds), **look(number))[0]
            for number, (rounds, values) in enumerate(shown)
        ]
    if selected is not None:
        lines.append(mark_selected(panels[0], selected))
        names = [*names, f"selected: round {selected}"]
    add_legend(figure, lines, names, "outside lower center", columns)
    return figure


def _has_number(lines: Sequence[tuple[Sequence[int], Sequence[float]]]) -> bool:
    """Return whether any line has a value other than NaN."""
    return any(not math.isnan(value) for _, values in lines for value in values)


def _absent(curve: Curve) -> list[float]:
    """Return NaN for each round of a curve that lacks a column."""
    return [float("nan")] * len(curve.rounds)
