"""Scores by the value of a setting."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from flower_fgl.lab.plots.style import (
    PALETTE,
    dress,
    legend_below,
    look_of,
    panel_grid,
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
    legend_below(figure, dict(zip(names, lines, strict=True)), columns)
    return figure
