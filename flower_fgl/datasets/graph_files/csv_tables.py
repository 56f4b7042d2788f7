"""Reader of a graph stored as a folder of CSV tables, e.g. from a spreadsheet.

``nodes.csv``
    ``id`` (any text, unique), ``label`` (class name, empty if unknown), and optionally
    ``split`` (``train``, ``val``, ``test`` or empty; if all are empty there is no split),
    or three columns such as ``train_mask``, ``val_mask`` and ``test_mask`` (0 or 1).
    Every other column is a feature. Beside ``split`` words such as ``test`` and ``set`` are
    features too, as in a bag of words; without it they are read as a split, or refused.
``edges.csv``
    ``source`` and ``target``: ids of nodes; one direction is enough. To classify edges, it
    also has ``label`` (class name, empty if unknown), and optionally ``time`` (a number,
    ascending) and a split as in ``nodes.csv``. Every other column is then a feature of
    the edges. Edges have a direction in this case, and may be repeated.
``classes.csv``
    Optional: ``name``, one class per line. By default the classes are the sorted labels
    of ``nodes.csv``, and a label such as ``unknown`` or ``NA`` is an error, and so are ids
    in place of classes. A label that is listed here is a class. The server agrees with all
    data owners on one numbering, by name.
``edge_classes.csv``
    Optional: the same for the labels of ``edges.csv``.
``outside.csv``
    Optional: ``source``, the id of a node in ``nodes.csv``, and ``target``, the id of a
    node of another data owner, as in that owner's ``nodes.csv``. Only methods that use
    edges between owners read it.
``prepared.csv``
    Optional, written by ``flower-fgl prepare``: ``sha256``, the hash of its recipe and
    vocabulary, which owners compare.

Blank lines and spaces around text are ignored. Rows are converted one by one, so that
memory and time grow with the number of cells, however wide a table is.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import os
import re
from array import array
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch

from flower_fgl.core.class_names import marks_unknown
from flower_fgl.core.errors import DataError
from flower_fgl.datasets.graph_files.archive import Array
from flower_fgl.datasets.graph_files.own_split import (
    is_plain_word,
    part_of_split,
    split_names,
)
from flower_fgl.datasets.graph_files.precision import equal_cells, inexact_columns
from flower_fgl.datasets.graph_files.problems import (
    ErrorCollector,
    clip,
    has_control_characters,
    show_path,
)
from flower_fgl.datasets.graph_files.validate import (
    LONGEST_NAME,
    check_class_names,
    doubtful_labels,
)

__all__ = ["hash_ids", "read_csv_folder"]

SPLITS = ("train", "val", "test")
TEXT_COLUMNS = ("id", "label", "split")
EDGE_COLUMNS = ("source", "target", "label", "time", "split")
BOOLEANS = {"True": 1.0, "TRUE": 1.0, "true": 1.0}
BOOLEANS |= {"False": 0.0, "FALSE": 0.0, "false": 0.0}
DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")
DATE = re.compile(r"\d{4}[-/.]\d\d?[-/.]\d|\d\d?[-/.]\d\d?[-/.]\d\d")
"""Start of a date: year first, or day and month first."""
BLOCK_CELLS = 1 << 20
"""Cells that are converted to float32 at once."""
MOST_FAULTS = 20
"""Faulty feature columns that are reported."""
MOST_NAMES = 5
"""Columns that one message names."""
NO_LABELS = (
    ' Cells of label may be empty; with setting = "link" or "edge" the column may be '
    "missing."
)


def read_csv_folder(
    folder: Path, *, needs_labels: bool = True, attempts: ErrorCollector | None = None
) -> dict[str, Array]:
    """Read the tables into arrays named as in an ``.npz`` graph file.

    Without ``needs_labels``, labels, classes and split are not read and may be missing. By
    default the first error is raised; arrays with an error that ``attempts`` has collected
    are missing in the result.

    Returns
    -------
    dict of str to array
        ``x``, ``feature_names`` (its columns in the header), ``edges`` and ``names`` (the
        ids as text), with nodes in the order of the table. Labels add ``y``,
        ``class_names`` and ``declared_classes``, and a split adds ``train_mask``,
        ``val_mask`` and ``test_mask``. ``notes`` are sentences on how the tables were
        read. ``outside.csv`` adds ``outside_edges`` and ``outside_ids``. Labels of edges
        add ``edge_label``, ``edge_class_names``, ``edge_declared_classes``, ``edge_attr``
        and ``edge_attr_names``, and ``edge_time`` and the masks ``edge_train_mask`` etc.
        if there are such columns, whatever ``needs_labels`` is.

    Raises
    ------
    DataError
        If a table is missing or malformed, an id is empty, duplicate or unknown, a label
        is not in ``classes.csv``, or without that table is probably no class, a feature is
        not a finite number, two whole numbers of a feature are equal as float32, or a
        column looks like a split that cannot be read. The message names file, line and
        column.
    """
    attempt = attempts or ErrorCollector()
    path = folder / "nodes.csv"
    required = ("id", "label") if needs_labels else ("id",)
    nodes = attempt(_read_table, path, required, TEXT_COLUMNS)
    if nodes is None:
        return {}
    index = attempt(_index_ids, nodes, path)
    arrays: dict[str, Array | None] = {}
    if needs_labels:
        arrays |= attempt(_labels, nodes, path, folder / "classes.csv", "node") or {}
    arrays["x"] = _features(nodes, path, attempt)
    arrays["feature_names"] = np.array(nodes.feature_names, dtype=np.str_)
    if index is not None:
        arrays |= attempt(_edges, folder / "edges.csv", index, attempt) or {}
        arrays["names"] = np.array(nodes.text["id"], dtype=object)
        if os.path.exists(folder / "prepared.csv"):
            arrays["prepared"] = attempt(
                _single_cell, folder / "prepared.csv", "sha256"
            )
        if os.path.exists(folder / "outside.csv"):
            found = attempt(_outside_edges, folder / "outside.csv", index)
            arrays["outside_edges"] = found
            arrays["outside_ids"] = hash_ids(nodes.text["id"])
    if needs_labels:
        arrays |= attempt(_masks, nodes, path) or {}
    notes = [_split_note(nodes, path), arrays.get("notes")]
    arrays["notes"] = np.concatenate([note for note in notes if note is not None])
    return {key: array for key, array in arrays.items() if array is not None}


@dataclass
class _Table:
    """Content of ``nodes.csv`` or ``edges.csv``; a missing text column is empty.

    ``parts`` has the text column of each part of the split, if each has its own.
    ``inexact`` are the features with a whole number that float32 does not hold.
    """

    feature_names: list[str]
    text: dict[str, list[str]]
    parts: dict[str, str] = field(default_factory=dict)
    lines: list[int] = field(default_factory=list)
    blocks: list[Array] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    inexact: set[int] = field(default_factory=set)


def _rows(
    path: Path, required: Sequence[str], *, more: bool = True, more_with: str = ""
) -> Generator[tuple[int, list[str]]]:
    """Yield the header, then each row that is not blank, with its line number.

    Without ``more`` there may be other columns only if there is one named ``more_with``.
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
            is_open = more or bool(more_with and more_with in header)
            _check_header(header, required, where, more=is_open)
            if not is_open:
                _reject_surplus(header, required, where, more_with)
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


def _check_header(
    header: list[str], required: Sequence[str], where: str, *, more: bool
) -> None:
    """Check the names of the columns."""
    odd = [mark for mark in ";\t" if any(mark in column for column in header)]
    if odd and not set(required) <= set(header):
        found = "semicolons" if odd[0] == ";" else "tabs"
        raise DataError(
            f"{where}: the columns {', '.join(required)} are separated by {found}. "
            "Separate the columns with commas, and write decimals with a point."
        )
    if not set(required) <= set(header) or len(set(header)) < len(header):
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


def _reject_surplus(
    header: list[str], required: Sequence[str], where: str, more_with: str
) -> None:
    """Reject columns that would not be read."""
    surplus = [column for column in header if column not in required]
    if not surplus:
        return
    hint = (
        " Features, weights, types, times and a split of edges are read only together with "
        f'a column {more_with}, the class of each edge, and setting = "edge".'
    )
    raise DataError(
        f"{where}: expected the columns {', '.join(required)} and no others. Remove "
        f"{clip(', '.join(surplus), 200)}, which would not be read."
        + (hint if more_with else "")
    )


def _read_table(
    path: Path, required: Sequence[str], text_columns: Sequence[str]
) -> _Table:
    """Read ``nodes.csv`` or ``edges.csv``; convert features, and note faulty ones."""
    rows = _rows(path, required)
    _, header = next(rows)
    parts = _split_columns(header, text_columns, path)
    text_columns = (*text_columns, *parts.values())
    places = {c: header.index(c) for c in text_columns if c in header}
    columns = [i for i, c in enumerate(header) if c not in text_columns]
    table = _Table([header[i] for i in columns], {c: [] for c in text_columns}, parts)
    is_nodes = "id" in required
    if is_nodes and not columns:
        raise DataError(
            f"{show_path(path)} has no feature column besides id, label and split. Add one."
        )
    pick = itemgetter(*columns) if len(columns) > 1 else None
    texts = [(table.text[column], i) for column, i in places.items()]
    values = array("d")
    for line, row in rows:
        table.lines.append(line)
        for column, i in texts:
            column.append(row[i].strip())
        cells = pick(row) if pick is not None else [row[i] for i in columns]
        _append_numbers(values, cells, table.faults, line)
        if len(values) >= BLOCK_CELLS:
            _append_block(table, values)
            values = array("d")
    _append_block(table, values)
    if is_nodes and not table.lines:
        raise DataError(f"{show_path(path)} holds no nodes. Add one line per node.")
    return table


def _append_numbers(
    values: array[float], cells: Sequence[str], faults: dict[int, str], line: int
) -> None:
    """Append the numbers of one row; note the first fault of each column."""
    joined = "".join(cells)
    start = len(values)
    if (
        joined.isascii() and "_" not in joined
    ):  # float also reads 1_000 and other digits
        try:
            values.extend(map(float, cells))
            return
        except ValueError:
            del values[start:]
    for i, cell in enumerate(cells):
        value = _number(cell)
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
    if DECIMAL_COMMA.fullmatch(cell):
        return "Write decimals with a point."
    if DATE.match(cell):
        return (
            "Write dates as numbers, e.g. days since the same day at all owners: "
            'flower-fgl prepare, kind "date".'
        )
    return (
        "If the column holds words, write one column of 0 and 1 for each, the same ones at "
        'all owners: flower-fgl prepare, kind "category". Leave out ids and names.'
    )


def _number(cell: str) -> float | None:
    """Return a cell as a number, ``None`` if it is none."""
    text = cell.strip()
    if not text.isascii() or "_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        return BOOLEANS.get(text)


def _append_block(nodes: _Table, values: array[float]) -> None:
    """Convert numbers to float32; note values that are not finite there."""
    if not nodes.feature_names:
        return
    wide = np.frombuffer(values, dtype=np.float64).reshape(-1, len(nodes.feature_names))
    with np.errstate(over="ignore", invalid="ignore"):  # becomes inf, noted below
        block = wide.astype(np.float32)
    nodes.blocks.append(block)
    nodes.inexact |= inexact_columns(wide, block)
    if np.isfinite(block).all():
        return
    first = sum(map(len, nodes.blocks[:-1]))
    for row, column in np.argwhere(~np.isfinite(block)).tolist():
        nodes.faults.setdefault(
            column,
            f'line {nodes.lines[first + row]}, column "{{}}": expected a finite number, '
            f"got {wide[row, column]}."
            + (f" {_remedy('')}" if np.isnan(wide[row, column]) else ""),
        )


def _note_equal_numbers(table: _Table, path: Path) -> None:
    """Read a table again, and note columns in which two numbers became one."""
    rows = _rows(path, (next(iter(table.text)),))
    _, header = next(rows)
    inexact = sorted(table.inexact - table.faults.keys())
    columns = {header.index(table.feature_names[column]): column for column in inexact}
    for place, fault in equal_cells(rows, columns).items():
        table.faults[columns[place]] = f'column "{{}}": {fault}'


def _features(nodes: _Table, path: Path, attempt: ErrorCollector) -> Array | None:
    """Return the feature columns as float32, shape (N, d); report faulty columns."""
    if nodes.inexact:
        _note_equal_numbers(nodes, path)
    for column, fault in sorted(nodes.faults.items())[:MOST_FAULTS]:
        name = clip(nodes.feature_names[column])
        attempt(_raise_error, f"{show_path(path)}, {fault.replace('{}', name, 1)}")
    if not nodes.feature_names:
        return np.zeros((len(nodes.lines), 0), dtype=np.float32)
    return None if nodes.faults else np.concatenate(nodes.blocks)


def _raise_error(problem: str) -> None:
    """Raise a problem as a ``DataError``."""
    raise DataError(problem)


def _index_ids(nodes: _Table, path: Path) -> dict[str, int]:
    """Return the row of each node id; reject empty, duplicate and unprintable ids."""
    ids = nodes.text["id"]
    index = dict(zip(ids, range(len(ids)), strict=True))
    is_plain = "".join(ids).isprintable() and max(map(len, ids)) <= LONGEST_NAME
    if is_plain and "" not in index and len(index) == len(ids):
        return index
    count: Counter[str] = Counter()
    for line, name in zip(nodes.lines, ids, strict=True):
        where = f"{show_path(path)}, line {line}"
        if not name:
            raise DataError(f"{where}: the id is empty. Give each node an id.")
        if len(name) > LONGEST_NAME or has_control_characters(name):
            raise DataError(
                f'{where}: id "{clip(name)}" must be one line of at most {LONGEST_NAME} '
                "characters. Shorten it, or remove the control characters."
            )
        count[name] += 1
        if count[name] > 1:
            raise DataError(
                f'{where}: id "{clip(name)}" is already taken by a line above. Give each '
                "node its own id."
            )
    return index


def _labels(table: _Table, path: Path, listing: Path, item: str) -> dict[str, Array]:
    """Convert the labels to class numbers and class names."""
    label = table.text["label"]
    names = _class_names(label, path, listing, item)
    number = dict(zip(names, range(len(names)), strict=True)) | {"": -1}
    for line, name in zip(table.lines, label, strict=True):
        if name not in number:
            hint = "leave the cell empty if the class is unknown"
            raise DataError(
                f'{show_path(path)}, line {line}: class "{clip(name)}" is not in '
                f"{listing.name}. Add it there, or "
                f"{hint if marks_unknown(name) else 'correct the label'}."
            )
    y = np.array([number[name] for name in label], dtype=np.int64)
    if not os.path.exists(listing):
        doubt = doubtful_labels(
            torch.from_numpy(y),
            names,
            item=item,
            unknown="Leave the cell empty",
            declare=f"list all classes in {listing.name}",
        )
        if doubt:
            raise DataError(f"{show_path(path)}, column label: {doubt}")
    listed = np.array(names, dtype=np.str_)
    return {"y": y, "class_names": listed, "declared_classes": listed}


def _class_names(label: list[str], table: Path, path: Path, item: str) -> list[str]:
    """Return the classes in ``classes.csv``, or by default those of the labels."""
    if os.path.exists(path):
        rows = _rows(path, ("name",), more=False)
        next(rows)
        names = [row[0].strip() for _, row in rows]
        if not names or len(set(names)) < len(names):
            raise DataError(
                f"{show_path(path)} must name each class once, without empty or repeated "
                "names."
            )
        check_class_names(names, show_path(path))
        return names
    found = list(dict.fromkeys(name for name in label if name))
    where = show_path(table)
    if not found:
        raise DataError(
            f"{where}: no {item} has a label. List the classes in {path.name}."
        )
    check_class_names(found, f"{where}, column label")
    is_number = all(name.isdecimal() for name in found)
    return sorted(found, key=lambda n: (int(n), n) if is_number else (0, n))


def _edges(
    path: Path, index: dict[str, int], attempt: ErrorCollector
) -> dict[str, Array]:
    """Return the edges as row numbers of ``nodes.csv``, shape (M, 2), and their classes."""
    rows = _rows(path, ("source", "target"), more=False, more_with="label")
    _, header = next(rows)
    if "label" in header:
        rows.close()
        return _labelled_edges(path, index, attempt)
    ends = array("q")
    places = [header.index(column) for column in ("source", "target")]
    for line, row in rows:
        for place in places:
            node = index.get(row[place].strip(), -1)
            if node < 0:
                raise _unknown_end(row[place].strip(), header[place], path, line)
            ends.append(node)
    return {"edges": np.array(ends, dtype=np.int64).reshape(-1, 2)}


def _unknown_end(name: str, column: str, path: Path, line: int) -> DataError:
    """Return the error for an edge to a node that does not exist."""
    return DataError(
        f'{show_path(path)}, line {line}: {column} "{clip(name)}" is not an id in '
        "nodes.csv. Correct it, or add a line to nodes.csv. An edge to a node of another "
        "owner belongs into outside.csv, which fedgcn reads; or make it a node of this "
        'graph, with a column that flags it: flower-fgl prepare, foreign = "flag".'
    )


def _labelled_edges(
    path: Path, index: dict[str, int], attempt: ErrorCollector
) -> dict[str, Array]:
    """Return the arrays of an edge table with a column ``label``."""
    table = _read_table(path, ("source", "target", "label"), EDGE_COLUMNS)
    ends = array("q")
    for column in ("source", "target"):
        for name, line in zip(table.text[column], table.lines, strict=True):
            if name not in index:
                raise _unknown_end(name, column, path, line)
            ends.append(index[name])
    arrays: dict[str, Array | None] = {
        "edges": np.array(ends, dtype=np.int64).reshape(2, -1).T,
        "edge_attr": _features(table, path, attempt),
        "edge_attr_names": np.array(table.feature_names, dtype=np.str_),
        "notes": _split_note(table, path),
    }
    listing = path.parent / "edge_classes.csv"
    found = attempt(_labels, table, path, listing, "edge")
    if found is not None:
        arrays["edge_label"] = found["y"]
        arrays["edge_class_names"] = found["class_names"]
        arrays["edge_declared_classes"] = found["declared_classes"]
    if table.text["time"]:
        arrays["edge_time"] = attempt(_times, table, path)
    masks = attempt(_masks, table, path) or {}
    arrays |= {f"edge_{name}": mask for name, mask in masks.items()}
    return {key: array for key, array in arrays.items() if array is not None}


def _times(table: _Table, path: Path) -> Array:
    """Return the times of edges, shape (M,); reject those that are missing or go back."""
    times = array("d")
    shown = show_path(path)
    for line, cell in zip(table.lines, table.text["time"], strict=True):
        value = _number(cell)
        if value is None or not np.isfinite(value):
            got = f'"{clip(cell)}"' if cell else "an empty cell"
            raise DataError(
                f"{shown}, line {line}: time must be a number such as seconds or days, "
                f"got {got}. Give every edge a time, or remove the column. flower-fgl "
                'prepare reads dates: kind "time" with format = "iso".'
            )
        if times and value < times[-1]:
            raise DataError(
                f"{shown}, line {line}: time {value:.15g} goes backwards, the line above "
                f"has {times[-1]:.15g}. Sort the lines by time. An hour of the day, which "
                "starts again every day, is no time."
            )
        times.append(value)
    return np.array(times, dtype=np.float64)


def hash_ids(ids: Sequence[str]) -> Array:
    """Return numbers (N,), int64, by which data owners name nodes to each other.

    They are the first 63 bits of the BLAKE2b hash of each id. Guessable ids stay guessable.
    """
    hashes = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in ids]
    numbers = np.frombuffer(b"".join(hashes), dtype="<u8") >> np.uint64(1)
    return numbers.astype(np.int64)


def _single_cell(path: Path, column: str) -> Array:
    """Return the only cell of a table as text."""
    rows = _rows(path, (column,), more=False)
    next(rows)
    cells = [row[0].strip() for _, row in rows]
    if len(cells) != 1:
        raise DataError(f"{show_path(path)} must have one line, got {len(cells)}.")
    return np.array(cells[0], dtype=np.str_)


def _outside_edges(path: Path, index: dict[str, int]) -> Array:
    """Return row number and hashed id of the ends of each outside edge, shape (M, 2)."""
    rows = _rows(path, ("source", "target"), more=False)
    _, header = next(rows)
    at_source, at_target = (header.index(name) for name in ("source", "target"))
    own, others = array("q"), []
    shown = show_path(path)
    for line, row in rows:
        source, target = row[at_source].strip(), row[at_target].strip()
        if source not in index:
            raise DataError(
                f'{shown}, line {line}: source "{clip(source)}" is not an id in '
                "nodes.csv. Write the own node as source and the other owner's node as "
                "target."
            )
        if target in index or not target:
            raise DataError(
                f'{shown}, line {line}: target "{clip(target)}" must be the id of a '
                "node of another data owner. Edges between nodes of nodes.csv belong into "
                "edges.csv."
            )
        own.append(index[source])
        others.append(target)
    return np.stack([np.array(own, dtype=np.int64), hash_ids(others)], axis=1)


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
    is_complete = sorted(map(len, parts.values())) == [1] * len(SPLITS)
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
    more = ", …" if len(names) > MOST_NAMES else ""
    return ", ".join(f'"{clip(name)}"' for name in names[:MOST_NAMES]) + more


def _masks(table: _Table, path: Path) -> dict[str, Array]:
    """Convert the columns of the split to masks; without a split there are none."""
    if table.parts:
        masks = {p: _flags(table, column, path) for p, column in table.parts.items()}
        for one, other in itertools.combinations(masks, 2):
            if shared := int((masks[one] & masks[other]).sum()):
                columns = [clip(table.parts[part]) for part in (one, other)]
                raise DataError(
                    f"{show_path(path)}: {shared} lines have 1 in both columns "
                    f'"{columns[0]}" and "{columns[1]}", which are read as parts of the '
                    f"split. Correct them. {_if_features(table)}"
                )
        return {f"{part}_mask": mask for part, mask in masks.items()}
    split = table.text["split"]
    if not any(split):
        return {}
    for line, name in zip(table.lines, split, strict=True):
        if name and name not in SPLITS:
            part = part_of_split(name)
            raise DataError(
                f"{show_path(path)}, line {line}: split must be {', '.join(SPLITS)} or "
                f'empty, got "{clip(name)}".' + (f" Write {part}." if part else "")
            )
    return {
        f"{name}_mask": np.array([part == name for part in split], dtype=np.bool_)
        for name in SPLITS
    }


def _split_note(table: _Table, path: Path) -> Array:
    """Return a note that names the columns of the split; empty without them."""
    columns = ", ".join(table.parts.values())
    note = f"{path.name}: the columns {columns} hold the split and are not features."
    return np.array([note] if columns else [], dtype=np.str_)


def _if_features(table: _Table) -> str:
    """Say what to do if the columns of the split are features."""
    columns = ", ".join(map(clip, table.parts.values()))
    return f"If {columns} are features, give them other names."


def _flags(table: _Table, column: str, path: Path) -> Array:
    """Convert a column of 0 and 1, or false and true, to booleans."""
    cells = table.text[column]
    number = {cell: _number(cell) for cell in set(cells)}
    if not set(number.values()) <= {0.0, 1.0}:
        line, cell = next(
            (line, cell)
            for line, cell in zip(table.lines, cells, strict=True)
            if number[cell] not in (0.0, 1.0)
        )
        raise DataError(
            f'{show_path(path)}, line {line}: column "{clip(column)}" is read as a part of '
            f'the split, expected 0 or 1 (false or true), got "{clip(cell)}". '
            f"{_if_features(table)}"
        )
    return np.array([number[cell] == 1.0 for cell in cells], dtype=np.bool_)
