"""Rows of a CSV table, and its cells as text, float32 features, labels and numbers.

``label:NAME`` holds 1, 0, or nothing if that is unknown; ``target:NAME`` (of nodes and
graphs also ``target`` alone) holds a number, or nothing. ``targets.csv`` may list ``name``
and ``unit`` of the numbers, and numbers that no item has.
"""

from __future__ import annotations

import csv
import itertools
import math
import os
import re
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flower_fgl.core.agreement import marks_unknown
from flower_fgl.core.errors import (
    DataError,
    ErrorCollector,
    clip,
    first_of,
    has_control_characters,
    show_path,
)
from flower_fgl.core.held_kind import LABEL, TARGET, kind_of_column
from flower_fgl.datasets.graph_files.archive import Array
from flower_fgl.datasets.graph_files.own_split import PARTS, is_plain_word, split_names
from flower_fgl.datasets.graph_files.validate import (
    LONGEST_NAME,
    equal_cells,
    inexact_columns,
)

__all__ = [
    "Table",
    "TargetColumns",
    "Wanted",
    "csv_cells",
    "csv_rows",
    "read_columns",
    "read_finite",
    "read_number",
    "read_table",
    "target_columns",
]


BOOLEANS = {"True": 1.0, "TRUE": 1.0, "true": 1.0}
BOOLEANS |= {"False": 0.0, "FALSE": 0.0, "false": 0.0}
COMMAS = re.compile(r"[+-]?[0-9][0-9.]*(,[0-9]+)+(\.[0-9]*)?")
NUMBER = r"\s*[+-]?[0-9][0-9.,]*\s*"
MEASURE = re.compile(rf"[<>=~≤≥$€£]+{NUMBER}[%$€£]?|{NUMBER}[%$€£]")
"""A number with a sign of comparison, percent or currency."""
DATE = re.compile(r"\d{4}[-/.]\d\d?[-/.]\d|\d\d?[-/.]\d\d?[-/.]\d\d")
"""Start of a date: year first, or day and month first."""
BLOCK_CELLS = 1 << 20
"""Cells that are converted to float32 at once."""
MOST_FAULTS = 20
"""Faulty feature columns that are reported."""
NO_LABELS = (
    ' Cells of label may be empty; with setting = "link" or "edge" the column may be '
    "missing. In its place label:NAME holds several labels, and target or target:NAME "
    "numbers."
)


@dataclass
class Table:
    """Content of ``nodes.csv`` or ``edges.csv``; a missing text column is empty.

    ``parts`` has the text column of each part of the split, if each has its own, and
    ``targets`` those of labels or numbers. ``inexact`` are the features with a whole
    number that float32 does not hold.
    """

    path: Path
    header: list[str]
    feature_names: list[str]
    text: dict[str, list[str]]
    parts: dict[str, str]
    targets: TargetColumns
    lines: array[int] = field(default_factory=lambda: array("q"))
    blocks: list[Array] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    inexact: set[int] = field(default_factory=set)

    @property
    def where(self) -> str:
        """The path for messages."""
        return show_path(self.path)

    def cells(self, column: str) -> zip[tuple[int, str]]:
        """Return line number and text of each row."""
        return zip(self.lines, self.text[column], strict=True)

    def numbers(
        self,
        column: str,
        read: Callable[[str], float | None],
        fault: Callable[[str], str],
    ) -> Array:
        """Return a text column as numbers, (N,); name the line of the first that is none.

        ``read`` returns ``None`` for a cell that is none, and ``fault`` what is wrong.
        """
        values = list(map(read, self.text[column]))
        if None in values:
            row = values.index(None)
            cell = self.text[column][row]
            raise DataError(f"{self.where}, line {self.lines[row]}{fault(cell)}")
        return np.array(values)

    def features(self, attempt: ErrorCollector) -> Array | None:
        """Return the feature columns as float32, shape (N, d); report faulty columns."""
        if self.inexact:
            _note_equal_numbers(self)
        for column, fault in sorted(self.faults.items())[:MOST_FAULTS]:
            name = clip(self.feature_names[column])
            attempt.add(f"{self.where}, {fault.replace('{}', name, 1)}")
        if not self.feature_names:
            return np.zeros((len(self.lines), 0), dtype=np.float32)
        return None if self.faults else np.concatenate(self.blocks)


def read_table(
    path: Path,
    required: Sequence[str],
    text_columns: Sequence[str],
    *,
    items: str = "nodes",
    needs_features: bool = True,
    target_kind: str | None = None,
) -> Table:
    """Read a table; convert features to numbers, and note faulty columns.

    ``target_kind`` is as in :func:`target_columns`, by default there are no such columns.
    """
    rows = csv_rows(path, required)
    _, header = next(rows)
    is_nodes = "id" in required
    targets = TargetColumns()
    if target_kind is not None:
        targets = target_columns(path, header, target_kind, of_edges=not is_nodes)
    text_columns = (*text_columns, *targets.read, *targets.unread)
    parts = _split_columns(header, text_columns, path)
    text_columns = (*text_columns, *parts.values())
    places = {c: header.index(c) for c in text_columns if c in header}
    columns = [i for i, c in enumerate(header) if c not in text_columns]
    names = [header[i] for i in columns]
    table = Table(path, header, names, {c: [] for c in text_columns}, parts, targets)
    if is_nodes and needs_features and not columns:
        raise DataError(
            f"{table.where} has no feature column besides id, label and split. Add one."
        )
    pick = itemgetter(*columns) if len(columns) > 1 else None
    texts = [(table.text[column], i) for column, i in places.items()]
    values = array("d")
    for line, row in rows:
        table.lines.append(line)
        for column, i in texts:
            cell = row[i].strip()
            # rows of one graph repeat its id: one object for all
            column.append(column[-1] if column and column[-1] == cell else cell)
        cells = pick(row) if pick is not None else [row[i] for i in columns]
        _append_numbers(values, cells, table.faults, line)
        if len(values) >= BLOCK_CELLS:
            _append_block(table, values)
            values = array("d")
    _append_block(table, values)
    if is_nodes and not table.lines:
        one = items.removesuffix("s")
        raise DataError(f"{table.where} holds no {items}. Add one line per {one}.")
    return table


def csv_rows(
    path: Path, required: Sequence[str], *, more: bool = True
) -> Generator[tuple[int, list[str]]]:
    """Yield the header, then each row that is not blank, with its line number.

    Without ``more`` there may be no other columns.
    """
    where = show_path(path)
    if os.path.isdir(path):
        raise DataError(
            f"{where} is a folder, but must be a CSV file with the columns "
            f"{', '.join(required)}."
        )
    if not os.path.isfile(path):
        raise DataError(
            f"{where} is missing. Provide it with the columns {', '.join(required)}."
        )
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = [cell.strip() for cell in next(reader, [])]
            _check_header(header, required, where, more=more)
            yield 1, header
            key, width = header.index(required[0]), len(header)
            line = reader.line_num
            for row in reader:
                first, line = line + 1, reader.line_num
                if len(row) > width:
                    raise ValueError(
                        f"line {first} has {len(row)} cells, the header {width}"
                    )
                if len(row) < width:  # spreadsheets omit empty cells at the end
                    row += [""] * (width - len(row))
                if row[key].strip() or any(map(str.strip, row)):
                    yield first, row
    except DataError:
        raise
    except OSError as error:
        raise DataError(
            f"Cannot read {where}: {error.strerror}. Check the permissions of the file."
        ) from error
    except (ValueError, csv.Error) as error:  # UnicodeDecodeError is a ValueError
        raise DataError(
            f"{where} is not a CSV table in UTF-8 with one header line: "
            f"{clip(error, 200)}. Export it again as CSV."
        ) from error


def csv_cells(
    path: Path, columns: Sequence[str], *, more: bool = True
) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and text of some columns of each row, as :func:`csv_rows`."""
    rows = csv_rows(path, columns, more=more)
    _, header = next(rows)
    places = [header.index(column) for column in columns]
    for line, row in rows:
        yield line, [row[place].strip() for place in places]


def _check_header(
    header: list[str], required: Sequence[str], where: str, *, more: bool
) -> None:
    """Check the names of the columns; labels or numbers may replace ``label``."""
    odd = [mark for mark in ";\t" if any(mark in column for column in header)]
    missing = set(required).difference(header)
    if any(c == ALONE or (":" in c and _is_similar(c)) for c in header):
        missing -= {"label"}
    if odd and missing:
        found = "semicolons" if odd[0] == ";" else "tabs"
        raise DataError(
            f"{where}: the columns {', '.join(required)} are separated by {found}. "
            "Separate the columns with commas, and write decimals with a point."
        )
    if missing or len(set(header)) < len(header):
        raise DataError(
            f"{where}: the columns must be {', '.join(required)}"
            + (" and features, each once" if more else ", each once")
            + f"; got {clip(', '.join(header), 200) or 'none'}."
            + NO_LABELS * ("label" in required and "label" not in header)
        )
    for number, name in enumerate(header, start=1):
        if not name or len(name) > LONGEST_NAME or has_control_characters(name):
            raise DataError(
                f'{where}: column {number} has the name "{clip(name)}", expected one line '
                f"of 1 to {LONGEST_NAME} characters. Name it, or remove the column."
            )
    surplus = [column for column in header if column not in required]
    if surplus and not more:
        raise DataError(
            f"{where}: expected the columns {', '.join(required)} and no others. Remove "
            f"{clip(', '.join(surplus), 200)}, which would not be read."
        )


def _append_numbers(
    values: array[float], cells: Sequence[str], faults: dict[int, str], line: int
) -> None:
    """Append the numbers of one row; note the first fault of each column."""
    joined = "".join(cells)
    start = len(values)
    # float also reads 1_000 and other digits
    if joined.isascii() and "_" not in joined:
        try:
            values.extend(map(float, cells))
            return
        except ValueError:
            del values[start:]
    for i, cell in enumerate(cells):
        value = read_number(cell)
        if value is None:
            faults.setdefault(i, f'line {line}, column "{{}}": expected a number, got '
                              f'"{clip(cell)}". {_remedy(cell.strip())}')  # fmt: skip
        values.append(0.0 if value is None else value)


def _remedy(cell: str) -> str:
    """Say how to make numbers of a column with such a cell."""
    if not cell or marks_unknown(cell):
        return (
            "Fill empty cells in one way at all owners, e.g. with the median of all, and "
            'mark them in a column of their own: flower-fgl prepare, missing = "median".'
        )
    if COMMAS.fullmatch(cell):
        return "Write decimals with a point, and thousands without a separator."
    if DATE.match(cell):
        return (
            "Write dates as numbers, e.g. days since the same day at all owners: "
            'flower-fgl prepare, kind "date".'
        )
    if MEASURE.fullmatch(cell):
        return "Write the number alone, in one unit at all owners."
    return (
        "If the column holds words, write one column of 0 and 1 for each, the same ones at "
        'all owners: flower-fgl prepare, kind "category". Leave out ids and names.'
    )


def read_number(cell: str) -> float | None:
    """Return a cell as a number, ``None`` if it is none."""
    text = cell.strip()
    if not text.isascii() or "_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        return BOOLEANS.get(text)


def read_finite(cell: str) -> float | None:
    """Return a cell as a finite number, ``None`` if it is none."""
    value = read_number(cell)
    return value if value is not None and math.isfinite(value) else None


def _append_block(table: Table, values: array[float]) -> None:
    """Convert numbers to float32; note values that are not finite there."""
    if not table.feature_names:
        return
    wide = np.frombuffer(values, dtype=np.float64).reshape(-1, len(table.feature_names))
    with np.errstate(over="ignore", invalid="ignore"):  # becomes inf, noted below
        block = wide.astype(np.float32)
    table.blocks.append(block)
    table.inexact |= inexact_columns(wide, block)
    if np.isfinite(block).all():
        return
    first = sum(map(len, table.blocks[:-1]))
    for row, column in np.argwhere(~np.isfinite(block)).tolist():
        table.faults.setdefault(
            column,
            f'line {table.lines[first + row]}, column "{{}}": expected a finite number, '
            f"got {wide[row, column]}."
            + (f" {_remedy('')}" if np.isnan(wide[row, column]) else ""),
        )


def _note_equal_numbers(table: Table) -> None:
    """Read a table again, and note columns in which two numbers became one."""
    rows = csv_rows(table.path, (next(iter(table.text)),))
    _, header = next(rows)
    inexact = sorted(table.inexact - table.faults.keys())
    columns = {header.index(table.feature_names[column]): column for column in inexact}
    for place, fault in equal_cells(rows, columns).items():
        table.faults[columns[place]] = f'column "{{}}": {fault}'


def _split_columns(
    header: list[str], text_columns: Sequence[str], path: Path
) -> dict[str, str]:
    """Return the columns that hold one part of the split each; empty if none does."""
    parts, whole = split_names(c for c in header if c not in text_columns)
    found = [*itertools.chain(*parts.values()), *whole]
    if "split" in header:  # then words such as test and set are features
        if others := [name for name in found if not is_plain_word(name)]:
            raise DataError(
                f"{show_path(path)} has the column split, but also {_quote(others)}, "
                "which looks like a split too. Remove one of them, or rename it if it is "
                "a feature."
            )
        return {}
    is_complete = sorted(map(len, parts.values())) == [1] * len(PARTS)
    if whole or (found and not is_complete):
        raise DataError(
            f"{show_path(path)}: {_quote(found)} looks like a split, which cannot be read "
            "in this form. Write one column split (train, val, test or empty), or three "
            "columns train_mask, val_mask and test_mask (0 or 1). If it is a feature, "
            "rename it"
            + (
                ", or add a column split, whose cells may be empty."
                if all(map(is_plain_word, found))
                else "."
            )
        )
    return {part: names[0] for part, names in parts.items()}


def _quote(names: Sequence[str]) -> str:
    """Return the first names for a message."""
    return first_of([f'"{clip(name)}"' for name in names])


ALONE = "target"


class TargetColumns(NamedTuple):
    """Columns of labels or numbers to read, none for classes, and those of other kinds.

    ``why`` says which kind the run predicts, if others are not read.
    """

    read: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Wanted:
    """What to read of a graph file.

    Parameters
    ----------
    needs_labels : bool
        Whether to read labels, classes and split. If not, they may be missing: every label
        is -1, and there is one class with an empty name.
    scores_edges : bool
        Whether edges are to be scored. Their features and times are then read without
        their classes, whose number is 0 where a label is known, else -1.
    target_kind : {"auto", "classes", "labels", "numbers"}
        What to read of tables that hold several kinds of targets; an error by default.
    target_node, target_relation : str
        In a typed graph the kind of nodes, and the relation whose edges are predicted, see
        :meth:`.Schema.to_predict`; by default the only one with labels.
    """

    needs_labels: bool = True
    scores_edges: bool = False
    target_kind: str = "auto"
    target_node: str = ""
    target_relation: str = ""

    @property
    def kind_of_nodes(self) -> str:
        """The ``target_kind`` of nodes or graphs; empty if none is predicted."""
        return self.target_kind if self.needs_labels else ""


def target_columns(
    path: Path, header: Sequence[str], kind: str, *, of_edges: bool
) -> TargetColumns:
    """Return the columns of labels or numbers in the header of a table.

    Of columns of several kinds, those of ``kind`` are read; ``auto`` is an error then, and
    with an empty text, where no column is predicted, all labels and numbers are returned.
    """
    kinds = {c: kind_of_column(c, of_edges=of_edges) for c in header}
    held = [c for c in header if kinds[c]]
    found = [c for c in held if c != "label"]
    _reject_similar(path, header, found, of_edges=of_edges)
    several = list(dict.fromkeys(str(kinds[c]) for c in held))
    if len(several) > 1 and kind and kind not in several:
        able = " or ".join(f'"{one}"' for one in several)
        raise DataError(
            f"{show_path(path)} has the columns {clip(', '.join(held), 200)}, of several "
            f"kinds. Set target-kind = {able} to choose, or give a feature another name."
        )
    if nameless := [c for c in found if c in (LABEL, TARGET)]:
        raise DataError(
            f'{show_path(path)}: the column "{nameless[0]}" has no name. Write '
            f"{nameless[0]}NAME."
        )
    if len(several) < 2 or not kind:
        return TargetColumns(tuple(found))
    read = tuple(c for c in found if kinds[c] == kind)
    unread = tuple(c for c in held if kinds[c] != kind)
    names = clip(", ".join(unread), 200)
    why = f"{names} will not be read: the run predicts {kind}."
    return TargetColumns(read, unread, why)


def _reject_similar(
    path: Path, header: Sequence[str], found: Sequence[str], *, of_edges: bool
) -> None:
    """Reject a target that would be a feature, because its name is spelled otherwise."""
    if "label" in header and not found:
        return
    for column in header:
        is_other = column in ("label", *found) or (of_edges and column == ALONE)
        if _is_similar(column) and (":" in column or found) and not is_other:
            form = "target:NAME" if of_edges else "label:NAME or target:NAME"
            raise DataError(
                f'{show_path(path)}: the column "{clip(column)}" is not read as a target. '
                f"Write {form} if it is one, else give it another name."
            )


def _is_similar(column: str) -> bool:
    """Return whether a column has the name of a target, in any spelling."""
    return column.partition(":")[0].strip().casefold() in ("label", "target")


def read_columns(table: Table, folder: Path) -> dict[str, Array]:
    """Return labels or numbers, and their names, as of nodes in an ``.npz`` file.

    ``folder`` may hold ``targets.csv``.
    """
    columns = table.targets.read
    are_labels = columns[0].startswith(LABEL)
    names = [c if c == ALONE else c.partition(":")[2].strip() for c in columns]
    cells = np.array([_values(table, c, are_labels=are_labels) for c in columns]).T
    if are_labels:
        whole = np.where(np.isnan(cells), -1, cells).astype(np.int8)
        return {"y": whole, "label_names": np.array(names, dtype=np.str_)}
    units = _units(folder / "targets.csv")
    if missing := [name for name in units if name not in names]:
        names += missing
        unknown = np.full((len(cells), len(missing)), np.nan)
        cells = np.concatenate([cells, unknown], axis=1)
    arrays = {"y": cells, "target_names": np.array(names, dtype=np.str_)}
    if any(units.values()):
        unit = np.array([units.get(name, "") for name in names], dtype=np.str_)
        arrays["target_units"] = unit
    return arrays


def _values(table: Table, column: str, *, are_labels: bool) -> Array:
    """Return the numbers of a column, NaN for an empty cell."""
    what = "0 or 1" if are_labels else "a finite number"

    def read(cell: str) -> float | None:
        value = read_finite(cell) if cell else math.nan
        return None if are_labels and cell and value not in (0.0, 1.0) else value

    return table.numbers(
        column,
        read,
        lambda cell: (
            f', column "{clip(column)}": expected {what}, or an empty cell if it '
            f'is unknown, got "{clip(cell)}".'
        ),
    )


def _units(path: Path) -> dict[str, str]:
    """Return the unit of each number in ``targets.csv``, empty without the table."""
    found: dict[str, str] = {}
    if not os.path.exists(path):
        return found
    for line, (name, unit) in csv_cells(path, ("name", "unit"), more=False):
        if not name or name in found:
            raise DataError(
                f"{show_path(path)}, line {line}: the name is empty, or given twice. Name "
                "each target once."
            )
        found[name] = unit
    return found
