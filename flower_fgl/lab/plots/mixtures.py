"""Figure of the personalized averages: the weight of each client in each mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from flower_fgl.lab.plots.clients import HEAT
from flower_fgl.lab.plots.style import (
    CELL_INK,
    INK,
    MUTED,
    client_ticks,
    dress,
    is_narrow,
    new_figure,
)

__all__ = ["mixture_heat_map"]

MANY, MOST_LINES = 20, 100
"""Clients up to which cells show their number, and up to which lines separate them."""
MANY_NARROW = 7
"""Clients up to which cells show their number on phones."""


def mixture_heat_map(weights: Any, partition_ids: Sequence[int | str]) -> Figure:
    """Draw the weight of each client's model in the mixture that each client receives.

    Row i of ``weights``, of shape (K, K) and in [0, 1], is the mixture of client i; the
    colours have the same scale in all figures. Texts among ``partition_ids`` are names
    of owners.
    """
    table = np.asarray(weights, dtype=float)
    number = len(partition_ids)
    if table.shape != (number, number):
        raise ValueError(
            f"weights must be (clients, clients) = ({number}, {number}), got shape "
            f"{table.shape}."
        )
    figure = new_figure(min(9.0, 1.1 + 0.27 * max(number, 4)))
    panel = figure.subplots()
    dress(panel, xlabel="model of client", ylabel="mixture for client", grid="")
    norm = PowerNorm(0.5, vmin=0, vmax=1)  # square root: equal weights are small
    image = panel.imshow(
        table, aspect="auto", interpolation="nearest", cmap=HEAT, norm=norm
    )
    if number <= (MANY_NARROW if is_narrow() else MANY):
        for (y, x), value in np.ndenumerate(table):
            colour = "#fffffe" if value > 0.4 else CELL_INK  # not the page's
            text = f"{value:.2f}"
            panel.text(x, y, text, ha="center", va="center", fontsize=8, color=colour)
    client_ticks(panel, partition_ids)
    step = -(-number // 30)
    shown = range(0, number, step)
    panel.set_yticks(
        list(shown),
        labels=[str(partition_ids[place]) for place in shown],
        parse_math=False,
        fontsize=8.5,
    )
    if number <= MOST_LINES:
        panel.set_xticks(np.arange(number + 1) - 0.5, minor=True)
        panel.set_yticks(np.arange(number + 1) - 0.5, minor=True)
        panel.grid(which="minor", color="white", linewidth=1.2)
    panel.tick_params(which="minor", length=0)
    panel.spines[:].set_visible(False)
    bar = figure.colorbar(
        image, ax=panel, pad=0.015, fraction=0.03, aspect=24, anchor=(0, 1)
    )
    bar.set_label("weight", color=INK, fontsize=9)
    bar.set_ticks([0, 0.1, 0.25, 0.5, 1], labels=["0", "0.1", "0.25", "0.5", "1"])
    bar.ax.tick_params(labelsize=8.5, colors=MUTED, length=0)
    bar.outline.set_visible(False)
    return figure
