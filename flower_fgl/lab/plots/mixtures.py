"""Figure of the personalized averages: the weight of each client in each mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from flower_fgl.lab.plots.clients import heat_map
from flower_fgl.lab.plots.style import (
    INK,
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

    Row i of ``weights``, (K, K) in [0, 1], is the mixture of client i.
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
    has_texts = number <= (MANY_NARROW if is_narrow() else MANY)
    bar = heat_map(
        panel,
        np.ma.asarray(table),
        1,
        text="{:.2f}" if has_texts else "",
        has_lines=number <= MOST_LINES,
    )
    client_ticks(panel, partition_ids)
    step = -(-number // 30)
    shown = range(0, number, step)
    panel.set_yticks(
        list(shown),
        labels=[str(partition_ids[place]) for place in shown],
        parse_math=False,
        fontsize=8.5,
    )
    bar.set_label("weight", color=INK, fontsize=9)
    bar.set_ticks([0, 0.1, 0.25, 0.5, 1], labels=["0", "0.1", "0.25", "0.5", "1"])
    return figure
