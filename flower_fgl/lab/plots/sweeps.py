"""Scores by the value of a setting."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from flower_fgl.lab.plots.style import (
    PALETTE,
    add_legend,
    dress,
    grid_of,
    legend_columns,
    look_of,
    new_figure,
    show_percent,
)

__all__ = ["by_value"]

MARKERS = "os^D"
"""Markers that distinguish lines of the same colour."""


def by_value(
    values: Sequence[float],
    panels: Mapping[str, Sequence[tuple[str, Sequence[float], Sequence[float]]]],
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
    columns = legend_columns(names, 3)
    rows, across = grid_of(len(panels))
    figure = new_figure(2.5 * rows + 0.6 + 0.22 * -(-len(names) // columns))
    drawn = figure.subplots(rows, across, squeeze=False).flatten()
    lines = []
    for panel, (title, scores) in zip(drawn, panels.items(), strict=True):
        dress(panel, xlabel=xlabel, title=title)
        panel.set_xticks(range(len(values)), labels=[f"{value:g}" for value in values])
        if title not in plain:
            show_percent(panel.yaxis)
        lines = [
            panel.errorbar(
                range(len(values)),
                means,
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
    add_legend(figure, lines, names, "outside lower center", columns)
    return figure
