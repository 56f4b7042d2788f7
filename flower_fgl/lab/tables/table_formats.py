"""Format a results table as Markdown, LaTeX, CSV or HTML.

A printed table is a frame of texts by row and title. ``attrs["caption"]`` is its heading;
the text of the best row is between two asterisks on each side.
"""

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import Any

import pandas as pd

from flower_fgl.core.errors import ConfigError, first_of
from flower_fgl.core.options import nearest
from flower_fgl.core.score_names import (
    MARGIN,
    NOTHING,
    NUMBER_SCORES,
    SETTING_COLUMNS,
    ScoreScale,
)
from flower_fgl.lab.tables.cells import PLACE, describe_published
from flower_fgl.lab.tables.results_table import Block, Line, ResultsTable
from flower_fgl.lab.tables.statistics import (
    LEVEL,
    POWER,
    Comparison,
)
from flower_fgl.lab.units import show_bytes, show_seconds
from flower_fgl.runs.card import wilson

__all__ = ["FORMATS", "LAYOUTS", "NOTES", "format_table"]

CSV_COMPARISON = {
    "minus_": "difference",
    "p_": "p",
    "p_tied_": "p_equivalent",
    "detectable_": "detectable",
}
"""Columns of a comparison, before ``control`` or ``best``, by their attribute."""
FORMATS = ("markdown", "latex", "html", "csv")
LAYOUTS = ("full", "overview", "summary", "owners")
NOTES = ("all", "marks", "none")
TITLES = {
    "accuracy": "accuracy",
    "mean_accuracy": "mean of clients",
    "worst_accuracy": "worst client",
    "worst_auroc": "worst client",
    "macro_f1": "macro-F1",
    "macro_recall": "macro-recall",
    "micro_f1": "micro-F1",
    "auroc": "AUROC",
    "mean_auroc": "mean AUROC of owners",
    "auprc": "AUPRC",
    "mrr": "MRR",
    "hits": "Hits@K",
    **{name: kind.title for name, kind in NUMBER_SCORES.items()},
    **{
        f"mean_{n}": f"mean {kind.title} of clients"
        for n, kind in NUMBER_SCORES.items()
    },
    "worst_rmse": "worst client",
    "worst_nrmse": "worst client",
}
"""Titles of scores. Macro-F1, AUROC and AUPRC show what accuracy hides in rare classes."""
COST_TITLES = {"bytes_up": "upload", "bytes_down": "download", "seconds": "time"}
TIED, ABOVE, BELOW = "≈", "↑", "↓"
MARKS = {"above": ABOVE, "below": BELOW, "tied": TIED}


def format_table(
    table: ResultsTable,
    *,
    layout: str = "",
    format: str = "markdown",
    notes: str = "all",
) -> str:
    """Format a table with its notes; the same cells give the same text.

    ``layout`` is one of ``LAYOUTS``: a table per dataset with all scores, costs and
    comparisons (``full``, by default); a column per dataset with the table's metric
    (``overview``, by default in LaTeX, as it fits a page); counts of verdicts and ranks
    by row (``summary``); or test scores and gains of each natural owner (``owners``).
    ``format`` is one of ``FORMATS``; CSV has one layout, fractions, and no notes.
    ``notes`` are the sentences below: ``all``; ``marks``, those on marks, tests and
    ranks, e.g. for a second table of the same runs; or ``none``.
    """
    layout = layout or ("overview" if format == "latex" else "full")
    for name, value, known in (
        ("notes", notes, NOTES),
        ("layout", layout, LAYOUTS),
        ("format", format, FORMATS),
    ):
        if value not in known:
            raise ConfigError(f'Unknown {name} "{value}". {nearest(value, known)}')
    if format == "csv":
        if layout != "full":
            raise ConfigError(
                f'CSV has one layout, with all scores: layout = "{layout}" has no effect. '
                "Leave it out, or choose another format."
            )
        return _csv(table)
    is_latex = format == "latex"
    if layout == "full":
        sheets = [_full(table, block, has_words=not is_latex) for block in table.blocks]
    elif layout == "owners":
        sheets = [sheet for block in table.blocks for sheet in _owners(table, block)]
    else:
        sheets = [_overview(table) if layout == "overview" else _summary(table)]
    below = [] if notes == "none" else _marks(table, layout, has_words=not is_latex)
    if notes == "all":
        below += _facts(table, layout)
    if is_latex:
        names = dict.fromkeys(cell.experiment for cell in table.cells)
        titles = list(dict.fromkeys(cell.title for cell in table.cells if cell.title))
        kind = table.scale.name_of(TITLES.get(table.metric, table.metric))
        caption = titles[0] if len(titles) == 1 else f"{table.column} {kind}"
        for sheet in sheets:  # a label without a caption would be that of the section
            sheet.attrs["caption"] = sheet.attrs["caption"] or caption
        return _latex(sheets, below, "-".join(names))
    return (_markdown if format == "markdown" else _html)(sheets, below)


def _sheet(
    caption: str, titles: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]
) -> pd.DataFrame:
    """Return a printed table of named rows."""
    texts = [list(row) for _, row in rows]
    sheet = pd.DataFrame(texts, index=[name for name, _ in rows], columns=list(titles))
    sheet.attrs["caption"] = caption
    return sheet


def _marks(table: ResultsTable, layout: str, *, has_words: bool = True) -> list[str]:
    """Return the sentences on what the layout shows of marks, tests and ranks."""
    control = next((b.control.cell.row for b in table.blocks if b.control), None)
    name = table.label(control) if control is not None else ""
    if layout == "owners":
        text = "Values and gains: mean over the draws"
        if any(len(line.cell.draws) > 1 for b in table.blocks for line in b.lines):
            text += " ± standard deviation"
        unit = "" if table.scale.kind.has_units else " in points"
        gains = f" Gains are paired by draw,{unit} over {name}." if name else ""
        return [f"{text}.{gains} Single owners are not tested."]
    notes = []
    if not table.is_cost and any(block.best for block in table.blocks):
        is_marked = layout != "summary"
        number = table.num_tests
        is_error = table.scale.is_error
        order = "lowest" if is_error else "highest"
        marks = f"{'Bold' if is_marked else 'Best'}: {order} mean."
        if number:
            if is_error:
                tied = f"less than {table.scale.margin_text}"
                marks += f" {TIED} tied: {tied}." if is_marked else f" Tied: {tied}."
            else:
                marks += f" {TIED}: tied with it," if is_marked else " Tied:"
                marks += f" a difference of {100 * MARGIN:.0f} point can be excluded."
            words = ("better", "worse than") if is_error else ("above", "below")
            signs = f"{ABOVE} {BELOW}"
            if not is_marked:
                signs = f"{words[0].capitalize()}, {words[1].removesuffix(' than')}"
            if name:
                marks += f" {signs}: significantly {words[0]} or {words[1]} {name}."
                if layout == "overview" or not has_words:
                    marks += f" No arrow: tied with {name}, or undecided."
            kind = "comparison" if number == 1 else "comparisons"
            marks += (
                " Paired t-tests and equivalence tests over the draws at "
                f"{100 * (1 - LEVEL):.0f} %, Holm-adjusted for the {number} {kind} of "
                "this table."
            )
        if layout == "full" and any(
            v.kind == "undecided" for *_, v in _verdicts(table)
        ):
            marks += (
                " Undecided: neither a difference nor a tie is shown; a difference of the "
                f"size named would be found in {100 * POWER:.0f} % of cases."
            )
        notes.append(marks)
        lacking: dict[str, dict[str, None]] = {}
        for block, line, versus in _verdicts(table):
            if versus.why_not:
                place = f"{table.label(line.name)} on {block.name}"
                lacking.setdefault(versus.why_not, {})[place] = None
        every = "all comparisons" if not number and len(lacking) == 1 else ""
        whys = [
            f"{why} ({every or first_of(list(names), 3, '; ')})"
            for why, names in lacking.items()
        ]
        if whys:
            notes.append(f"Not testable: {'; '.join(whys)}.")
    ranks, missing = table.ranks()
    if ranks is not None and not ranks.why_not:
        notes.append(str(ranks))
        if missing:
            notes.append(f"Not ranked, as a column lacks them: {', '.join(missing)}.")
    return notes


def _facts(table: ResultsTable, layout: str) -> list[str]:
    """Return the sentences on draws, tuning and versions, and the warnings."""
    notes = table.facts()
    if table.metric in ("bytes", "bytes_up", "bytes_down"):
        notes.append("Bytes are those of all clients and rounds of a run.")
    elif layout == "full":
        notes.append(
            "Bytes and seconds are those of a whole run, all clients together."
        )
    pooled = {
        column
        for block in (table.blocks if layout == "full" else ())
        for line in block.lines
        for column in SETTING_COLUMNS
        if column != "test_masked" and line.cell.pooled(line.model, column)
    }
    if pooled:
        notes.append(
            "Pooled: accuracy over the nodes of all draws together, their number, and the "
            f"{100 * (1 - LEVEL):.0f} % binomial interval (Wilson), as if all nodes were "
            "independent. Means over draws weight small node sets like large ones."
        )
        if "new_client" in pooled:
            notes[-1] += (
                " Nodes of the new client count once for each client's own model."
            )
    for cell in table.cells:
        notes += [note for note in cell.notes if note not in notes]
    return notes + [f"Warning: {text}." for text in table.warnings()]


def _verdicts(table: ResultsTable) -> Iterator[tuple[Block, Line, Comparison]]:
    """Yield the comparisons of all lines with their control and their best line."""
    for block in table.blocks:
        for line in block.lines:
            for other in (block.control, block.best):
                if (versus := table.versus(line, other)) is not None:
                    yield block, line, versus


def _pooled(found: tuple[float, int] | None) -> str:
    """Format an accuracy over the nodes of all draws, with its binomial interval."""
    if found is None:
        return NOTHING
    low, high = wilson(*found)
    return f"{100 * found[0]:.1f} of {found[1]:,} ({100 * low:.1f}–{100 * high:.1f})"


def _cost(metric: str, values: Sequence[float]) -> str:
    """Format the mean of bytes or seconds."""
    if not values:
        return NOTHING
    mean = fmean(values)
    text = show_seconds(mean) if metric == "seconds" else show_bytes(mean)
    return text.replace("\u00a0", " ")


def _main_text(table: ResultsTable, block: Block, line: Line) -> str:
    """Return the table's metric of a line with its marks."""
    values = table.values(line)
    if table.is_cost:
        return _cost(table.metric, values)
    text = table.scale_of(block).show_mean(values)
    to_best, to_control = (table.versus(line, x) for x in (block.best, block.control))
    if to_best is not None and to_best.is_tied:
        text += f" {TIED}"
    if to_control is not None and to_control.is_significant:
        text += f" {MARKS[to_control.kind]}"
    return f"**{text}**" if line is block.best else text


def _published_value(line: Line, key: str) -> float | None:
    """Return a published value, a share in percent, ``None`` without one for this line."""
    return line.cell.published.get(key) if line.is_main else None


def _published(line: Line, key: str) -> str:
    """Format a published value, empty if there is none for this line."""
    value = _published_value(line, key)
    if value is not None and ScoreScale(key).kind.has_units:
        return f"{value:.4g}"
    return "" if value is None else describe_published(value)


def _published_key(table: ResultsTable) -> str:
    """Return the key of the published values of the table's own metric."""
    if table.column != "test":
        return table.column if table.metric in ("accuracy", "mean_accuracy") else ""
    return {"mean_accuracy": "accuracy"}.get(table.metric, table.metric)


def _overview(table: ResultsTable) -> pd.DataFrame:
    """Return one row per line and one column per block, published values beside it."""
    key = _published_key(table)
    names: dict[tuple[str, str], Line] = {}
    for block in table.blocks:
        for line in block.lines:
            if not table.is_cost or line.is_main:
                names.setdefault((line.cell.row, line.model), line)
    columns: list[tuple[str, list[str]]] = []
    for block in table.blocks:
        found = {(line.cell.row, line.model): line for line in block.lines}
        texts = [
            _main_text(table, block, found[name]) if name in found else NOTHING
            for name in names
        ]
        scale = table.scale_of(block)
        is_error = scale.is_error and not table.is_cost
        columns.append(
            (f"{block.name}, {scale.title}" if is_error else block.name, texts)
        )
        published = [
            _published(found[name], key) if name in found else "" for name in names
        ]
        if any(published) and not table.is_cost:
            columns.append(("published", published))
    labels = [
        table.label(line.cell.row if table.is_cost else line.name)
        for line in names.values()
    ]
    rows = zip(*(texts for _, texts in columns), strict=True)
    titles = [title for title, _ in columns]
    return _sheet("", titles, list(zip(labels, rows, strict=True)))


def _summary(table: ResultsTable) -> pd.DataFrame:
    """Return the rows by average rank, with counts of verdicts and mean costs."""
    ranks, _ = table.ranks()
    order = list(ranks.average) if ranks is not None else []
    rows: dict[str, list[tuple[Block, Line]]] = {}
    for block in table.blocks:
        for line in block.lines:
            if line.is_main and table.values(line):
                rows.setdefault(table.label(line.cell.row), []).append((block, line))
    names = [*order, *(name for name in rows if name not in order)]
    controls = [block.control for block in table.blocks if block.control is not None]
    control = table.label(controls[0].cell.row) if controls else ""
    titles = ["average rank", "best or tied"]
    if control:
        words = (
            ("better than", "worse than")
            if table.scale.is_error
            else ("above", "below")
        )
        titles += [f"{words[0]} {control}", f"tied with {control}", "undecided"]
        titles += [f"{words[1]} {control}"]
    sheet: list[tuple[str, list[str]]] = []
    for name in names:
        found = rows[name]
        top = sum(  # any model of the row
            any(
                other is block.best
                or ((v := table.versus(other, block.best)) is not None and v.is_tied)
                for other in block.lines
                if other.cell is line.cell
            )
            for block, line in found
        )
        cells = ["–", f"{top} of {len(found)}"]
        if ranks is not None and name in ranks.average:
            cells[0] = f"{ranks.average[name]:.2f}"
        if control:
            verdicts = [
                table.versus(line, block.control)
                for block, line in found
                if line is not block.control
            ]
            kinds = Counter(v.kind for v in verdicts if v is not None)
            for kind in ("above", "tied", "undecided", "below"):
                cells.append(str(kinds[kind]) if verdicts else "")
        for metric in COST_TITLES:
            values = [v for _, line in found for v in table.values(line, metric)]
            cells.append(_cost(metric, values))
        sheet.append((name, cells))
    return _sheet("", [*titles, "upload", "download", "time"], sheet)


def _owners(table: ResultsTable, block: Block) -> list[pd.DataFrame]:
    """Return the test scores of each owner, and their gains; ConfigError without any."""
    metric = table.metric.removeprefix("mean_")
    scale = table.scale_of(block, metric)
    found: dict[str, pd.DataFrame] = {}  # owners by draw
    for line in block.lines:
        rows = {
            draw.key: {
                name: scores[metric]
                for name, scores in draw.owners.get(line.model, {}).items()
                if metric in scores
            }
            for draw in line.cell.draws
        }
        scored = {key: row for key, row in rows.items() if row}
        if scored:
            index = pd.MultiIndex.from_tuples(scored)
            found[line.name] = pd.DataFrame(list(scored.values()), index=index)
    if not found:
        raise ConfigError(
            f'layout = "owners" needs "{metric}" of natural owners, which no cell of '
            f'"{block.name}" has. Use --metric accuracy or auroc, and cells of runs with '
            "owners."
        )
    names = list(dict.fromkeys(name for scores in found.values() for name in scores))
    order, extreme = ("highest", "max") if scale.is_error else ("lowest", "min")
    sheet, gains = [], []
    number = len(block.lines[0].cell.draws)  # all rows have the same
    control = block.control.name if block.control is not None else ""
    for name, given in found.items():
        scores = given.reindex(columns=names)
        shown = [*(scores[n] for n in names), scores.mean(axis=1)]
        shown.append(scores.agg(extreme, axis=1))
        texts = [
            _known_mean(values.dropna().tolist(), number, scale) for values in shown
        ]
        texts.append(scale.worst(scores.mean().dropna().to_dict()))
        sheet.append((table.label(name), texts))
        if control in found and name != control:
            gained: Any = scale.gain(given, found[control])  # by draw and owner
            gained = gained.dropna(how="all").dropna(how="all", axis=1)
            if gained.size:
                gains.append((table.label(name), _gains(gained, names, scale)))
    titles = [*names, "mean", f"{order} of a draw", "worst owner"]
    caption = f"{block.name}: test {scale.name_of(TITLES.get(metric, metric))}"
    sheets = [_sheet(caption, titles, sheet)]
    if control in found:
        caption = f"{block.name}: gain over {table.label(control)}"
        sheets.append(_sheet(caption, [*names, "mean", "owners that gain"], gains))
    return sheets


def _known_mean(values: Sequence[float], number: int, scale: ScoreScale) -> str:
    """Format a mean, with the number of values unless all ``number`` draws have one."""
    is_partial = 0 < len(values) < number
    text = scale.show_mean(values)
    return f"{text} ({len(values)} of {number})" if is_partial else text


def _gains(gains: pd.DataFrame, names: Sequence[str], scale: ScoreScale) -> list[str]:
    """Return the gain of each owner, their mean, and how many owners gain."""
    means = gains.mean()
    is_whole = gains.notna().all(axis=None)  # each draw has all owners
    whole = gains.mean(axis=1).tolist() if is_whole else [means.mean()]
    shown = []
    for found in [*(gains.get(n, pd.Series()).dropna() for n in names), whole]:
        values = list(found)
        text = scale.show_gain(fmean(values)) if values else NOTHING
        spread = f" ± {scale.show(stdev(values))}" if len(values) > 1 else ""
        shown.append(text + spread)
    return [*shown, f"{(means > 0).sum()} of {len(means)}"]


def _full(table: ResultsTable, block: Block, *, has_words: bool = True) -> pd.DataFrame:
    """Return the table of one block with all scores, costs and comparisons.

    Without words a comparison is the difference and its mark.
    """
    lines = block.lines
    columns: list[tuple[str, list[str]]] = []

    def add(title: str, texts: Sequence[str]) -> None:
        if any(text not in ("", NOTHING) for text in texts):
            columns.append((title, list(texts)))

    main = _published_key(table)
    for metric, column, title, key in _shown(table, block):
        if (metric, column) == (table.metric, table.column):
            add(title, [_main_text(table, block, line) for line in lines])
        else:
            scale = table.scale_of(block, metric)
            add(
                title, [scale.show_mean(table.values(x, metric, column)) for x in lines]
            )
        if key and (key != main or metric == table.metric):
            add("published", [_published(line, key) for line in lines])
    for column, name in SETTING_COLUMNS.items():
        if column != "test_masked":  # the test nodes once more
            pools = [_pooled(line.cell.pooled(line.model, column)) for line in lines]
            add(f"{name}, pooled", pools)
    for metric, name in COST_TITLES.items():
        add(name, [_cost(metric, table.values(x, metric)) for x in lines])
    others = {"the best": block.best}
    if block.control is not None:
        others = {table.label(block.control.cell.row): block.control, **others}
    for name, other in others.items():
        texts = [_comparison(table, x, other, has_words=has_words) for x in lines]
        is_error = table.scale.is_error
        add(f"gain over {name}" if is_error else f"against {name}", texts)
    rows = [
        (table.label(line.name), [texts[k] for _, texts in columns])
        for k, line in enumerate(lines)
    ]
    return _sheet(block.name, [title for title, _ in columns], rows)


def _shown(table: ResultsTable, block: Block) -> list[tuple[str, str, str, str]]:
    """Return metric, node set, title and key of published values of the scores."""

    def titled(metric: str) -> str:
        title = TITLES.get(metric, metric)
        return table.scale_of(block, metric).name_of(title)

    title = f"{table.column} {titled(table.metric)}"
    main = (table.metric, table.column, title, _published_key(table))
    out = [] if table.is_cost else [main]
    has_numbers = bool(block.target.get("kind"))
    names = ("accuracy", "macro_f1", "micro_f1", "auroc", "auprc")
    of_all = block.lines[0].cell.main_metric if has_numbers else "accuracy"
    for metric in NUMBER_SCORES if has_numbers else names:
        key = metric if table.column == "test" else ""
        out.append((metric, table.column, titled(metric), key))
    for column, name in SETTING_COLUMNS.items():
        out.append((of_all, column, name, column))
    worst = f"worst_{of_all}"
    if table.metric == "auroc":
        worst = "worst_auroc"
    title = titled(worst)
    if has_numbers and table.metric not in (of_all, worst):
        title = title.replace("client", f"client's {TITLES[of_all]}")  # another unit
    out.append((worst, table.column, title, ""))
    return out[:1] + [entry for entry in out[1:] if entry[:2] != out[0][:2]]


def _comparison(
    table: ResultsTable, line: Line, other: Line | None, *, has_words: bool
) -> str:
    """Return the verdict on a line against another one, or the difference and its mark."""
    if line is other:
        return ""
    versus = table.versus(line, other)
    if versus is None:
        return NOTHING
    if has_words:
        return versus.brief
    return f"{versus.points} {MARKS.get(versus.kind, '')}".rstrip()


def _markdown(sheets: Sequence[pd.DataFrame], notes: Sequence[str]) -> str:

    def escape(text: str) -> str:  # names, of owners too, must not become Markdown
        return re.sub(r"([\\`*\[\]<>|])", r"\\\1", text)

    def shown(text: str) -> str:
        return re.sub(r"^\\\*\\\*(.*)\\\*\\\*$", r"**\1**", escape(text))

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    parts = []
    for sheet in sheets:
        caption = sheet.attrs["caption"] if len(sheets) > 1 else ""
        lines = [f"**{caption}**", ""] if caption else []
        lines += [line(["", *map(escape, sheet.columns)])]
        lines += ["|---" * (len(sheet.columns) + 1) + "|"]
        lines += [
            line([escape(name), *map(shown, cells)])
            for name, *cells in sheet.itertuples(name=None)
        ]
        parts.append("\n".join(lines))
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"


def _greek(letter: str) -> str:
    """Return LaTeX's command for a Greek letter, which is its name."""
    _, case, _, name = unicodedata.name(letter).replace("LAMDA", "LAMBDA").split()
    return rf"$\{name.lower() if case == 'SMALL' else name.capitalize()}$"


LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "≈": r"$\approx$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "−": "$-$",
    "–": "--",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "≠": r"$\neq$",
    "²": "$^2$",
    **{letter: _greek(letter) for letter in "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"},
    # other characters in LaTeX's standard font
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # an option of the line break before it
}


def _latex(sheets: Sequence[pd.DataFrame], notes: Sequence[str], name: str) -> str:
    """Return tables that are at most as wide as the text, with the notes below the last."""

    def escape(text: str) -> str:
        text = re.sub(r"^(\d+) of (\d+)$", r"\1/\2", text)
        text = re.sub(r"^([\d.]+) of ([\d,]+) (\(.*\))$", r"\1 \3, n = \2", text)
        text = "".join(LATEX.get(character, character) for character in text)
        return re.sub(r"^\*\*(.*)\*\*$", r"\\textbf{\1}", text)

    parts = ["% Needs \\usepackage{booktabs} and \\usepackage{graphicx}."]
    for sheet in sheets:
        caption = sheet.attrs["caption"]
        kind = f"{name} {caption}" if len(sheets) > 1 else name
        label = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
        lines = [r"\begin{table}", r"\centering"]
        lines += [rf"\caption{{{escape(caption)}}}"] if caption else []
        lines += [rf"\label{{tab:{label}}}"]
        lines += [r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"]
        text = sheet.map(escape).rename(index=escape, columns=escape)
        form = f"l{'r' * len(sheet.columns)}"
        lines += [text.to_latex(escape=False, column_format=form).rstrip() + "}"]
        if sheet is sheets[-1] and notes:
            text = " ".join(escape(note) for note in notes)
            lines += [r"\par\smallskip", rf"{{\footnotesize {text}}}"]
        parts.append("\n".join([*lines, r"\end{table}"]))
    return "\n\n".join(parts) + "\n"


def _html(sheets: Sequence[pd.DataFrame], notes: Sequence[str]) -> str:

    def escape(text: str) -> str:
        return re.sub(r"^\*\*(.*)\*\*$", r"<b>\1</b>", html.escape(text))

    parts = []
    for sheet in sheets:
        text = sheet.map(escape).rename(index=escape, columns=escape)
        table = text.to_html(escape=False, border=0, justify="left")
        if caption := sheet.attrs["caption"]:
            head = f"<caption>{html.escape(caption)}</caption>\n  <thead>"
            table = table.replace("<thead>", head, 1)
        parts.append(table)
    if notes:
        listed = "\n".join(f"<li>{html.escape(note)}</li>" for note in notes)
        parts.append(f"<ul>\n{listed}\n</ul>")
    return "\n".join(parts) + "\n"


def _csv(table: ResultsTable) -> str:
    """Return one line per block and line, with numbers in full."""
    main = _published_key(table)
    shown = {f"{table.column}_{table.metric}": ("", "")}
    for metric in TITLES:
        shown.setdefault(f"{table.column}_{metric}", (metric, ""))
    for column in ("test", *SETTING_COLUMNS):
        shown.setdefault(f"{column}_accuracy", ("accuracy", column))
    shown |= {metric: (metric, "") for metric in COST_TITLES}
    rows: list[dict[str, object]] = []
    for block in table.blocks:
        for line in block.lines:
            cell = line.cell
            row: dict[str, object] = {
                "experiment": cell.experiment,
                "row": cell.row,
                "model": line.model,
                "method": cell.method,
                **{key: cell.place.get(key, "") for key in PLACE},
                "draws": len(cell.draws),
            }
            for name, which in shown.items():
                values = table.values(line, *which)
                row[f"{name}_mean"] = fmean(values) if values else ""
                row[f"{name}_std"] = stdev(values) if len(values) > 1 else ""
            percent = _published_value(line, main)
            over = 1 if ScoreScale(main).kind.has_units else 100
            row["published"] = "" if percent is None else round(percent / over, 6)
            for name, other in (("control", block.control), ("best", block.best)):
                versus = table.versus(line, other)
                row[name] = other.name if other is not None else ""
                for title, field in CSV_COMPARISON.items():
                    row[title + name] = "" if versus is None else getattr(versus, field)
                if versus is not None and versus.scale.is_error:
                    row[f"minus_{name}"] = -versus.difference  # the gain is positive
            rows.append(row)
    frame = pd.DataFrame(rows, dtype=object)
    kept = [key for key in frame if (frame[key] != "").any()]
    return str(frame[kept].to_csv(index=False, lineterminator="\n", na_rep="nan"))
