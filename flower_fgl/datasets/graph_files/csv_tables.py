"""Reader of a graph stored as a folder of CSV tables, see docs/graph-files.md."""

import hashlib
import itertools
import os
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from flower_fgl.core.agreement import marks_unknown
from flower_fgl.core.errors import (
    DataError,
    ErrorCollector,
    clip,
    has_control_characters,
    show_path,
)
from flower_fgl.datasets.graph_files.archive import Array
from flower_fgl.datasets.graph_files.csv_rows import (
    NO_TARGETS,
    Table,
    TargetColumns,
    Wanted,
    csv_rows,
    read_columns,
    read_number,
    read_table,
    target_columns,
)
from flower_fgl.datasets.graph_files.own_split import PARTS, part_of_split
from flower_fgl.datasets.graph_files.validate import (
    LONGEST_NAME,
    check_target_names,
    doubtful_labels,
)

__all__ = [
    "index_ids",
    "read_classes",
    "read_csv_folder",
    "read_described_edges",
    "read_ends",
    "read_masks",
    "single_cell",
    "split_note",
]

TEXT_COLUMNS = ("id", "label", "split")
EDGE_COLUMNS = ("source", "target", "label", "time", "split")


def read_csv_folder(
    folder: Path, wanted: Wanted, attempt: ErrorCollector
) -> dict[str, Array]:
    """Read the tables into arrays named as in an ``.npz`` graph file.

    Edges keep their classes if labels are not needed. ``names`` are the ids of the nodes,
    in the order of the table, and ``notes`` sentences on how the tables were read. An
    error is a DataError that names file, line and column; arrays with an error that was
    collected are missing in the result.
    """
    path = folder / "nodes.csv"
    if not attempt(holds_one_graph, path):
        return {}
    columns = attempt(target_columns, path, wanted.kind_of_nodes)
    if columns is None:
        return {}
    several, others, _ = columns
    required = ("id", "label") if wanted.needs_labels and not several else ("id",)
    nodes = attempt(read_table, path, required, (*TEXT_COLUMNS, *several, *others))
    if nodes is None:
        return {}
    index = attempt(index_ids, nodes)
    arrays: dict[str, Array | None] = {}
    if wanted.needs_labels:
        if several:
            arrays |= attempt(read_columns, nodes, several, "node", folder) or {}
        else:
            listing = folder / "classes.csv"
            arrays |= attempt(read_classes, nodes, listing, "node") or {}
    arrays["x"] = nodes.features(attempt)
    arrays["feature_names"] = np.array(nodes.feature_names, dtype=np.str_)
    if index is not None:
        path = folder / "edges.csv"
        arrays |= attempt(_edges, path, index, attempt, wanted) or {}
        arrays["names"] = np.array(nodes.text["id"], dtype=object)
        if os.path.exists(path := folder / "prepared.csv"):
            arrays["prepared"] = attempt(single_cell, path, "sha256")
        if os.path.exists(path := folder / "outside.csv"):
            arrays["outside_edges"] = attempt(_outside_edges, path, index)
            arrays["outside_ids"] = hash_ids(nodes.text["id"])
    if wanted.needs_labels:
        arrays |= attempt(read_masks, nodes) or {}
    notes = [split_note(nodes, columns), arrays.get("notes")]
    if several and not wanted.needs_labels:
        unread = f"{', '.join(several)} will not be read: only edges are."
        notes.append(np.array([f"{nodes.where}: {unread}"]))
    arrays["notes"] = np.concatenate([note for note in notes if note is not None])
    return {key: array for key, array in arrays.items() if array is not None}


def holds_one_graph(path: Path) -> bool:
    """Return ``True``; reject the nodes of a set without the table of its graphs."""
    rows = csv_rows(path, ("graph", "id"))
    try:
        next(rows)
    except DataError:  # without these columns it is none, or the reader names the error
        return True
    rows.close()
    raise DataError(
        f"{show_path(path)} has a column graph, but graphs.csv is missing. Provide it with "
        "the columns id and label (or target). If graph is a feature, rename it."
    )


def index_ids(nodes: Table, item: str = "node") -> dict[str, int]:
    """Return the row of each id; reject empty, duplicate and unprintable ids."""
    ids = nodes.text["id"]
    index = dict(zip(ids, range(len(ids)), strict=True))
    is_plain = "".join(ids).isprintable() and max(map(len, ids)) <= LONGEST_NAME
    if is_plain and "" not in index and len(index) == len(ids):
        return index
    count: Counter[str] = Counter()
    for line, name in nodes.cells("id"):
        where = f"{nodes.where}, line {line}"
        if not name:
            raise DataError(f"{where}: the id is empty. Give each {item} an id.")
        if len(name) > LONGEST_NAME or has_control_characters(name):
            raise DataError(
                f'{where}: id "{clip(name)}" must be one line of at most {LONGEST_NAME} '
                "characters. Shorten it, or remove the control characters."
            )
        count[name] += 1
        if count[name] > 1:
            raise DataError(
                f'{where}: id "{clip(name)}" is already taken by a line above. Give each '
                f"{item} its own id."
            )
    return index


def read_classes(table: Table, listing: Path, item: str) -> dict[str, Array]:
    """Convert the labels to class numbers and class names; ``listing`` may name these."""
    listed_in = listing.name
    names = _class_names(table, listing, item)
    number = dict(zip(names, range(len(names)), strict=True)) | {"": -1}
    for line, name in table.cells("label"):
        if name not in number:
            hint = "leave the cell empty if the class is unknown"
            raise DataError(
                f'{table.where}, line {line}: class "{clip(name)}" is not in '
                f"{listed_in}. Add it there, or "
                f"{hint if marks_unknown(name) else 'correct the label'}."
            )
    y = np.array([number[name] for name in table.text["label"]], dtype=np.int64)
    if not os.path.exists(listing):
        doubt = doubtful_labels(
            torch.from_numpy(y),
            names,
            item=item,
            unknown="Leave the cell empty",
            declare=f"list all classes in {listed_in}",
        )
        if doubt:
            raise DataError(f"{table.where}, column label: {doubt}")
    listed = np.array(names, dtype=np.str_)
    return {"y": y, "class_names": listed, "declared_classes": listed}


def _class_names(table: Table, path: Path, item: str) -> list[str]:
    """Return the classes in ``classes.csv``, or by default those of the labels."""
    if os.path.exists(path):
        names = _only_column(path, "name")
        if not names or len(set(names)) < len(names):
            raise DataError(
                f"{show_path(path)} must name each class once, without empty or repeated "
                "names."
            )
        check_target_names(names, show_path(path))
        return names
    found = list(dict.fromkeys(filter(None, table.text["label"])))
    if not found:
        raise DataError(
            f"{table.where}: no {item} has a label. List the classes in {path.name}."
        )
    check_target_names(found, f"{table.where}, column label")
    is_number = all(name.isdecimal() for name in found)
    return sorted(found, key=lambda n: (int(n), n) if is_number else (0, n))


def _edges(
    path: Path, index: dict[str, int], attempt: ErrorCollector, wanted: Wanted
) -> dict[str, Array]:
    """Return the edges as row numbers of ``nodes.csv``, shape (M, 2), and their classes."""
    rows = csv_rows(path, ("source", "target"))
    _, header = next(rows)
    rows.close()
    if len(header) == 2:
        return {"edges": read_ends(path, (index, index), _unknown_end)}
    columns = target_columns(path, wanted.target_kind, of_edges=True)
    return read_described_edges(
        path,
        (index, index),
        _unknown_end,
        attempt,
        path.parent,
        wanted,
        is_read="label" in header or bool(columns.read) or wanted.scores_edges,
    )


def read_ends(
    path: Path,
    indexes: Sequence[Mapping[str, int]],
    unknown: Callable[[str, str, Path, int], DataError],
) -> Array:
    """Return the rows of the source and the target of each edge, shape (M, 2).

    ``indexes`` are the row of each id, of the sources, and of the targets. ``unknown``
    returns the error for an id that is in no row, by its text, column, file and line.
    """
    rows = csv_rows(path, ("source", "target"))
    _, header = next(rows)
    ends = array("q")
    columns = ("source", "target")
    places = [
        (header.index(column), column, index)
        for column, index in zip(columns, indexes, strict=True)
    ]
    for line, row in rows:
        for place, column, index in places:
            node = index.get(row[place].strip(), -1)
            if node < 0:
                raise unknown(row[place].strip(), column, path, line)
            ends.append(node)
    return np.array(ends, dtype=np.int64).reshape(-1, 2)


def _unknown_end(name: str, column: str, path: Path, line: int) -> DataError:
    """Return the error for an edge to a node that does not exist."""
    return DataError(
        f'{show_path(path)}, line {line}: {column} "{clip(name)}" is not an id in '
        "nodes.csv. Correct it, or add a line to nodes.csv. An edge to a node of another "
        "owner belongs into outside.csv, which fedgcn reads; or make it a node of this "
        'graph, with a column that flags it: flower-fgl prepare, foreign = "flag".'
    )


def read_described_edges(
    path: Path,
    indexes: tuple[Mapping[str, int], Mapping[str, int]],
    unknown: Callable[[str, str, Path, int], DataError],
    attempt: ErrorCollector,
    folder: Path,
    wanted: Wanted,
    *,
    is_read: bool,
) -> dict[str, Array]:
    """Return the arrays of an edge table with classes, numbers or features of edges.

    Times and a split are refused unless ``is_read`` says that edges are predicted.
    ``folder`` may list classes or numbers; ``indexes`` and ``unknown`` are as in
    :func:`read_ends`.
    """
    columns = target_columns(path, wanted.target_kind, of_edges=True)
    several, others, _ = columns
    table = read_table(path, ("source", "target"), (*EDGE_COLUMNS, *several, *others))
    unread = [name for name in EDGE_COLUMNS[2:] if table.text[name]]
    unread += table.parts.values()
    if unread and not is_read:
        raise DataError(
            f"{table.where}: Remove {clip(', '.join(unread), 200)}, or rename a number "
            "that describes the edges. Times and a split of edges are read only together "
            'with a column label, the class of each edge, and setting = "edge".'
        )
    ends = array("q")
    for column, index in zip(("source", "target"), indexes, strict=True):
        for line, name in table.cells(column):
            if name not in index:
                raise unknown(name, column, path, line)
            ends.append(index[name])
    arrays: dict[str, Array | None] = {
        "edges": np.array(ends, dtype=np.int64).reshape(2, -1).T,
        "edge_attr": table.features(attempt),
        "edge_attr_names": np.array(table.feature_names, dtype=np.str_),
        "notes": split_note(table, columns),
    }
    found = None
    if wanted.scores_edges:
        arrays["edge_label"] = _known_edges(table, several)
    elif several:
        arrays |= attempt(read_columns, table, several, "edge", folder) or {}
    elif is_read:
        found = attempt(read_classes, table, folder / "edge_classes.csv", "edge")
    else:
        return {key: array for key, array in arrays.items() if array is not None}
    if found is not None:
        names = {"y": "edge_label"} | {n: f"edge_{n}" for n in found if n != "y"}
        arrays |= {names[name]: array for name, array in found.items()}
    if table.text["time"]:
        arrays["edge_time"] = attempt(_times, table)
    masks = {} if wanted.scores_edges else attempt(read_masks, table) or {}
    arrays |= {f"edge_{name}": mask for name, mask in masks.items()}
    return {key: array for key, array in arrays.items() if array is not None}


def _known_edges(table: Table, several: Sequence[str]) -> Array:
    """Return 0 for an edge with a known class or number, else -1; (M,), int64."""
    cells = [texts for name in ("label", *several) if (texts := table.text[name])]
    cells = cells or [[""] * len(table.lines)]
    is_known = [
        any(cell and not marks_unknown(cell) for cell in row)
        for row in zip(*cells, strict=True)
    ]
    return np.array(is_known, dtype=np.int64) - 1


def _times(table: Table) -> Array:
    """Return the times of edges, shape (M,); reject those that are missing or go back."""
    times = array("d")
    for line, cell in table.cells("time"):
        value = read_number(cell)
        if value is None or not np.isfinite(value):
            got = f'"{clip(cell)}"' if cell else "an empty cell"
            raise DataError(
                f"{table.where}, line {line}: time must be a number such as seconds or "
                f"days, got {got}. Give every edge a time, or remove the column. "
                'flower-fgl prepare reads dates: kind "time" with format = "iso".'
            )
        if times and value < times[-1]:
            raise DataError(
                f"{table.where}, line {line}: time {value:.15g} goes backwards, the line "
                f"above has {times[-1]:.15g}. Sort the lines by time. An hour of the day, "
                "which starts again every day, is no time."
            )
        times.append(value)
    return np.array(times, dtype=np.float64)


def hash_ids(ids: Sequence[str]) -> Array:
    """Return the first 63 bits of the BLAKE2b hash of each id, (N,), int64.

    By them data owners name nodes to each other. Guessable ids stay guessable.
    """
    hashes = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in ids]
    numbers = np.frombuffer(b"".join(hashes), dtype="<u8") >> np.uint64(1)
    return numbers.astype(np.int64)


def _only_column(path: Path, column: str) -> list[str]:
    """Return the cells of a table of one column."""
    _, *rows = csv_rows(path, (column,), more=False)
    return [row[0].strip() for _, row in rows]


def single_cell(path: Path, column: str) -> Array:
    """Return the only cell of a table as text."""
    cells = _only_column(path, column)
    if len(cells) != 1:
        raise DataError(f"{show_path(path)} must have one line, got {len(cells)}.")
    return np.array(cells[0], dtype=np.str_)


def _outside_edges(path: Path, index: dict[str, int]) -> Array:
    """Return row number and hashed id of the ends of each outside edge, shape (M, 2)."""
    rows = csv_rows(path, ("source", "target"), more=False)
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


def read_masks(table: Table) -> dict[str, Array]:
    """Convert the columns of the split to masks; without a split there are none."""
    if table.parts:
        masks = {p: _flags(table, column) for p, column in table.parts.items()}
        for one, other in itertools.combinations(masks, 2):
            if shared := int((masks[one] & masks[other]).sum()):
                columns = [clip(table.parts[part]) for part in (one, other)]
                raise DataError(
                    f"{table.where}: {shared} lines have 1 in both columns "
                    f'"{columns[0]}" and "{columns[1]}", which are read as parts of the '
                    f"split. Correct them. {_if_features(table)}"
                )
        return {f"{part}_mask": mask for part, mask in masks.items()}
    split = table.text["split"]
    if not any(split):
        return {}
    for line, name in table.cells("split"):
        if name and name not in PARTS:
            part = part_of_split(name)
            raise DataError(
                f"{table.where}, line {line}: split must be {', '.join(PARTS)} or "
                f'empty, got "{clip(name)}".' + (f" Write {part}." if part else "")
            )
    return {
        f"{name}_mask": np.array([part == name for part in split], dtype=np.bool_)
        for name in PARTS
    }


def split_note(table: Table, columns: TargetColumns = NO_TARGETS) -> Array:
    """Return notes that name the columns of the split, and targets that are not read."""
    parts = ", ".join(table.parts.values())
    note = parts and f"the columns {parts} hold the split and are not features."
    found = [text for text in (note, columns.why) if text]
    return np.array([f"{table.path.name}: {text}" for text in found], dtype=np.str_)


def _if_features(table: Table) -> str:
    """Say what to do if the columns of the split are features."""
    columns = ", ".join(map(clip, table.parts.values()))
    return f"If {columns} are features, give them other names."


def _flags(table: Table, column: str) -> Array:
    """Convert a column of 0 and 1, or false and true, to booleans."""
    cells = table.text[column]
    number = {cell: read_number(cell) for cell in set(cells)}
    for line, cell in table.cells(column):
        if number[cell] not in (0.0, 1.0):
            raise DataError(
                f'{table.where}, line {line}: column "{clip(column)}" is read as a part of '
                f'the split, expected 0 or 1 (false or true), got "{clip(cell)}". '
                f"{_if_features(table)}"
            )
    return np.array([number[cell] == 1.0 for cell in cells], dtype=np.bool_)
