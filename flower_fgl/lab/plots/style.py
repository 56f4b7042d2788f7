"""Style that all figures share: colours, axes, lines, legends and names.

The colours follow those of Okabe and Ito, which colour-blind readers can tell apart. Names
from data are never parsed as mathematics.
"""

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from flower_fgl.core.errors import RunError
from flower_fgl.runs.writer import replace_file

PALETTE = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#8c8c8c",
    "#7b4fa3",
)
INK, MUTED, GRID = "#1d2733", "#5f6b7a", "#e4e8ed"
WIDTH = 9.6
"""Width of a figure in inches; 1 inch is shown as 100 pixels."""
NARROW = 3.7
"""Width of a figure for phones."""
NARROW_NAME, SHORT_NAME = 18, 14
"""Characters of a row's name in a narrow figure, and of one that needs half its width."""
TURNED_NAME = 20
"""Characters of a name that is turned below a column."""
_IS_NARROW: ContextVar[bool] = ContextVar("narrow", default=False)
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (8, 2, 1, 2, 1, 2)), (0, (3, 5)))
LONGEST = 34
"""Characters of a name; longer ones are shortened."""
VARIANT_MARKS = ("", "o", "s", "^", "D", "v", "P", "X", "*")
"""Markers that distinguish lines of the same colour and dash."""
CELL_INK = "#1d2734"
"""Ink on coloured surfaces, which stays dark on a dark page."""
DARK = {
    INK: "#e3e8ee",
    MUTED: "#9aa7b5",
    GRID: "#2c3642",
    "#b6bec8": "#526070",
    "#ffffff": "#171d25",
    "#f3f5f8": "#222b36",
}
"""Colours of a figure on a dark page."""


class ReportFigure(Figure):
    """A figure that a notebook shows as an image."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        with quiet_glyphs():
            self.savefig(buffer, format="png")
        return buffer.getvalue()


@contextlib.contextmanager
def narrow_figures() -> Iterator[None]:
    """Draw figures for phones: narrow, with panels below each other."""
    token = _IS_NARROW.set(True)
    try:
        yield
    finally:
        _IS_NARROW.reset(token)


def is_narrow() -> bool:
    """Return whether figures are drawn for phones."""
    return _IS_NARROW.get()


def legend_columns(names: Sequence[str], most: int) -> int:
    """Return the number of columns of a legend below a figure."""
    if is_narrow():
        most = 1 if max(map(len, names), default=0) > SHORT_NAME else 2
    return max(1, min(most, len(names)))


def new_figure(height: float) -> Figure:
    """Return an empty white figure of a height in inches."""
    size = (NARROW if is_narrow() else WIDTH, height)
    figure = ReportFigure(figsize=size, dpi=100, layout="constrained")
    figure.set_facecolor("white")
    return figure


def panel_grid(
    number: int,
    names: Sequence[str],
    height: tuple[float, float],
    *,
    groups: int = 1,
    has_legend: bool = True,
    most: int = 3,
    **options: Any,
) -> tuple[Figure, Any, int]:
    """Return a figure, its panels (groups, number), and the columns of its legend.

    ``height`` is that of a row of panels, and that of the rest besides the legend.
    """
    columns = legend_columns(names, most)
    rows, across = (number, 1) if is_narrow() else (1, number)
    legend = 0.22 * -(-len(names) // columns) if has_legend else 0
    figure = new_figure(height[0] * rows * groups + height[1] + legend)
    grid = figure.subplots(rows * groups, across, squeeze=False, **options)
    return figure, grid.reshape(groups, number), columns


def legend_below(figure: Figure, lines: Mapping[str, Any], columns: int) -> None:
    """Add the legend below the panels."""
    add_legend(figure, lines.values(), list(lines), "outside lower center", columns)


def dress(
    panel: Any, *, xlabel: str, ylabel: str = "", title: str = "", grid: str = "y"
) -> None:
    """Label an axes and give it the common style: few spines, light grid."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#b6bec8")
    panel.tick_params(labelsize=8.5, colors=MUTED, labelcolor=INK, length=3)
    panel.set_xlabel(xlabel, fontsize=9, color=INK)
    panel.set_ylabel(ylabel, fontsize=9, color=INK)
    panel.set_title(title, loc="left", fontsize=10, color=INK, fontweight="bold")
    if grid:
        panel.grid(axis=grid, color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)


def show_percent(axis: Any, *, decimals: int | None = None) -> None:
    """Label an axis of shares in percent."""
    axis.set_major_formatter(PercentFormatter(1, decimals=decimals))


def look_of(number: int) -> dict[str, Any]:
    """Return colour and line style of the line with a number."""
    return {
        "color": PALETTE[number % len(PALETTE)],
        "linestyle": DASHES[number // len(PALETTE) % len(DASHES)],
    }


def variant_look(number: int, variant: int) -> dict[str, Any]:
    """Return the style of a line: colour and dash by number, the marker by variant."""
    mark = VARIANT_MARKS[variant % len(VARIANT_MARKS)]
    marker = {"marker": mark, "markersize": 4.5, "markevery": 0.12} if mark else {}
    return {**look_of(number), **marker}


def draw_line(
    panel: Any, x: Sequence[float], y: Sequence[float], look: Mapping[str, Any]
) -> Any:
    """Draw a line and return it; one without any number shows only in the legend."""
    (line,) = panel.plot(x, y, **look)
    if not np.isfinite(np.asarray(y, dtype=float)).any():
        line.set_markevery(None)  # matplotlib raises for markers at a distance
    return line


def dashed_look(number: int) -> dict[str, Any]:
    """Return a style in which lines with equal values stay visible."""
    return {**look_of(number), "linestyle": DASHES[number % len(DASHES)]}


def mark_selected(panel: Any, number: int) -> Any:
    """Draw a vertical line at the round from which results are taken."""
    dashes = (0, (2, 2))
    return panel.axvline(number, zorder=1, color=MUTED, linewidth=1.1, linestyle=dashes)


def line_of(rounds: Sequence[int]) -> dict[str, Any]:
    """Return the line width, and markers for short curves, whose points are hard to see."""
    marker = {"marker": "o", "markersize": 3.5} if len(rounds) <= 12 else {}
    return {"linewidth": 1.6, "solid_capstyle": "round", **marker}


def client_ticks(panel: Any, ids: Sequence[int | str]) -> None:
    """Label the columns with partition IDs or owners' names, at most 50 of them."""
    most, some, room = (15, 8, 30) if is_narrow() else (50, 20, 90)
    step = 1 if len(ids) <= most else -(-len(ids) // some)
    size = 8.5 if len(ids) <= 30 else 7
    places = np.arange(0, len(ids), step)
    names = [str(i) for i in ids]
    labels = distinct(names)[::step]
    # names that would touch each other are turned
    turn = 30 if sum(len(label) + 1 for label in labels) > room else 0
    if turn:
        labels = distinct(names, TURNED_NAME)[::step]
    align = "right" if turn else "center"
    panel.set_xticks(
        places, labels=labels, fontsize=size, rotation=turn, ha=align, parse_math=False
    )
    panel.tick_params(axis="x", length=0)


def name_rows(panel: Any, names: Sequence[str]) -> None:
    """Label the rows on the vertical axis, the first on top."""
    labels = distinct(names, NARROW_NAME if is_narrow() else LONGEST)
    panel.set_yticks(np.arange(len(names)), labels=labels, parse_math=False)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)


def add_legend(
    owner: Any, artists: Any, names: Sequence[str], loc: str, columns: int, **place: Any
) -> None:
    """Add a legend without a frame to an axes or a figure; its entries read by rows."""
    # matplotlib omits names that begin with an underscore
    labels = [f" {n}" if n.startswith("_") else n for n in distinct(names)]
    # matplotlib fills one column after the other
    order = [i for c in range(columns) for i in range(c, len(labels), columns)]
    artists = list(artists)
    legend = owner.legend(
        [artists[i] for i in order],
        [labels[i] for i in order],
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


def plain(name: str, limit: int = LONGEST) -> str:
    """Return a name on one line, shortened and without unprintable characters."""
    line = "".join(c if c.isprintable() else " " for c in name)
    line = " ".join(line.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def first_upper(name: str) -> str:
    """Return a name with a capital first letter, and the others as they are."""
    return name[:1].upper() + name[1:]


def distinct(names: Sequence[str], limit: int = LONGEST) -> list[str]:
    """Shorten names so that different names stay different, by numbers if need be."""
    different = list(dict.fromkeys(names))
    for shorten in (plain, _without_middle):
        if len({shorten(name, limit) for name in different}) == len(different):
            return [shorten(name, limit) for name in names]
    numbers = {name: k for k, name in enumerate(different, 1)}
    return [f"{numbers[n]}: {plain(n, limit - 4)}" for n in names]


def _without_middle(name: str, limit: int) -> str:
    """Return a name on one line, shortened in the middle."""
    line = plain(name, len(name))
    if len(line) <= limit:
        return line
    head = limit // 3
    return f"{line[:head]}…{line[head + 1 - limit :]}"


@contextlib.contextmanager
def quiet_glyphs() -> Iterator[None]:
    """Suppress warnings about characters that matplotlib's font draws as boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def save_figure(figure: Figure, path: Path, **options: Any) -> None:
    """Write a figure in the format of the ending, PNG without one; else a RunError."""
    buffer = io.BytesIO()
    try:
        figure.savefig(buffer, format=path.suffix[1:].lower() or "png", **options)
    except ValueError as error:  # matplotlib knows no such format
        raise RunError(f"Cannot write {path}: {error}.") from error
    replace_file(path, buffer.getvalue())


def to_svg(figure: Figure) -> bytes:
    """Render a figure as SVG with text as outlines, identical on every machine."""
    buffer = io.BytesIO()
    fixed_ids = {"svg.hashsalt": "flower-fgl"}
    with quiet_glyphs(), mpl.rc_context(fixed_ids):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    head, tag, rest = buffer.getvalue().partition(b"<defs>")
    return head + _DARK_STYLE.encode() + tag + rest


_DARK_STYLE = (
    "<style>@media (prefers-color-scheme: dark) {"
    + "".join(
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }}'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    )
    + "}</style>\n "
)
