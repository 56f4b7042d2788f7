"""Format a results table as Markdown, LaTeX, CSV or HTML."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import nearest
from flower_fgl.core.score_names import SETTING_COLUMNS
from flower_fgl.lab.tables.cells import PLACE, describe_published
from flower_fgl.lab.tables.results_table import Block, Line, ResultsTable
from flower_fgl.lab.tables.statistics import (
    LEVEL,
    MARGIN,
    POWER,
    PairedTest,
    proportion_interval,
)
from flower_fgl.lab.units import show_bytes, show_seconds
from flower_fgl.runs.names import some_names

__all__ = ["FORMATS", "LAYOUTS", "NOTES", "format_table"]

LAYOUTS = ("full", "overview", "summary", "owners")
NOTES = ("all", "marks", "none")
TITLES = {
    "accuracy": "accuracy",
    "mean_accuracy": "mean of clients",
    "worst_accuracy": "worst client",
    "worst_auroc": "worst client",
    "macro_f1": "macro-F1",
    "micro_f1": "micro-F1",
    "auroc": "AUROC",
    "mean_auroc": "mean AUROC of owners",
    "auprc": "AUPRC",
    "mrr": "MRR",
    "hits": "Hits@K",
}
"""Titles of scores. Macro-F1, AUROC and AUPRC show what accuracy hides in rare classes."""
NOTHING = "–"
TIED, ABOVE, BELOW = "≈", "↑", "↓"

Key = tuple[int, int]
"""What identifies a draw, see :attr:`~flower_fgl.lab.tables.cells.Draw.key`."""
OwnerScores = Mapping[str, Mapping[Key, float]]
"""Scores by owner and draw."""


@dataclass(frozen=True)
class Entry:
    """Text of one cell of the printed table."""

    text: str
    is_best: bool = False


@dataclass(frozen=True)
class Sheet:
    """One printed table.

    Parameters
    ----------
    caption : str
        Heading; may be empty.
    titles : sequence of str
        Length W: titles of the columns.
    rows : sequence of sequence of Entry
        W entries each.
    """

    caption: str
    titles: Sequence[str]
    rows: Sequence[Sequence[Entry]] = field(default_factory=list)


def format_table(
    table: ResultsTable,
    *,
    layout: str = "full",
    format: str = "markdown",
    notes: str = "all",
) -> str:
    """Format a table with its notes.

    Parameters
    ----------
    table : ResultsTable
        The table.
    layout : {"full", "overview", "summary", "owners"}
        One table per dataset with all scores, costs and comparisons; one table with a
        column per dataset, that shows the table's metric only; one table that counts
        for each row on how many datasets it is best or differs from the control; or the
        test scores of each natural owner, and its gain over the control. CSV has one
        layout.
    format : {"markdown", "latex", "csv", "html"}
        Format of the text.
    notes : {"all", "marks", "none"}
        Sentences below the table: all; those on marks, tests and ranks, e.g. for the
        second table of the same runs; or none.

    Returns
    -------
    str
        The text, which ends with a line break. The same cells give the same text. CSV has
        numbers only, and none of the notes; its scores and published values are fractions.

    Raises
    ------
    ConfigError
        If the layout, the format or the kind of notes is unknown.
    """
    if notes not in NOTES:
        raise ConfigError(f'Unknown notes "{notes}". {nearest(notes, NOTES)}')
    if layout not in LAYOUTS:
        raise ConfigError(f'Unknown layout "{layout}". {nearest(layout, LAYOUTS)}')
    if format not in FORMATS:
        raise ConfigError(f'Unknown format "{format}". {nearest(format, FORMATS)}')
    if format == "csv":
        return _csv(table)
    sheets = {
        "full": lambda: [_full(table, block) for block in table.blocks],
        "overview": lambda: [_overview(table)],
        "summary": lambda: [_summary(table)],
        "owners": lambda: [s for block in table.blocks for s in _owners(table, block)],
    }[layout]()
    below = [] if notes == "none" else _marks(table, layout)
    if notes == "all":
        below += _facts(table, layout)
    return FORMATS[format](sheets, below)


def _marks(table: ResultsTable, layout: str) -> list[str]:
    """Return the sentences on what the layout shows of marks, tests and ranks."""
    control = next((b.control.cell.row for b in table.blocks if b.control), None)
    name = table.label(control) if control is not None else ""
    if layout == "owners":
        text = "Values and gains: mean over the draws"
        if any(len(line.cell.draws) > 1 for b in table.blocks for line in b.lines):
            text += " ± standard deviation"
        gains = f" Gains are paired by draw, in points over {name}." if name else ""
        return [f"{text}.{gains} Single owners are not tested."]
    notes = []
    if not table.is_cost and any(block.best for block in table.blocks):
        is_marked = layout != "summary"
        number = table.num_tests
        marks = f"{'Bold' if is_marked else 'Best'}: highest mean."
        if number:
            marks += f" {TIED}: tied with it," if is_marked else " Tied:"
            marks += f" a difference of {100 * MARGIN:.0f} point can be excluded."
            signs = f"{ABOVE} {BELOW}" if is_marked else "Above, below"
            if name:
                marks += f" {signs}: significantly above or below {name}."
                if layout == "overview":
                    marks += f" No arrow: tied with {name}, or undecided."
            kind = "comparison" if number == 1 else "comparisons"
            marks += (
                " Paired t-tests and equivalence tests over the draws at "
                f"{100 * (1 - LEVEL):.0f} %, Holm-adjusted for the {number} {kind} of "
                "this table."
            )
        if layout == "full" and _has_undecided(table):
            marks += (
                " Undecided: neither a difference nor a tie is shown; a difference of the "
                f"size named would be found in {100 * POWER:.0f} % of cases."
            )
        notes.append(marks)
        if whys := _not_testable(table):
            notes.append(f"Not testable: {'; '.join(whys)}.")
    ranks, missing = table.ranks()
    if ranks is not None and not ranks.why_not:
        notes.append(str(ranks))
        if missing:
            notes.append(f"Not ranked, as a column lacks them: {', '.join(missing)}.")
    return notes


def _has_undecided(table: ResultsTable) -> bool:
    """Return whether a comparison shows neither a difference nor a tie."""
    found = [
        table.versus(line, other)
        for block in table.blocks
        for line in block.lines
        for other in (block.control, block.best)
    ]
    return any(v is not None and v.is_undecided for v in found)


def _facts(table: ResultsTable, layout: str) -> list[str]:
    """Return the sentences on draws, tuning and versions, and the warnings."""
    notes = table.facts()
    if table.metric in ("bytes", "bytes_up", "bytes_down"):
        notes.append("Bytes are those of all clients and rounds of a run.")
    elif layout == "full":
        notes.append(
            "Bytes and seconds are those of a whole run, all clients together."
        )
    if layout == "full" and any(
        line.cell.pooled(line.model, column)
        for block in table.blocks
        for line in block.lines
        for column in SETTING_COLUMNS
        if column != "test_masked"
    ):
        notes.append(
            "Pooled: accuracy over the nodes of all draws together, their number, and the "
            f"{100 * (1 - LEVEL):.0f} % binomial interval (Wilson), as if all nodes were "
            "independent. Means over draws weight small node sets like large ones."
        )
    for cell in table.cells:
        notes += [note for note in cell.notes if note not in notes]
    return notes + [f"Warning: {text}." for text in table.warnings()]


def _not_testable(table: ResultsTable) -> list[str]:
    """Return why comparisons cannot be tested, with the lines concerned."""
    found: dict[str, list[str]] = {}
    for block in table.blocks:
        for line in block.lines:
            for other in (block.control, block.best):
                versus = table.versus(line, other)
                if versus is not None and versus.why_not:
                    name = f"{table.label(line.name)} on {block.name}"
                    names = found.setdefault(versus.why_not, [])
                    if name not in names:
                        names.append(name)
    everything = "all comparisons" if not table.num_tests and len(found) == 1 else ""
    return [
        f"{why} ({everything or some_names(names, '; ')})"
        for why, names in found.items()
    ]


def _score(values: Sequence[float]) -> str:
    """Format fractions as mean and standard deviation in percent."""
    if not values:
        return NOTHING
    text = f"{100 * fmean(values):.2f}"
    return text if len(values) < 2 else f"{text} ± {100 * stdev(values):.2f}"


def _pooled(found: tuple[float, int] | None) -> str:
    """Format an accuracy over the nodes of all draws, with its binomial interval."""
    if found is None:
        return NOTHING
    low, high = proportion_interval(*found)
    return f"{100 * found[0]:.1f} of {found[1]:,} ({100 * low:.1f}–{100 * high:.1f})"


def _cost(metric: str, values: Sequence[float]) -> str:
    """Format the mean of bytes or seconds."""
    if not values:
        return NOTHING
    mean = fmean(values)
    text = show_seconds(mean) if metric == "seconds" else show_bytes(mean)
    return text.replace("\u00a0", " ")


def _main_entry(table: ResultsTable, block: Block, line: Line) -> Entry:
    """Return the table's metric of a line with its marks."""
    values = table.values(line)
    if table.is_cost:
        return Entry(_cost(table.metric, values))
    text = _score(values)
    to_best = table.versus(line, block.best)
    if to_best is not None and to_best.is_tied:
        text += f" {TIED}"
    to_control = table.versus(line, block.control)
    if to_control is not None and to_control.is_significant:
        text += f" {ABOVE if to_control.difference > 0 else BELOW}"
    return Entry(text, is_best=line is block.best)


def _published_value(line: Line, key: str) -> float | None:
    """Return a published value in percent, ``None`` if there is none for this line."""
    return line.cell.published.get(key) if line.is_main else None


def _published(line: Line, key: str) -> str:
    """Format a published value in percent, empty if there is none for this line."""
    value = _published_value(line, key)
    return "" if value is None else describe_published(value)


def _published_key(table: ResultsTable) -> str:
    """Return the key of the published values of the table's own metric."""
    if table.column != "test":
        return table.column if table.metric in ("accuracy", "mean_accuracy") else ""
    return {"mean_accuracy": "accuracy"}.get(table.metric, table.metric)


def _overview(table: ResultsTable) -> Sheet:
    """Return one row per line and one column per block, published values beside it."""
    key = _published_key(table)
    names: dict[tuple[str, str], Line] = {}
    for block in table.blocks:
        for line in block.lines:
            if not table.is_cost or line.is_main:
                names.setdefault((line.cell.row, line.model), line)
    titles = [""]
    columns: list[list[Entry]] = []
    for block in table.blocks:
        found = {(line.cell.row, line.model): line for line in block.lines}
        titles.append(block.name)
        columns.append(
            [
                _main_entry(table, block, found[name])
                if name in found
                else Entry(NOTHING)
                for name in names
            ]
        )
        published = [
            _published(found[name], key) if name in found else "" for name in names
        ]
        if any(published) and not table.is_cost:
            titles.append("published")
            columns.append([Entry(text) for text in published])
    rows = [
        [
            Entry(table.label(line.name if not table.is_cost else line.cell.row)),
            *entries,
        ]
        for line, entries in zip(
            names.values(), zip(*columns, strict=True), strict=True
        )
    ]
    return Sheet("", titles, rows)


def _summary(table: ResultsTable) -> Sheet:
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
    titles = ["", "average rank", "best or tied"]
    if control:
        titles += [f"above {control}", f"tied with {control}", "undecided"]
        titles += [f"below {control}"]
    sheet = []
    for name in names:
        found = rows[name]
        top = sum(  # any model of the row
            any(
                other is block.best or _ties(table.versus(other, block.best))
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
            for kind in ("above", "tied", "undecided", "below"):
                number = sum(_is(versus, kind) for versus in verdicts)
                cells.append(str(number) if verdicts else "")
        for metric in ("bytes_up", "bytes_down", "seconds"):
            values = [v for _, line in found for v in table.values(line, metric)]
            cells.append(_cost(metric, values))
        sheet.append([Entry(name), *(Entry(text) for text in cells)])
    return Sheet("", [*titles, "upload", "download", "time"], sheet)


def _owners(table: ResultsTable, block: Block) -> list[Sheet]:
    """Return the test scores of each owner, and their gains over the control.

    Raises
    ------
    ConfigError
        If the cells have no such score of natural owners.
    """
    metric = table.metric.removeprefix("mean_")
    found: dict[str, dict[str, dict[Key, float]]] = {}
    draws: dict[str, list[list[float]]] = {}
    for line in block.lines:
        for draw in line.cell.draws:
            scored = {
                name: scores[metric]
                for name, scores in draw.owners.get(line.model, {}).items()
                if metric in scores
            }
            for name, score in scored.items():
                of_owner = found.setdefault(line.name, {}).setdefault(name, {})
                of_owner[draw.key] = score
            if scored:
                draws.setdefault(line.name, []).append(list(scored.values()))
    lines = [line for line in block.lines if line.name in found]
    if not lines:
        raise ConfigError(
            f'layout = "owners" needs "{metric}" of natural owners, which no cell of '
            f'"{block.name}" has. Use --metric accuracy or auroc, and cells of runs with '
            "owners."
        )
    names = list(dict.fromkeys(name for line in lines for name in found[line.name]))
    kind = TITLES.get(metric, metric)
    rows = []
    for line in lines:
        values = {name: list(x.values()) for name, x in found[line.name].items()}
        means = {name: fmean(x) for name, x in values.items()}
        rows.append(
            [
                Entry(table.label(line.name)),
                *(Entry(_score(values.get(name, []))) for name in names),
                Entry(_score([fmean(scores) for scores in draws[line.name]])),
                Entry(_score([min(scores) for scores in draws[line.name]])),
                Entry(min(means, key=lambda name: means[name])),
            ]
        )
    titles = ["", *names, "mean", "lowest of a draw", "worst owner"]
    sheets = [Sheet(f"{block.name}: test {kind}", titles, rows)]
    if block.control is None or block.control.name not in found:
        return sheets
    base = found[block.control.name]
    gains = [
        [Entry(table.label(line.name)), *_owner_gains(base, found[line.name], names)]
        for line in lines
        if line is not block.control and _shared_draws(base, found[line.name])
    ]
    caption = f"{block.name}: gain over {table.label(block.control.name)}"
    return [*sheets, Sheet(caption, ["", *names, "mean", "owners that gain"], gains)]


def _shared_draws(base: OwnerScores, other: OwnerScores) -> dict[str, list[Key]]:
    """Return the draws in which both rows score an owner, by owner that has any."""
    shared = {
        name: [key for key in scores if key in base.get(name, {})]
        for name, scores in other.items()
    }
    return {name: keys for name, keys in shared.items() if keys}


def _owner_gains(
    base: OwnerScores, other: OwnerScores, names: Sequence[str]
) -> list[Entry]:
    """Return the gain of each owner, their mean, and how many owners gain."""
    gains = {
        name: {key: other[name][key] - base[name][key] for key in keys}
        for name, keys in _shared_draws(base, other).items()
    }
    means = {name: fmean(values.values()) for name, values in gains.items()}
    draws = {tuple(values) for values in gains.values()}
    overall = [fmean(means.values())]
    if len(draws) == 1:  # each draw has all owners
        overall = [fmean(g[key] for g in gains.values()) for key in draws.pop()]
    return [
        *(Entry(_gain(list(gains.get(name, {}).values()))) for name in names),
        Entry(_gain(overall)),
        Entry(f"{sum(mean > 0 for mean in means.values())} of {len(means)}"),
    ]


def _gain(values: Sequence[float]) -> str:
    """Return mean ± standard deviation of differences, in points with their sign."""
    if not values:
        return NOTHING
    text = f"{100 * fmean(values):+.2f}".replace("-", "−")
    return f"{text} ± {100 * stdev(values):.2f}" if len(values) > 1 else text


def _ties(versus: PairedTest | None) -> bool:
    """Return whether a difference of one point is excluded, as ≈ marks it."""
    return versus is not None and versus.is_tied


def _is(versus: PairedTest | None, kind: str) -> bool:
    """Return whether a comparison has a verdict; a significant one is not ``tied``."""
    if versus is None or versus.why_not:
        return False
    if kind == "tied":
        return versus.is_tied and not versus.is_significant
    if kind == "undecided":
        return versus.is_undecided
    sign = 1 if kind == "above" else -1
    return versus.is_significant and versus.difference * sign > 0


def _full(table: ResultsTable, block: Block) -> Sheet:
    """Return the table of one block with all scores, costs and comparisons."""
    lines = block.lines
    columns: list[tuple[str, list[Entry]]] = []

    def add(title: str, entries: Sequence[Entry]) -> None:
        if any(entry.text not in ("", NOTHING) for entry in entries):
            columns.append((title, list(entries)))

    main = _published_key(table)
    for metric, column, title, key in _shown(table):
        if (metric, column) == (table.metric, table.column):
            add(title, [_main_entry(table, block, line) for line in lines])
        else:
            add(title, [Entry(_score(table.values(x, metric, column))) for x in lines])
        if key and (key != main or metric == table.metric):
            add("published", [Entry(_published(line, key)) for line in lines])
    for column, name in SETTING_COLUMNS.items():
        pools = [Entry(_pooled(line.cell.pooled(line.model, column))) for line in lines]
        if column != "test_masked":  # the test nodes once more
            add(f"{name}, pooled", pools)
    for metric, name in (("bytes_up", "upload"), ("bytes_down", "download")):
        add(name, [Entry(_cost(metric, table.values(x, metric))) for x in lines])
    add("time", [Entry(_cost("seconds", table.values(x, "seconds"))) for x in lines])
    others = {"the best": block.best}
    if block.control is not None:
        others = {table.label(block.control.cell.row): block.control, **others}
    for name, other in others.items():
        texts = [Entry(_comparison(table, line, other)) for line in lines]
        add(f"against {name}", texts)
    rows = [
        [Entry(table.label(line.name)), *(entries[k] for _, entries in columns)]
        for k, line in enumerate(lines)
    ]
    return Sheet(block.name, ["", *(name for name, _ in columns)], rows)


def _shown(table: ResultsTable) -> list[tuple[str, str, str, str]]:
    """Return metric, node set, title and key of published values of the scores."""
    title = f"{table.column} {TITLES.get(table.metric, table.metric)}"
    main = (table.metric, table.column, title, _published_key(table))
    out = [] if table.is_cost else [main]
    for metric in ("accuracy", "macro_f1", "micro_f1", "auroc", "auprc"):
        key = metric if table.column == "test" else ""
        out.append((metric, table.column, TITLES[metric], key))
    for column, name in SETTING_COLUMNS.items():
        out.append(("accuracy", column, name, column))
    worst = "worst_auroc" if table.metric == "auroc" else "worst_accuracy"
    out.append((worst, table.column, TITLES[worst], ""))
    return out[:1] + [entry for entry in out[1:] if entry[:2] != out[0][:2]]


def _comparison(table: ResultsTable, line: Line, other: Line | None) -> str:
    """Return the verdict on a line against another one."""
    if line is other:
        return ""
    versus = table.versus(line, other)
    return NOTHING if versus is None else str(versus)


def _markdown(sheets: Sequence[Sheet], notes: Sequence[str]) -> str:
    """Return Markdown tables, and the notes as a list."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    parts = []
    for sheet in sheets:
        lines = (
            [f"**{sheet.caption}**", ""] if sheet.caption and len(sheets) > 1 else []
        )
        lines += [line(sheet.titles), "|---" * len(sheet.titles) + "|"]
        for row in sheet.rows:
            lines.append(line([f"**{e.text}**" if e.is_best else e.text for e in row]))
        parts.append("\n".join(lines))
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"


LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "≈": r"$\approx$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "−": "$-$",
    "–": "--",
    "α": r"$\alpha$",
    "μ": r"$\mu$",
    "²": "$^2$",
}


def _latex(sheets: Sequence[Sheet], notes: Sequence[str]) -> str:
    """Return tables for the package booktabs, with the notes below each."""

    def escape(text: str) -> str:
        return "".join(LATEX.get(character, character) for character in text)

    parts = []
    for sheet in sheets:
        lines = [r"\begin{table}", r"\centering"]
        lines += [rf"\caption{{{escape(sheet.caption)}}}"] if sheet.caption else []
        width = len(sheet.titles) - 1
        lines += [rf"\begin{{tabular}}{{l{'r' * width}}}", r"\toprule"]
        lines += [" & ".join(map(escape, sheet.titles)) + r" \\", r"\midrule"]
        for row in sheet.rows:
            cells = [
                rf"\textbf{{{escape(e.text)}}}" if e.is_best else escape(e.text)
                for e in row
            ]
            lines.append(" & ".join(cells) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}"]
        if sheet is sheets[-1] and notes:
            text = " ".join(escape(note) for note in notes)
            lines += [r"\par\smallskip", rf"{{\footnotesize {text}}}"]
        parts.append("\n".join([*lines, r"\end{table}"]))
    return "\n\n".join(parts) + "\n"


def _html(sheets: Sequence[Sheet], notes: Sequence[str]) -> str:
    """Return HTML tables, and the notes as a list."""
    parts = []
    for sheet in sheets:
        caption = f"<caption>{html.escape(sheet.caption)}</caption>"
        head = "".join(f"<th>{html.escape(title)}</th>" for title in sheet.titles)
        lines = [f"<table>{caption if sheet.caption else ''}"]
        lines.append(f"<thead><tr>{head}</tr></thead>")
        lines.append("<tbody>")
        for row in sheet.rows:
            texts = [
                f"<b>{html.escape(e.text)}</b>" if e.is_best else html.escape(e.text)
                for e in row
            ]
            cells = "".join(f"<td>{text}</td>" for text in texts[1:])
            lines.append(f"<tr><th>{texts[0]}</th>{cells}</tr>")
        parts.append("\n".join([*lines, "</tbody>", "</table>"]))
    if notes:
        listed = "\n".join(f"<li>{html.escape(note)}</li>" for note in notes)
        parts.append(f"<ul>\n{listed}\n</ul>")
    return "\n".join(parts) + "\n"


def _csv(table: ResultsTable) -> str:
    """Return one line per block and line, with numbers in full."""
    scores = [metric for metric in TITLES if metric != table.metric]
    columns = [c for c in ("test", *SETTING_COLUMNS) if c != table.column]
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
            main = f"{table.column}_{table.metric}"
            shown = {main: table.values(line)}
            for metric in scores:
                shown[f"{table.column}_{metric}"] = table.values(line, metric)
            for column in columns:
                shown[f"{column}_accuracy"] = table.values(line, "accuracy", column)
            for metric in ("bytes_up", "bytes_down", "seconds"):
                shown[metric] = table.values(line, metric)
            for name, values in shown.items():
                row[f"{name}_mean"] = fmean(values) if values else ""
                row[f"{name}_std"] = stdev(values) if len(values) > 1 else ""
            percent = _published_value(line, _published_key(table))
            row["published"] = "" if percent is None else round(percent / 100, 6)
            for name, other in (("control", block.control), ("best", block.best)):
                versus = table.versus(line, other)
                row[name] = other.name if other is not None else ""
                row[f"minus_{name}"] = "" if versus is None else versus.difference
                row[f"p_{name}"] = "" if versus is None else versus.p
                equivalent = "" if versus is None else versus.p_equivalent
                row[f"p_tied_{name}"] = equivalent
                detectable = "" if versus is None else versus.detectable
                row[f"detectable_{name}"] = detectable
            rows.append(row)
    kept = [key for key in rows[0] if any(row[key] != "" for row in rows)]
    out = io.StringIO()
    writer = csv.DictWriter(out, kept, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


FORMATS: Mapping[str, Callable[[Sequence[Sheet], Sequence[str]], str]] = {
    "markdown": _markdown,
    "latex": _latex,
    "html": _html,
    "csv": lambda sheets, notes: "",  # made from the table itself
}
