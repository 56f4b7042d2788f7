"""Bars, dots and heat maps of clients and costs, and scatter plots of clients' nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from flower_fgl.lab.plots.style import (
    CELL_INK,
    GRID,
    INK,
    MUTED,
    PALETTE,
    add_legend,
    client_ticks,
    dress,
    is_narrow,
    legend_columns,
    look_of,
    name_rows,
    new_figure,
    plain,
    show_percent,
)
from flower_fgl.runs.files import grouped

__all__ = ["Cloud", "client_bars", "client_spread", "label_heat_map"]
__all__ += ["mixture_heat_map", "node_clouds", "owner_reliability", "reliability"]
__all__ += ["stacked_bars"]

MOST_OWNERS = 24
"""Owners whose reliability diagrams are drawn."""
HEAT = LinearSegmentedColormap.from_list("heat", ["#eef5fb", "#5ba3d0", "#08386b"])


def client_bars(
    partition_ids: Sequence[int | str],
    scores: Sequence[float | None],
    pooled: float | None,
    *,
    items: str = "nodes",
    score: str = "accuracy",
    is_percent: bool = True,
) -> Figure:
    """Draw the test score of each client of one run, ``None`` without test nodes.

    Texts among ``partition_ids`` are names of owners. ``pooled``, over the ``items`` of
    all clients, is drawn as a line.
    """
    figure = new_figure(2.7)
    panel = figure.subplots()
    dress(panel, xlabel=_client_title(partition_ids), ylabel=f"test {score}")
    place = np.arange(len(partition_ids))
    values = np.asarray(scores, dtype=float)
    width = 0.72 if len(place) <= 100 else 1.0
    panel.bar(place, np.nan_to_num(values), width=width, color="#7fb8da", zorder=2)
    top = max(np.nanmax(values, initial=0), pooled or 0) or 1.0
    top = max(top, 1.0) if is_percent else top  # nRMSE may be above 100 %
    size = 8 if len(place) <= 24 else 6.5
    for x, value in enumerate(values):
        if np.isnan(value) or len(place) <= (14 if is_narrow() else 36):
            text = f"{100 * value:.0f}" if is_percent else f"{value:.3g}"
            text = "none" if np.isnan(value) else text
            colour = CELL_INK if value > 0.08 * top else INK  # on the bar, or above it
            panel.text(x, 0.03 * top, text, ha="center", fontsize=size, color=colour)
    client_ticks(panel, partition_ids)
    panel.set_xlim(-0.7, len(place) - 0.3)
    panel.set_ylim(0, 1.06 * top)
    if is_percent:
        panel.set_yticks([0, 0.25, 0.5, 0.75, 1])
        show_percent(panel.yaxis, decimals=0)
    if pooled is not None:
        line = panel.axhline(pooled, color=PALETTE[5], linewidth=1.3, zorder=3)
        shown = f"{100 * pooled:.1f} %" if is_percent else f"{pooled:.4g}"
        name = f"all clients' test {items}: {shown}"
        add_legend(
            panel, [line], [name], "lower right", 1, bbox_to_anchor=(1.01, 0.985)
        )
    return figure


def _client_title(ids: Sequence[int | str]) -> str:
    are_names = any(isinstance(entry, str) for entry in ids)
    return "owner" if are_names else "client (partition-id)"


def client_spread(
    labels: Sequence[str],
    scores: Sequence[Sequence[float | None]],
    pooled: Sequence[float | None],
    colours: Sequence[str],
    panels: Sequence[str],
    *,
    score: str = "accuracy",
    is_percent: bool = True,
) -> Figure:
    """Draw the clients' test scores of several runs, one row of dots per run.

    ``pooled``, over the nodes of all clients, is drawn as a bar. ``panels`` names the
    dataset of each run, if there are several: each has a panel.
    """
    groups = grouped(range(len(labels)), panels.__getitem__)
    figure = new_figure(0.36 + 0.64 * len(groups) + 0.34 * len(labels))
    ratios = [1.5 + len(rows) for rows in groups.values()]
    grid = figure.subplots(
        len(groups), squeeze=False, sharex=True, height_ratios=ratios
    )
    for panel, (title, rows) in zip(grid.flatten(), groups.items(), strict=True):
        dress(panel, xlabel=f"test {score}", title=title, grid="x")
        for row, number in enumerate(rows):
            # a fixed zigzag separates equal values
            offset = 0.16 * (np.arange(len(scores[number])) % 3 - 1)
            look = {"s": 22, "color": colours[number], "alpha": 0.55, "linewidth": 0}
            values = np.asarray(scores[number], dtype=float)
            panel.scatter(values, row + offset, zorder=2, **look)
            middle = pooled[number]
            if middle is not None:
                ends = [row - 0.36, row + 0.36]
                panel.plot([middle, middle], ends, color=INK, linewidth=2, zorder=3)
        name_rows(panel, [labels[number] for number in rows])
        if is_percent:
            show_percent(panel.xaxis)
    return figure


def label_heat_map(
    counts: Any,
    class_names: Sequence[str],
    partition_ids: Sequence[int | str] | None = None,
    *,
    items: str = "nodes",
) -> Figure:
    """Draw the number of ``items`` by class and client, of ``counts`` (K, C)."""
    table = np.asarray(counts).T  # (C, K)
    num_classes, num_clients = table.shape
    figure = new_figure(min(13.0, 1.1 + 0.27 * max(num_classes, 4)))
    panel = figure.subplots()
    ids = range(num_clients) if partition_ids is None else partition_ids
    dress(panel, xlabel=_client_title(ids), grid="")
    top = max(int(table.max(initial=0)), 1)
    has_texts = num_clients <= (8 if is_narrow() else 20) and num_classes <= 40
    bar = _heat_map(
        panel,
        np.ma.masked_equal(table, 0),
        top,
        text="{:d}" if has_texts else "",
        has_lines=num_clients <= 100 and num_classes <= 80,
    )
    client_ticks(panel, ids)
    step = -(-num_classes // 60)
    panel.set_yticks(
        np.arange(0, num_classes, step),
        labels=[plain(name, 12 if is_narrow() else 34) for name in class_names[::step]],
        parse_math=False,
        fontsize=8.5 if num_classes <= 40 else 6.5,
    )
    panel.set_facecolor("#f3f5f8")
    bar.set_label(items, color=INK, fontsize=9)
    bar.ax.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    if top > 1:
        bar.ax.set_ylim(1, top)  # 0 has the colour of the background
    return figure


def _heat_map(panel: Any, table: Any, top: float, *, text: str, has_lines: bool) -> Any:
    """Draw a table of colours up to ``top``; return its colour bar.

    Masked cells stay empty; ``text`` is the format of the number in a cell.
    """
    image = panel.imshow(
        table,
        aspect="auto",
        interpolation="nearest",
        cmap=HEAT,
        norm=PowerNorm(0.5, vmin=0, vmax=top),  # square root: small values are visible
    )
    shown = np.ma.ndenumerate(table) if text else ()  # type: ignore[no-untyped-call]
    for (y, x), value in shown:
        colour = "#fffffe" if value > 0.4 * top else CELL_INK  # not the page's
        place = {"ha": "center", "va": "center", "fontsize": 8, "color": colour}
        panel.text(x, y, text.format(value), **place)
    if has_lines:
        rows, columns = table.shape
        panel.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
        panel.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
        panel.grid(which="minor", color="white", linewidth=1.2)
    panel.tick_params(which="minor", length=0)
    panel.spines[:].set_visible(False)
    bar = panel.figure.colorbar(
        image, ax=panel, pad=0.015, fraction=0.03, aspect=24, anchor=(0, 1)
    )
    bar.ax.tick_params(labelsize=8.5, colors=MUTED, length=0)
    bar.outline.set_visible(False)
    return bar


def mixture_heat_map(weights: Any, partition_ids: Sequence[int | str]) -> Figure:
    """Draw the weight of each client's model in the mixture that each client receives.

    Row i of ``weights``, (K, K) in [0, 1], is the mixture of client i.
    """
    table = np.asarray(weights, dtype=float)
    number = len(partition_ids)
    figure = new_figure(min(9.0, 1.1 + 0.27 * max(number, 4)))
    panel = figure.subplots()
    dress(panel, xlabel="model of client", ylabel="mixture for client", grid="")
    has_texts = number <= (7 if is_narrow() else 20)
    bar = _heat_map(
        panel,
        np.ma.asarray(table),
        1,
        text="{:.2f}" if has_texts else "",
        has_lines=number <= 100,
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


def reliability(diagrams: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """Draw accuracy by confidence of each diagram: a line on the diagonal is calibrated.

    A diagram (3, B) has number of items, sum of confidences and hits of each bin.
    """
    figure = new_figure(3.4)
    panel = figure.subplots()
    lines = _draw_reliability(panel, diagrams)
    add_legend(
        panel, lines, [f"{name} calibration" for name in diagrams], "upper left", 1
    )
    return figure


def owner_reliability(
    owners: Mapping[str, Mapping[str, Sequence[Sequence[float]]]],
) -> Figure:
    """Draw the diagrams of each owner by name, see :func:`reliability`, of the first 24."""
    shown = dict(list(owners.items())[:MOST_OWNERS])
    across = 1 if is_narrow() else min(len(shown), 3)
    rows = -(-len(shown) // across)
    figure = new_figure(2.6 * rows + 0.4)
    panels = figure.subplots(rows, across, squeeze=False).flatten()
    names, lines = list(next(iter(shown.values()))), []
    for panel, (name, diagrams) in zip(panels, shown.items(), strict=False):
        lines = _draw_reliability(panel, diagrams, plain(name))
    for panel in panels[len(shown) :]:
        panel.set_axis_off()
    titles = [f"{name} calibration" for name in names]
    add_legend(figure, lines, titles, "outside lower center", 2)
    return figure


def _draw_reliability(
    panel: Any, diagrams: Mapping[str, Sequence[Sequence[float]]], title: str = ""
) -> list[Any]:
    """Draw the diagonal and the line of each diagram; return these lines."""
    ylabel = "share of true predictions"
    dress(panel, xlabel="confidence", ylabel=ylabel, title=title)
    panel.plot([0, 1], [0, 1], color=GRID, linewidth=1.5, zorder=1)
    lines = []
    for number, sums in enumerate(diagrams.values()):
        count, confidence, right = np.asarray(sums, dtype=float)
        used = count > 0.5
        x, y = confidence[used] / count[used], right[used] / count[used]
        (line,) = panel.plot(x, y, marker="o", zorder=2, **look_of(number))
        lines.append(line)
    for axis in (panel.xaxis, panel.yaxis):
        show_percent(axis, decimals=0)
    return lines


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
