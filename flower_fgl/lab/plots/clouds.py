"""Scatter plots of each client's training, test and synthetic nodes in a plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flower_fgl.lab.plots.style import (
    MUTED,
    PALETTE,
    add_legend,
    dress,
    new_figure,
    plain,
)

__all__ = ["Cloud", "node_clouds"]

MARKS: Mapping[str, Mapping[str, Any]] = {
    "synthetic": {"marker": "+", "s": 22, "alpha": 0.6, "linewidth": 0.9},
    "test": {"marker": "o", "s": 10, "alpha": 0.5, "linewidth": 0},
    "train": {"marker": "^", "s": 46, "linewidth": 0.8, "edgecolor": "white"},
}
"""Markers of the kinds of nodes, in drawing order."""


@dataclass(frozen=True)
class Cloud:
    """Nodes of one client: coordinates (n, 2) and classes (n,) by kind, see ``MARKS``."""

    label: str
    places: Mapping[str, Any]
    classes: Mapping[str, Any]


def node_clouds(
    clouds: Sequence[Cloud], class_names: Sequence[str] | None = None
) -> Figure:
    """Draw nodes in a plane: colours show classes, markers show kinds of nodes."""
    columns = min(3, len(clouds))
    rows = -(-len(clouds) // columns)
    classes = [y for cloud in clouds for y in cloud.classes.values()]
    shown = sorted(set(np.concatenate(classes).tolist()))
    colours = {c: PALETTE[n % len(PALETTE)] for n, c in enumerate(shown)}
    figure = new_figure(0.5 + 3.2 * rows + 0.2 * (len(shown) + 3) / 5)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, cloud in zip(panels, clouds, strict=False):
        dress(panel, xlabel="", title=plain(cloud.label), grid="")
        for kind, place in cloud.places.items():
            looks = [colours[c] for c in cloud.classes[kind].tolist()]
            panel.scatter(place[:, 0], place[:, 1], color=looks, **MARKS[kind])
        panel.set_xticks([])
        panel.set_yticks([])
    for panel in panels[len(clouds) :]:
        panel.set_visible(False)
    keys = [
        Line2D([], [], color=colour, linestyle="", marker="s", markersize=7)
        for colour in colours.values()
    ]
    own = [str(c) if class_names is None else class_names[c] for c in shown]
    names = [f"class {name}" if name.isdigit() else name for name in own]
    for kind, look in MARKS.items():
        keys.append(Line2D([], [], color=MUTED, linestyle="", marker=look["marker"]))
        names.append(kind)
    add_legend(figure, keys, names, "outside lower center", 5)
    return figure
