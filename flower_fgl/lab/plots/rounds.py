"""Curves by round, by cost and by the value of a setting."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flower_fgl.lab.plots.style import (
    PALETTE,
    add_legend,
    dashed_look,
    draw_line,
    dress,
    first_upper,
    is_narrow,
    legend_below,
    line_of,
    look_of,
    mark_selected,
    panel_grid,
    show_percent,
)
from flower_fgl.lab.units import scale_bytes
from flower_fgl.runs.files import grouped

__all__ = ["Curve", "by_cost", "by_round", "by_value", "column_curves", "convergence"]

WIDE = 20
"""Ratio of the largest to the smallest total cost above which an axis is logarithmic."""


@dataclass(frozen=True)
class Curve:
    """A score, the losses and other numbers of one run by round.

    ``val`` and ``test`` are pooled scores in the evaluated ``rounds``, NaN without
    nodes; ``columns`` those of other node sets by title; the spreads are standard
    deviations over the averaged runs. ``bytes`` (sent by all) and ``seconds`` count
    from the start to each of ``rounds``. ``distance`` is the mean one between uploaded
    encoders. ``panel`` is the dataset, if a figure shows several.
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
    distance_rounds: Sequence[int] = ()
    distance: Sequence[float] = ()
    look: Mapping[str, Any] = field(default_factory=dict)
    score: str = "accuracy"
    is_percent: bool = True
    panel: str = ""

    @property
    def is_validated(self) -> bool:
        """Whether there is any validation score."""
        return any(math.isfinite(value) for value in self.val)


def convergence(curves: Sequence[Curve], *, has_loss: bool = True) -> Figure:
    """Draw a score and the training loss by round.

    Of one run, validation and test scores share a panel; a band is one standard
    deviation wide on each side. Losses of different objectives cannot be compared.
    """
    is_single = len(curves) == 1
    groups, looks = grouped(curves, lambda curve: curve.panel), _looks(curves)
    score = curves[0].score
    titles = [first_upper(score)]
    if not is_single:
        titles = [f"{column} {score}" for column in ("Validation", "Test")]
    titles += ["Training loss"] if is_single or has_loss else []
    figure, grid, columns = panel_grid(
        len(titles),
        list(looks),
        (2.4, 0.7),
        groups=len(groups),
        has_legend=not is_single,
        width_ratios=(3, 2) if is_single and not is_narrow() else None,
    )
    lines: dict[str, Any] = {}
    for (name, group), panels in zip(groups.items(), grid, strict=True):
        for panel, title in zip(panels, titles, strict=True):
            dress(panel, xlabel="round", title=f"{title}, {name}" if name else title)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
            panel.set_xlim(0, 1.02 * _last_round(curves))
            if curves[0].is_percent and title != "Training loss":
                show_percent(panel.yaxis)
        if is_single:
            _draw_one(panels, curves[0])
            return figure
        for curve in group:
            look = _drawn(curve, looks)
            x = curve.rounds
            lines[curve.label] = _line(panels[0], x, curve.val, curve.val_spread, look)
            _line(panels[1], x, curve.test, curve.test_spread, look)
            if has_loss:
                draw_line(panels[2], curve.loss_rounds, curve.loss, look)
        if not any(curve.is_validated for curve in group):
            panels[0].set_yticks([])
            place = {"transform": panels[0].transAxes, "ha": "center"}
            panels[0].text(0.5, 0.5, "no validation data", **place)
    legend_below(figure, lines, columns)
    return figure


def by_cost(curves: Sequence[Curve]) -> Figure:
    """Draw the test score by bytes and seconds; far apart, the axes are logarithmic."""
    groups, looks = grouped(curves, lambda curve: curve.panel), _looks(curves)
    figure, grid, columns = panel_grid(
        2,
        list(looks),
        (2.4, 0.5),
        groups=len(groups),
        has_legend=len(curves) > 1,
        sharey="row" if len(groups) > 1 else "all",
    )
    factor, unit = scale_bytes(max((c.bytes[-1] for c in curves if c.bytes), default=0))
    lines: dict[str, Any] = {}
    for (name, group), panels in zip(groups.items(), grid, strict=True):
        sent = [[b / factor for b in c.bytes] for c in group]
        axes = (
            ("bytes", f"{unit} sent by all", sent),
            ("seconds", "seconds", [list(c.seconds) for c in group]),
        )
        for panel, (cost, xlabel, places) in zip(panels, axes, strict=True):
            title = f"Test {curves[0].score} by {cost}"
            dress(panel, xlabel=xlabel, title=f"{title}, {name}" if name else title)
            ends = [x[-1] for x in places if x and x[-1] > 0]
            if len(ends) > 1 and max(ends) > WIDE * min(ends):
                panel.set_xscale("log")
                panel.xaxis.set_major_formatter("{x:g}")
            for curve, x in zip(group, places, strict=True):
                look = _drawn(curve, looks)
                drawn = _line(panel, x, curve.test, curve.test_spread, look)
                lines[curve.label] = drawn
            if curves[0].is_percent:
                show_percent(panel.yaxis)
    if len(curves) > 1:
        legend_below(figure, lines, columns)
    return figure


def _looks(curves: Sequence[Curve]) -> dict[str, Mapping[str, Any]]:
    """Return the style of each name, its own or that of its number."""
    own = {curve.label: curve.look for curve in curves}
    return {name: look or look_of(n) for n, (name, look) in enumerate(own.items())}


def _drawn(curve: Curve, looks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the style in which a curve is drawn."""
    base = line_of(curve.rounds)
    if len(curve.rounds) > 2:  # markers tell the lines of one method apart
        base.pop("marker", None)
    return {**base, **looks[curve.label]}


def _line(
    panel: Any,
    x: Sequence[float],
    y: Sequence[float],
    spread: Sequence[float],
    look: Mapping[str, Any],
) -> Any:
    """Draw a line, with the band of one standard deviation around a mean."""
    if spread:
        middle, width = np.asarray(y, dtype=float), np.asarray(spread, dtype=float)
        band = {"color": look["color"], "alpha": 0.16, "linewidth": 0}
        panel.fill_between(x, middle - width, middle + width, **band)
    return draw_line(panel, x, y, look)


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


def by_round(curves: Sequence[Curve]) -> Figure:
    """Draw the mean distance between uploaded encoders by round."""
    groups, looks = grouped(curves, lambda curve: curve.panel), _looks(curves)
    has_legend = len(looks) > 1
    figure, grid, columns = panel_grid(
        len(groups), list(looks), (2.7, 0), has_legend=has_legend
    )
    lines: dict[str, Any] = {}
    for panel, (title, group) in zip(grid[0], groups.items(), strict=True):
        dress(panel, xlabel="round", ylabel="mean distance", title=title)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
        for curve in group:
            x = curve.distance_rounds
            look = {**line_of(x), **looks[curve.label]}
            lines[curve.label] = draw_line(panel, x, curve.distance, look)
        panel.set_ylim(bottom=0)
    if has_legend:
        legend_below(figure, lines, columns)
    return figure


def column_curves(curves: Sequence[Curve]) -> Figure:
    """Draw the score by round for each node set that a setting scores.

    Of one run, all columns share a panel. For several runs, each column has a panel.
    """
    titles = list(dict.fromkeys(title for curve in curves for title in curve.columns))
    layout: dict[str, list[tuple[Curve, Sequence[float], Mapping[str, Any]]]] = {}
    looks = _looks(curves)
    for panel, group in grouped(curves, lambda curve: curve.panel).items():
        for number, title in enumerate(titles):
            found = [
                (c, c.columns.get(title, [math.nan] * len(c.rounds))) for c in group
            ]
            has_number = any(not math.isnan(v) for _, values in found for v in values)
            name = title if has_number else f"{title} (no nodes)"
            if len(curves) == 1:  # all columns share a panel
                shown = layout.setdefault(first_upper(curves[0].score), [])
                shown += [(c, values, dashed_look(number)) for c, values in found]
                titles[number] = name
            else:
                layout[f"{name}, {panel}" if panel else name] = [
                    (c, values, looks[c.label]) for c, values in found
                ]
    names = titles if len(curves) == 1 else list(looks)
    selected = curves[0].best_round if len(curves) == 1 else None
    shown_names = names if selected is None else [*names, f"selected: round {selected}"]
    most = 5 if len(curves) == 1 else 3
    figure, grid, columns = panel_grid(
        len(layout), shown_names, (2.5, 0.6), most=most, sharey=True
    )
    last = _last_round(curves)
    lines: dict[str, Any] = {}
    for axes, (title, shown) in zip(grid[0], layout.items(), strict=True):
        dress(axes, xlabel="round", title=title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axes.set_xlim(0, 1.02 * last)
        if curves[0].is_percent:
            show_percent(axes.yaxis)
        for number, (curve, values, look) in enumerate(shown):
            name = names[number] if len(curves) == 1 else curve.label
            style = {**line_of(curve.rounds), **look}
            lines[name] = draw_line(axes, curve.rounds, values, style)
    drawn = {name: lines[name] for name in names}
    if selected is not None:
        drawn[shown_names[-1]] = mark_selected(grid[0, 0], selected)
    legend_below(figure, drawn, columns)
    return figure


MARKERS = "os^D"
"""Markers that distinguish lines of the same colour."""


def by_value(
    values: Sequence[float],
    panels: Mapping[str, Sequence[tuple[str, Sequence[float | None], Sequence[float]]]],
    *,
    xlabel: str,
    plain: Collection[str] = (),
    looks: Sequence[Mapping[str, Any]] = (),
) -> Figure:
    """Draw scores by the value of a setting, with error bars of one standard deviation.

    Each panel has, by its title, the name of each line and its means and standard
    deviations at the ascending ``values``. Panels with the titles ``plain`` are in
    units, not percent.
    """
    names = [name for name, _, _ in next(iter(panels.values()))]
    figure, grid, columns = panel_grid(len(panels), names, (2.5, 0.6))
    lines = []
    for panel, (title, scores) in zip(grid[0], panels.items(), strict=True):
        dress(panel, xlabel=xlabel, title=title)
        panel.set_xticks(range(len(values)), labels=[f"{value:g}" for value in values])
        if title not in plain:
            show_percent(panel.yaxis)
        lines = [
            panel.errorbar(
                range(len(values)),
                np.asarray(means, dtype=float),
                yerr=deviations,
                linewidth=1.6,
                elinewidth=0.9,
                capsize=2,
                **{
                    "marker": MARKERS[number // len(PALETTE) % len(MARKERS)],
                    **(looks[number] if looks else look_of(number)),
                    "markersize": 3.5,
                    "markevery": 1,
                },
            ).lines[0]
            for number, (_, means, deviations) in enumerate(scores)
        ]
    legend_below(figure, dict(zip(names, lines, strict=True)), columns)
    return figure
