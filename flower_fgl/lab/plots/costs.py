"""Bar charts of bytes and seconds, split into parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from flower_fgl.lab.plots.style import (
    INK,
    PALETTE,
    add_legend,
    dress,
    legend_columns,
    name_rows,
    new_figure,
)
from flower_fgl.lab.units import scale_bytes

__all__ = ["scale_bytes", "stacked_bars"]


def stacked_bars(
    rows: Sequence[str], parts: Mapping[str, Sequence[float]], unit: str
) -> Figure:
    """Draw one horizontal bar per row, split into named parts, one value per row each."""
    columns = legend_columns(list(parts), 6)
    legend_rows = -(-len(parts) // columns)
    figure = new_figure(0.75 + 0.36 * len(rows) + 0.22 * legend_rows)
    panel = figure.subplots()
    dress(panel, xlabel="seconds" if unit == "s" else unit, grid="x")
    left = np.zeros(len(rows))
    bars = []
    for number, values in enumerate(parts.values()):
        colour = PALETTE[number % len(PALETTE)]
        hatch = "////" if number >= len(PALETTE) else None
        bars.append(
            panel.barh(
                np.arange(len(rows)),
                values,
                left=left,
                height=0.62,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.8,
                zorder=2,
            )
        )
        left = left + np.asarray(values, dtype=float)
    for row, total in enumerate(left):
        panel.annotate(
            f"{total:{'.3g' if total < 1000 else '.0f'}} {unit}",
            (total, row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=INK,
        )
    panel.set_xlim(0, 1.13 * max(left.max(initial=0), 1e-12))
    name_rows(panel, rows)
    add_legend(figure, bars, list(parts), "outside lower center", columns)
    return figure
