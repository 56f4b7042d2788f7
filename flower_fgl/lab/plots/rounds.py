"""Curves by round: scores, training loss, and other values of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from flower_fgl.lab.plots.costs import scale_bytes
from flower_fgl.lab.plots.style import (
    PALETTE,
    add_legend,
    dashed_look,
    draw_line,
    dress,
    first_upper,
    grid_of,
    is_narrow,
    legend_columns,
    line_of,
    look_of,
    mark_selected,
    new_figure,
)

__all__ = ["Curve", "by_cost", "by_round", "column_curves", "convergence"]

WIDE = 20
"""Ratio of the largest to the smallest total cost above which an axis is logarithmic."""


@dataclass(frozen=True)
class Curve:
    """A score and the losses of one run by round, for :func:`convergence`.

    Parameters
    ----------
    label : str
        Name of the run.
    rounds : sequence of int
        Evaluated rounds.
    val, test : sequence of float in [0, 1]
        Pooled scores in these rounds; NaN without nodes.
    loss_rounds : sequence of int
        Rounds with a training loss.
    loss : sequence of float
        Training losses in these rounds.
    best_round : int or None
        Round with the best validation score.
    columns : mapping of str to sequence of float in [0, 1]
        Scores in ``rounds`` by column title, for :func:`column_curves`.
    val_spread, test_spread : sequence of float
        Standard deviations over the averaged runs; empty for one run.
    bytes, seconds : sequence of float
        Bytes sent by all, and seconds, from the start to each of ``rounds``.
    look : mapping of str to object
        Colour, dash and marker; by default those of the curve's number.
    score : str
        Name of the score: that by which rounds are selected.
    """

    label: str
    rounds: Sequence[int]
    val: Sequence[float]
    test: Sequence[float]
    loss_rounds: Sequence[int]
    loss: Sequence[float]
    best_round: int | None
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)
    val_spread: Sequence[float] = ()
    test_spread: Sequence[float] = ()
    bytes: Sequence[float] = ()
    seconds: Sequence[float] = ()
    look: Mapping[str, Any] = field(default_factory=dict)
    score: str = "accuracy"

    @property
    def is_validated(self) -> bool:
        """Whether there is any validation score."""
        return any(math.isfinite(value) for value in self.val)


def convergence(curves: Sequence[Curve], *, has_loss: bool = True) -> Figure:
    """Draw a score and the training loss by round.

    Parameters
    ----------
    curves : sequence of Curve
        Of one run, validation and test scores share a panel. For several runs, each
        score has its own panel. A band is one standard deviation wide on each side.
    has_loss : bool
        Whether to draw the losses; those of different objectives cannot be compared.
    """
    is_single = len(curves) == 1
    columns = legend_columns([curve.label for curve in curves], 3)
    legend_rows = 0 if is_single else -(-len(curves) // columns)
    rows, across = grid_of(2 if is_single or not has_loss else 3)
    figure = new_figure(2.4 * rows + 0.7 + 0.22 * legend_rows)
    ratios = (3, 2) if is_single and across > 1 else None
    panels = figure.subplots(rows, across, squeeze=False, width_ratios=ratios).flatten()
    score = curves[0].score
    titles = [first_upper(score)]
    if not is_single:
        titles = [f"{column} {score}" for column in ("Validation", "Test")]
    titles += ["Training loss"] if is_single or has_loss else []
    for panel, title in zip(panels, titles, strict=True):
        dress(panel, xlabel="round", title=title)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        panel.set_xlim(0, 1.02 * _last_round(curves))
    for panel in panels[: len(panels) - (is_single or has_loss)]:
        panel.yaxis.set_major_formatter(PercentFormatter(1))
    if is_single:
        _draw_one(panels, curves[0])
        return figure
    lines = []
    for number, curve in enumerate(curves):
        look = _look(curve, number)
        lines.append(draw_line(panels[0], curve.rounds, curve.val, look))
        draw_line(panels[1], curve.rounds, curve.test, look)
        _band(panels[0], curve.rounds, curve.val, curve.val_spread, look)
        _band(panels[1], curve.rounds, curve.test, curve.test_spread, look)
        if has_loss:
            draw_line(panels[2], curve.loss_rounds, curve.loss, look)
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


def by_cost(curves: Sequence[Curve]) -> Figure:
    """Draw the test score by the bytes and the seconds that it took.

    Parameters
    ----------
    curves : sequence of Curve
        With ``bytes`` and ``seconds``; the axes are logarithmic if the curves' totals
        differ more than twenty-fold.
    """
    columns = legend_columns([curve.label for curve in curves], 3)
    legend_rows = -(-len(curves) // columns) if len(curves) > 1 else 0
    rows, across = grid_of(2)
    figure = new_figure(2.4 * rows + 0.5 + 0.22 * legend_rows)
    panels = figure.subplots(rows, across, sharey=True)
    factor, unit = scale_bytes(max((c.bytes[-1] for c in curves if c.bytes), default=0))
    axes = (
        (
            "bytes",
            f"{unit} sent by all",
            [[b / factor for b in c.bytes] for c in curves],
        ),
        ("seconds", "seconds", [list(c.seconds) for c in curves]),
    )
    lines: list[Any] = []
    for panel, (cost, xlabel, places) in zip(panels, axes, strict=True):
        dress(panel, xlabel=xlabel, title=f"Test {curves[0].score} by {cost}")
        ends = [x[-1] for x in places if x and x[-1] > 0]
        if len(ends) > 1 and max(ends) > WIDE * min(ends):
            panel.set_xscale("log")
            panel.xaxis.set_major_formatter("{x:g}")
        lines = []
        for number, (curve, x) in enumerate(zip(curves, places, strict=True)):
            look = _look(curve, number)
            lines.append(draw_line(panel, x, curve.test, look))
            _band(panel, x, curve.test, curve.test_spread, look)
        panel.yaxis.set_major_formatter(PercentFormatter(1))
    if len(curves) > 1:
        names = [curve.label for curve in curves]
        add_legend(figure, lines, names, "outside lower center", columns)
    return figure


def _look(curve: Curve, number: int) -> dict[str, Any]:
    """Return the style of a curve, its own or that of its number."""
    own = curve.look or look_of(number)
    base = line_of(curve.rounds)
    if len(curve.rounds) > 2:  # markers tell the lines of one method apart
        base.pop("marker", None)
    return {**base, **own}


def _band(
    panel: Any,
    x: Sequence[float],
    middle: Sequence[float],
    spread: Sequence[float],
    look: Mapping[str, Any],
) -> None:
    """Draw the band of one standard deviation around a mean."""
    if not spread:
        return
    low = [m - s for m, s in zip(middle, spread, strict=True)]
    high = [m + s for m, s in zip(middle, spread, strict=True)]
    panel.fill_between(x, low, high, color=look["color"], alpha=0.16, linewidth=0)


def _last_round(curves: Sequence[Curve]) -> int:
    """Return the last round with a score or a loss, at least 2."""
    return max([2, *(r for c in curves for r in (*c.loss_rounds, *c.rounds))])


def _draw_one(panels: Any, curve: Curve) -> None:
    """Draw the scores and the loss of a single run."""
    score, loss = panels
    shown = {"validation": (curve.val, PALETTE[0])} if curve.is_validated else {}
    shown["test"] = (curve.test, PALETTE[5])
    lines, names = [], list(shown)
    for values, color in shown.values():
        lines += score.plot(curve.rounds, values, color=color, **line_of(curve.rounds))
    if curve.best_round is not None:
        lines.append(mark_selected(score, curve.best_round))
        names.append(f"selected: round {curve.best_round}")
    columns = 2 if is_narrow() else 3
    if is_narrow():  # the legend needs the place of the title
        score.set_title("", loc="left")
        score.set_ylabel(curve.score)
    add_legend(
        score, lines, names, "lower right", columns, bbox_to_anchor=(1.01, 0.985)
    )
    loss.plot(
        curve.loss_rounds, curve.loss, color=PALETTE[2], **line_of(curve.loss_rounds)
    )
    loss.set_ylim(bottom=0)


def by_round(
    curves: Sequence[tuple[str, Sequence[int], Sequence[float]]],
    *,
    ylabel: str,
    looks: Sequence[Mapping[str, Any]] = (),
) -> Figure:
    """Draw a value by round.

    Parameters
    ----------
    curves : sequence of (str, sequence of int, sequence of float)
        Name, rounds and values of each run.
    ylabel : str
        Name of the value.
    looks : sequence of mapping
        Colour, dash and marker of each curve; by default those of its number.
    """
    columns = legend_columns([name for name, _, _ in curves], 3)
    legend_rows = -(-len(curves) // columns) if len(curves) > 1 else 0
    figure = new_figure(2.7 + 0.22 * legend_rows)
    panel = figure.subplots()
    dress(panel, xlabel="round", ylabel=ylabel)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    lines = []
    for number, (_, rounds, values) in enumerate(curves):
        look = looks[number] if looks else look_of(number)
        lines.append(draw_line(panel, rounds, values, {**line_of(rounds), **look}))
    panel.set_ylim(bottom=0)
    if len(curves) > 1:
        names = [name for name, _, _ in curves]
        add_legend(figure, lines, names, "outside lower center", columns)
    return figure


def column_curves(curves: Sequence[Curve]) -> Figure:
    """Draw the score by round for each node set that a setting scores.

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
        names = list(drawn)
        looks: list[Mapping[str, Any]] = [
            dashed_look(number) for number in range(len(names))
        ]
        layout = {first_upper(curves[0].score): [lines[0] for lines in drawn.values()]}
    else:
        names, layout = [curve.label for curve in curves], drawn
        looks = [c.look or look_of(number) for number, c in enumerate(curves)]
    selected = curves[0].best_round if len(curves) == 1 else None
    shown_names = names if selected is None else [*names, f"selected: round {selected}"]
    columns = legend_columns(shown_names, 5 if len(curves) == 1 else 3)
    rows, across = grid_of(len(layout))
    height = 2.5 * rows + 0.6 + 0.22 * -(-len(shown_names) // columns)
    figure = new_figure(height)
    panels = figure.subplots(rows, across, sharey=True, squeeze=False).flatten()
    last = _last_round(curves)
    for panel, (title, shown) in zip(panels, layout.items(), strict=True):
        dress(panel, xlabel="round", title=title)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        panel.set_xlim(0, 1.02 * last)
        panel.yaxis.set_major_formatter(PercentFormatter(1))
        lines = [
            draw_line(panel, rounds, values, {**line_of(rounds), **look})
            for (rounds, values), look in zip(shown, looks, strict=True)
        ]
    if selected is not None:
        lines.append(mark_selected(panels[0], selected))
    add_legend(figure, lines, shown_names, "outside lower center", columns)
    return figure


def _has_number(lines: Sequence[tuple[Sequence[int], Sequence[float]]]) -> bool:
    """Return whether any line has a value other than NaN."""
    return any(not math.isnan(value) for _, values in lines for value in values)


def _absent(curve: Curve) -> list[float]:
    """Return NaN for each round of a curve that lacks a column."""
    return [float("nan")] * len(curve.rounds)
