"""Pictures of a run: pure functions from numbers to a matplotlib Figure.

No pyplot and no global state: they can be drawn in any process or thread. Colours
are those of Okabe and Ito, which colour-blind readers can tell apart. Names that come
from data are shown as they are: no mathematics, one line, not too long.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

__all__ = [
    "PALETTE",
    "Cloud",
    "Curve",
    "by_round",
    "client_bars",
    "client_spread",
    "column_curves",
    "convergence",
    "label_heat_map",
    "node_clouds",
    "scale_bytes",
    "stacked_bars",
    "to_svg",
]

PALETTE = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#8c8c8c",
    "#b8a600",
)
INK, MUTED, GRID = "#1d2733", "#5f6b7a", "#e4e8ed"
HEAT = LinearSegmentedColormap.from_list("heat", ["#eef5fb", "#5ba3d0", "#08386b"])
WIDTH = 9.6
"""Inches; 1 inch is shown as 100 pixels."""
DASHES = ("-", "--", ":", "-.")
MARKS: Mapping[str, Mapping[str, Any]] = {
    "synthetic": {"marker": "+", "s": 22, "alpha": 0.6, "linewidth": 0.9},
    "test": {"marker": "o", "s": 10, "alpha": 0.5, "linewidth": 0},
    "train": {"marker": "^", "s": 46, "linewidth": 0.8, "edgecolor": "white"},
}
"""Looks of the kinds of nodes, from the one below to the one on top."""


@dataclass(frozen=True)
class Curve:
    """What one run contributes to :func:`convergence`.

    Parameters
    ----------
    label : str
        Name of the run.
    rounds : sequence of int
        Rounds with an evaluation.
    val, test : sequence of float in [0, 1]
        Pooled accuracies in those rounds; NaN where there are no nodes.
    loss_rounds : sequence of int
        Rounds with a training loss.
    loss : sequence of float
        Training losses in those rounds.
    best_round : int or None
        Round with the best validation accuracy.
    columns : mapping of str to sequence of float in [0, 1]
        Accuracies in ``rounds`` by title of the column, for :func:`column_curves`.
    """

    label: str
    rounds: Sequence[int]
    val: Sequence[float]
    test: Sequence[float]
    loss_rounds: Sequence[int]
    loss: Sequence[float]
    best_round: int | None
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)


def convergence(curves: Sequence[Curve]) -> Figure:
    """Draw accuracy and training loss by round.

    Parameters
    ----------
    curves : sequence of Curve
        One run: validation and test accuracy share a panel. Several: a panel each.

    Returns
    -------
    matplotlib.figure.Figure
    """
    is_single = len(curves) == 1
    columns = 3 if is_single else min(3, len(curves))
    legend_rows = 0 if is_single else -(-len(curves) // columns)
    figure = _figure(3.1 + 0.22 * legend_rows)
    panels = (
        figure.subplots(1, 2, width_ratios=(3, 2))
        if is_single
        else (figure.subplots(1, 3))
    )
    titles = ["Accuracy"] if is_single else ["Validation accuracy", "Test accuracy"]
    for panel, title in zip(panels, [*titles, "Training loss"], strict=True):
        _dress(panel, xlabel="round", title=title)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        panel.set_xlim(0, 1.02 * max([2, *(r for c in curves for r in c.loss_rounds)]))
    for panel in panels[:-1]:
        panel.yaxis.set_major_formatter(PercentFormatter(1))
    if is_single:
        _draw_one(panels, curves[0])
        return figure
    lines = []
    for number, curve in enumerate(curves):
        look = _look(number)
        lines += panels[0].plot(curve.rounds, curve.val, **_line(curve.rounds), **look)
        panels[1].plot(curve.rounds, curve.test, **_line(curve.rounds), **look)
        panels[2].plot(
            curve.loss_rounds, curve.loss, **_line(curve.loss_rounds), **look
        )
    _legend(figure, lines, [c.label for c in curves], "outside lower center", columns)
    return figure


def _draw_one(panels: Any, curve: Curve) -> None:
    accuracy, loss = panels
    lines = [
        *accuracy.plot(
            curve.rounds, curve.val, color=PALETTE[0], **_line(curve.rounds)
        ),
        *accuracy.plot(
            curve.rounds, curve.test, color=PALETTE[5], **_line(curve.rounds)
        ),
    ]
    names = ["validation", "test"]
    if curve.best_round is not None:
        lines.append(_mark_selected(accuracy, curve.best_round))
        names.append(f"selected: round {curve.best_round}")
    _legend(accuracy, lines, names, "lower right", 3, bbox_to_anchor=(1.01, 0.985))
    loss.plot(
        curve.loss_rounds, curve.loss, color=PALETTE[2], **_line(curve.loss_rounds)
    )
    loss.set_ylim(bottom=0)


def by_round(
    curves: Sequence[tuple[str, Sequence[int], Sequence[float]]], *, ylabel: str
) -> Figure:
    """Draw a number by round.

    Parameters
    ----------
    curves : sequence of (str, sequence of int, sequence of float)
        Name of the run, rounds, and the number in them; one or several runs.
    ylabel : str
        What the number is.

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure = _figure(2.7)
    panel = figure.subplots()
    _dress(panel, xlabel="round", ylabel=ylabel)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    lines = []
    for number, (_, rounds, values) in enumerate(curves):
        look: dict[str, Any] = {
            "color": PALETTE[number % len(PALETTE)],
            "linestyle": DASHES[number // len(PALETTE) % len(DASHES)],
        }
        lines += panel.plot(rounds, values, **_line(rounds), **look)
    panel.set_ylim(bottom=0)
    if len(curves) > 1:
        names = [name for name, _, _ in curves]
        _legend(figure, lines, names, "outside lower center", min(3, len(names)))
    return figure


def column_curves(curves: Sequence[Curve]) -> Figure:
    """Draw accuracy by round for every node set that a setting scores.

    Parameters
    ----------
    curves : sequence of Curve
        One run: its columns share a panel. Several: a panel for each column.

    Returns
    -------
    matplotlib.figure.Figure
    """
    titles = list(dict.fromkeys(title for curve in curves for title in curve.columns))
    if len(curves) == 1:
        names, look = titles, _dashed
        layout = {
            "Accuracy": [(curves[0].rounds, curves[0].columns[t]) for t in titles]
        }
    else:
        names, look = [curve.label for curve in curves], _look
        layout = {
            title: [(c.rounds, c.columns.get(title, _absent(c))) for c in curves]
            for title in titles
        }
    selected = curves[0].best_round if len(curves) == 1 else None
    columns = min(5 if len(curves) == 1 else 3, len(names) + (selected is not None))
    figure = _figure(3.1 + 0.22 * -(-len(names) // columns))
    panels = figure.subplots(1, len(layout), sharey=True, squeeze=False)[0]
    last = max([2, *(number for curve in curves for number in curve.rounds)])
    for panel, (title, drawn) in zip(panels, layout.items(), strict=True):
        _dress(panel, xlabel="round", title=title)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        panel.set_xlim(0, 1.02 * last)
        panel.yaxis.set_major_formatter(PercentFormatter(1))
        lines = [
            panel.plot(rounds, values, **_line(rounds), **look(number))[0]
            for number, (rounds, values) in enumerate(drawn)
        ]
    if selected is not None:
        lines.append(_mark_selected(panels[0], selected))
        names = [*names, f"selected: round {selected}"]
    _legend(figure, lines, names, "outside lower center", columns)
    return figure


def _absent(curve: Curve) -> list[float]:
    return [float("nan")] * len(curve.rounds)


def client_bars(
    partition_ids: Sequence[int],
    accuracy: Sequence[float],
    pooled: float | None,
    *,
    items: str = "nodes",
) -> Figure:
    """Draw the test accuracy of every client of one run.

    Parameters
    ----------
    partition_ids : sequence of int
        Length K, in the order to draw.
    accuracy : sequence of float in [0, 1]
        Length K; NaN where a client has no test nodes.
    pooled : float in [0, 1] or None
        Accuracy over all clients' items, drawn as a line.
    items : str
        What is classified: nodes or graphs.

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure = _figure(2.7)
    panel = figure.subplots()
    _dress(panel, xlabel="client (partition-id)", ylabel="test accuracy")
    place = np.arange(len(partition_ids))
    values = np.asarray(accuracy, dtype=float)
    width = 0.72 if len(place) <= 100 else 1.0
    panel.bar(place, np.nan_to_num(values), width=width, color="#7fb8da", zorder=2)
    size = 8 if len(place) <= 24 else 6.5
    for x, value in enumerate(values):
        if np.isnan(value) or len(place) <= 36:
            text = "none" if np.isnan(value) else f"{100 * value:.0f}"
            panel.text(x, 0.03, text, ha="center", fontsize=size, color=INK)
    _client_ticks(panel, partition_ids)
    panel.set_xlim(-0.7, len(place) - 0.3)
    panel.set_ylim(0, 1.06)
    panel.set_yticks([0, 0.25, 0.5, 0.75, 1])
    panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    if pooled is not None:
        line = panel.axhline(pooled, color=PALETTE[5], linewidth=1.3, zorder=3)
        name = f"all clients' test {items}: {100 * pooled:.1f} %"
        _legend(panel, [line], [name], "lower right", 1, bbox_to_anchor=(1.01, 0.985))
    return figure


def client_spread(
    labels: Sequence[str],
    accuracy: Sequence[Sequence[float]],
    pooled: Sequence[float | None],
) -> Figure:
    """Draw the test accuracies of the clients of several runs, a row of dots each.

    Parameters
    ----------
    labels : sequence of str
        Length R, names of the runs.
    accuracy : sequence of R sequences of float in [0, 1]
        One value per client; NaN is left out.
    pooled : sequence of float in [0, 1] or None
        Length R, accuracy over all clients' nodes, drawn as a bar.

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure = _figure(1.0 + 0.34 * len(labels))
    panel = figure.subplots()
    _dress(panel, xlabel="test accuracy", grid="x")
    for row, (values, middle) in enumerate(zip(accuracy, pooled, strict=True)):
        colour = PALETTE[row % len(PALETTE)]
        # a fixed zigzag keeps equal values apart
        offset = 0.16 * (np.arange(len(values)) % 3 - 1)
        panel.scatter(
            values, row + offset, s=22, color=colour, alpha=0.55, linewidth=0, zorder=2
        )
        if middle is not None:
            ends = [row - 0.36, row + 0.36]
            panel.plot([middle, middle], ends, color=INK, linewidth=2, zorder=3)
    _name_rows(panel, labels)
    panel.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return figure


def stacked_bars(
    rows: Sequence[str], parts: Mapping[str, Sequence[float]], unit: str
) -> Figure:
    """Draw one horizontal bar per row, made of named parts.

    Parameters
    ----------
    rows : sequence of str
        Length R, names of the bars.
    parts : mapping of str to sequence of float
        R values per part.
    unit : str
        Unit of the values, for axis and totals.

    Returns
    -------
    matplotlib.figure.Figure
    """
    columns = min(5, max(1, len(parts)))
    legend_rows = -(-len(parts) // columns)
    figure = _figure(0.75 + 0.36 * len(rows) + 0.22 * legend_rows)
    panel = figure.subplots()
    _dress(panel, xlabel="seconds" if unit == "s" else unit, grid="x")
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
            f"{total:.3g} {unit}",
            (total, row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=INK,
        )
    panel.set_xlim(0, 1.13 * max(left.max(initial=0), 1e-12))
    _name_rows(panel, rows)
    _legend(figure, bars, list(parts), "outside lower center", columns)
    return figure


def label_heat_map(
    counts: Any,
    class_names: Sequence[str],
    partition_ids: Sequence[int] | None = None,
    *,
    items: str = "nodes",
) -> Figure:
    """Draw how many nodes, or graphs, of each class each client holds.

    Parameters
    ----------
    counts : array-like of shape (K, C), int
        Items by client and class.
    class_names : sequence of str
        Length C.
    partition_ids : sequence of int, optional
        Length K; 0..K-1 if left out.
    items : str
        What is counted: nodes or graphs.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        If ``counts`` is not of shape (K, C).
    """
    table = np.asarray(counts).T  # (C, K)
    if table.ndim != 2 or table.shape[0] != len(class_names):
        raise ValueError(
            f"counts must be (clients, classes) with {len(class_names)} classes, got "
            f"shape {table.T.shape}."
        )
    num_classes, num_clients = table.shape
    figure = _figure(min(13.0, 1.1 + 0.27 * max(num_classes, 4)))
    panel = figure.subplots()
    _dress(panel, xlabel="client (partition-id)", grid="")
    top = max(int(table.max(initial=0)), 1)
    image = panel.imshow(
        np.ma.masked_equal(table, 0),
        aspect="auto",
        interpolation="nearest",
        cmap=HEAT,
        norm=PowerNorm(0.5, vmin=0, vmax=top),  # a root, so that small counts show
    )
    if num_clients <= 20 and num_classes <= 40:
        for (y, x), count in np.ndenumerate(table):
            colour = "white" if count > 0.4 * top else INK
            if count:
                panel.text(
                    x, y, f"{count}", ha="center", va="center", fontsize=8, color=colour
                )
    ids = range(num_clients) if partition_ids is None else partition_ids
    _client_ticks(panel, ids)
    step = -(-num_classes // 60)
    panel.set_yticks(
        np.arange(0, num_classes, step),
        labels=[_plain(name) for name in class_names[::step]],
        parse_math=False,
        fontsize=8.5 if num_classes <= 40 else 6.5,
    )
    if num_clients <= 100 and num_classes <= 80:  # else the lines cover the cells
        panel.set_xticks(np.arange(num_clients + 1) - 0.5, minor=True)
        panel.set_yticks(np.arange(num_classes + 1) - 0.5, minor=True)
        panel.grid(which="minor", color="white", linewidth=1.2)
    panel.tick_params(which="minor", length=0)
    panel.spines[:].set_visible(False)
    panel.set_facecolor("#f3f5f8")
    bar = figure.colorbar(
        image, ax=panel, pad=0.015, fraction=0.03, aspect=24, anchor=(0, 1)
    )
    bar.set_label(items, color=INK, fontsize=9)
    bar.ax.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    bar.ax.tick_params(labelsize=8.5, colors=MUTED, length=0)
    bar.outline.set_visible(False)
    return figure


@dataclass(frozen=True)
class Cloud:
    """What one client contributes to :func:`node_clouds`.

    Parameters
    ----------
    label : str
        Name of the client.
    places : mapping of str to array of shape (n, 2)
        Where the nodes of each kind are: ``synthetic``, ``test`` and ``train``, drawn in
        that order.
    classes : mapping of str to array of shape (n,), int
        Their classes.
    """

    label: str
    places: Mapping[str, Any]
    classes: Mapping[str, Any]


def node_clouds(
    clouds: Sequence[Cloud], class_names: Sequence[str] | None = None
) -> Figure:
    """Draw nodes in a plane: colours are classes, marks are kinds of nodes.

    Parameters
    ----------
    clouds : sequence of Cloud
        A panel each, three in a row.
    class_names : sequence of str, optional
        Length C; numbers if left out.

    Returns
    -------
    matplotlib.figure.Figure

    Notes
    -----
    1. The eight colours of the palette are used again for further classes.
    """
    columns = min(3, len(clouds))
    rows = -(-len(clouds) // columns)
    classes = [y for cloud in clouds for y in cloud.classes.values()]
    shown = sorted(set(np.concatenate(classes).tolist()))
    colours = {c: PALETTE[n % len(PALETTE)] for n, c in enumerate(shown)}
    figure = _figure(0.5 + 3.2 * rows + 0.2 * (len(shown) + 3) / 5)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, cloud in zip(panels, clouds, strict=False):
        _dress(panel, xlabel="", title=_plain(cloud.label), grid="")
        for kind, place in cloud.places.items():
            looks = [colours[c] for c in cloud.classes[kind].tolist()]
            panel.scatter(place[:, 0], place[:, 1], color=looks, **MARKS[kind])
        panel.set_xticks([])
        panel.set_yticks([])
    for panel in panels[len(clouds) :]:
        panel.set_visible(False)
    keys = [Line2D([], [], color=colour, linewidth=3) for colour in colours.values()]
    names = [str(c) if class_names is None else class_names[c] for c in shown]
    for kind, look in MARKS.items():
        keys.append(Line2D([], [], color=MUTED, linestyle="", marker=look["marker"]))
        names.append(kind)
    _legend(figure, keys, names, "outside lower center", 5)
    return figure


def scale_bytes(largest: float) -> tuple[float, str]:
    """Choose a decimal unit for a number of bytes.

    Parameters
    ----------
    largest : float
        The largest number of bytes to show.

    Returns
    -------
    tuple of float and str
        Bytes in the unit, and its name: B, kB, MB, GB or TB.
    """
    for factor, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= factor:
            return factor, name
    return 1.0, "B"


def to_svg(figure: Figure) -> bytes:
    """Render a figure as SVG with letters as outlines, the same on every machine."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # a name in a script that matplotlib's own font lacks is shown as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _figure(height: float) -> Figure:
    figure = Figure(figsize=(WIDTH, height), dpi=100, layout="constrained")
    figure.set_facecolor("white")
    return figure


def _dress(
    panel: Any, *, xlabel: str, ylabel: str = "", title: str = "", grid: str = "y"
) -> None:
    """Take away what draws attention from the data."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#b6bec8")
    panel.tick_params(labelsize=8.5, colors=MUTED, labelcolor=INK, length=3)
    panel.set_xlabel(xlabel, fontsize=9, color=INK)
    panel.set_ylabel(ylabel, fontsize=9, color=INK)
    panel.set_title(title, loc="left", fontsize=10, color=INK, fontweight="bold")
    if grid:
        panel.grid(axis=grid, color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)


def _look(number: int) -> dict[str, Any]:
    """Return colour and dashes of the line of a run, or of a column."""
    return {
        "color": PALETTE[number % len(PALETTE)],
        "linestyle": DASHES[number // len(PALETTE) % len(DASHES)],
    }


def _dashed(number: int) -> dict[str, Any]:
    """Return a look that shows a line below another one of the same values."""
    return {**_look(number), "linestyle": DASHES[number % len(DASHES)]}


def _mark_selected(panel: Any, number: int) -> Any:
    """Mark the round from which results are taken."""
    dashes = (0, (2, 2))
    return panel.axvline(number, zorder=1, color=MUTED, linewidth=1.1, linestyle=dashes)


def _line(rounds: Sequence[int]) -> dict[str, Any]:
    """Mark the points of short curves: a single one would be invisible."""
    marker = {"marker": "o", "markersize": 3.5} if len(rounds) <= 12 else {}
    return {"linewidth": 1.6, "solid_capstyle": "round", **marker}


def _client_ticks(panel: Any, ids: Sequence[int]) -> None:
    step = 1 if len(ids) <= 50 else -(-len(ids) // 20)
    size = 8.5 if len(ids) <= 30 else 7
    places = np.arange(0, len(ids), step)
    panel.set_xticks(places, labels=[str(i) for i in ids[::step]], fontsize=size)
    panel.tick_params(axis="x", length=0)


def _name_rows(panel: Any, names: Sequence[str]) -> None:
    labels = [_plain(name) for name in names]
    panel.set_yticks(np.arange(len(names)), labels=labels, parse_math=False)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)


def _legend(
    owner: Any, artists: Any, names: Sequence[str], loc: str, columns: int, **place: Any
) -> None:
    # matplotlib leaves out names that begin with an underscore
    labels = [" " + _plain(n) if n.startswith("_") else _plain(n) for n in names]
    legend = owner.legend(
        artists,
        labels,
        loc=loc,
        ncols=columns,
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        handlelength=1.6,
        columnspacing=1.4,
        **place,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _plain(name: str, limit: int = 34) -> str:
    """Put a name on one line without characters that cannot be drawn."""
    line = "".join(c if c.isprintable() else " " for c in name)
    line = " ".join(line.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
