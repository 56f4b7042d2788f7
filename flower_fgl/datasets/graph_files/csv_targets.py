"""Columns of a CSV table that hold several labels, or numbers to predict.

``label:NAME`` holds 1, 0, or nothing if that is unknown; ``target:NAME`` (of nodes and
graphs also ``target`` alone) holds a number, or nothing. ``targets.csv`` may list ``name``
and ``unit`` of the numbers, and numbers that no item has.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.graph_files.archive import Array
from flower_fgl.datasets.graph_files.csv_rows import Table, csv_rows, read_number
from flower_fgl.datasets.graph_files.problems import clip, show_path

__all__ = ["read_columns", "target_columns"]

LABEL, TARGET = "label:", "target:"
ALONE = "target"


def target_columns(path: Path, *, of_edges: bool = False) -> tuple[str, ...]:
    """Return the columns of labels or numbers, of one kind, in the header of a table."""
    try:
        _, header = next(csv_rows(path, ()))
    except (DataError, StopIteration):  # the table's reader reports it
        return ()
    starts = (TARGET,) if of_edges else (LABEL, TARGET)
    found = [c for c in header if c.startswith(starts) or (c == ALONE and not of_edges)]
    _reject_similar(path, header, found, of_edges=of_edges)
    kinds = {column.partition(":")[0] + ":" for column in found}
    if len(kinds) > 1 or (found and "label" in header):
        both = [c for c in header if c in found or c == "label"]
        raise DataError(
            f"{show_path(path)} has the columns {clip(', '.join(both), 200)}, of several "
            "kinds. Keep a label, labels (label:NAME) or numbers (target:NAME), and give a "
            "feature another name."
        )
    if nameless := [c for c in found if c in starts]:
        raise DataError(
            f'{show_path(path)}: the column "{nameless[0]}" has no name. Write '
            f"{nameless[0]}NAME."
        )
    return tuple(found)


def _reject_similar(
    path: Path, header: Sequence[str], found: Sequence[str], *, of_edges: bool
) -> None:
    """Reject a target that would be a feature, because its name is spelled otherwise."""
    if "label" in header and not found:
        return
    for column in header:
        start, mark, _ = column.partition(":")
        is_similar = (
            start.strip().casefold() in ("label", "target") and column != "label"
        )
        of_table = of_edges and column == ALONE  # an end of the edge
        if is_similar and (mark or found) and column not in found and not of_table:
            form = "target:NAME" if of_edges else "label:NAME or target:NAME"
            raise DataError(
                f'{show_path(path)}: the column "{clip(column)}" is not read as a target. '
                f"Write {form} if it is one, else give it another name."
            )


def read_columns(
    table: Table, columns: Sequence[str], item: str, folder: Path
) -> dict[str, Array]:
    """Return labels or numbers, and their names, as in an ``.npz`` file.

    ``folder`` may hold ``targets.csv``.
    """
    are_labels = columns[0].startswith(LABEL)
    names = [c if c == ALONE else c.partition(":")[2].strip() for c in columns]
    cells = np.array([_values(table, c, are_labels=are_labels) for c in columns]).T
    prefix = "edge_" if item == "edge" else ""
    if are_labels:
        whole = np.where(np.isnan(cells), -1, cells).astype(np.int8)
        return {"y": whole, "label_names": np.array(names, dtype=np.str_)}
    units = _units(folder / "targets.csv")
    if missing := [name for name in units if name not in names]:
        names += missing
        unknown = np.full((len(cells), len(missing)), np.nan)
        cells = np.concatenate([cells, unknown], axis=1)
    arrays = {
        "edge_target" if prefix else "y": cells,
        f"{prefix}target_names": np.array(names, dtype=np.str_),
    }
    if any(units.values()):
        unit = np.array([units.get(name, "") for name in names], dtype=np.str_)
        arrays[f"{prefix}target_units"] = unit
    return arrays


def _values(table: Table, column: str, *, are_labels: bool) -> list[float]:
    """Return the numbers of a column, NaN for an empty cell."""
    values = []
    for line, cell in table.cells(column):
        value = read_number(cell) if cell else np.nan
        is_wrong = are_labels and cell and value not in (0.0, 1.0)
        if value is None or is_wrong or (cell and not np.isfinite(value)):
            what = "0 or 1" if are_labels else "a finite number"
            raise DataError(
                f'{table.where}, line {line}, column "{clip(column)}": expected {what}, or '
                f'an empty cell if it is unknown, got "{clip(cell)}".'
            )
        values.append(value)
    return values


def _units(path: Path) -> dict[str, str]:
    """Return the unit of each number in ``targets.csv``, empty without the table."""
    if not os.path.exists(path):
        return {}
    rows = csv_rows(path, ("name", "unit"), more=False)
    _, header = next(rows)
    at_name, at_unit = header.index("name"), header.index("unit")
    found: dict[str, str] = {}
    for line, row in rows:
        name = row[at_name].strip()
        if not name or name in found:
            raise DataError(
                f"{show_path(path)}, line {line}: the name is empty, or given twice. Name "
                "each target once."
            )
        found[name] = row[at_unit].strip()
    return found
