"""Reader of a graph stored as a folder of CSV tables, see docs/graph-files.md."""

import hashlib
import itertools
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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
from flower_fgl.core.held_kind import EDGES, GRAPHS, NODES, RELATIONS
from flower_fgl.core.options import nearest
from flower_fgl.datasets.graph_files.archive import Array
from flower_fgl.datasets.graph_files.csv_rows import (
    Table,
    Wanted,
    csv_cells,
    csv_rows,
    read_columns,
    read_finite,
    read_number,
    read_table,
)
from flower_fgl.datasets.graph_files.own_split import PARTS, part_of_split
from flower_fgl.datasets.graph_files.validate import (
    LONGEST_NAME,
    check_target_names,
    doubtful_labels,
)

__all__ = [
    "End",
    "index_ids",
    "read_csv_folder",
    "read_described_edges",
    "read_ends",
    "read_predicted",
    "read_prepared_cell",
    "split_note",
    "unread_tables",
]

TEXT_COLUMNS = ("id", "label", "split")
ENDS = ("source", "target")
EDGE_COLUMNS = (*ENDS, "label", "time", "split")
KNOWN: tuple[str, ...] = (
    NODES,
    EDGES,
    GRAPHS,
    RELATIONS,
    "classes.csv",
    "edge_classes.csv",
)
KNOWN += ("targets.csv", "outside.csv", "prepared.csv")
"""Tables of a folder."""


class End(NamedTuple):
    """A column of ids, such as one end of edges, and the rows that they have in ``of``."""

    column: str
    of: str
    rows: Mapping[str, int]

    def rows_in(self, table: Table) -> Array:
        """Return the rows that the column of a table names, (n,), int64."""
        return table.numbers(self.column, self.rows.get, self.fault).astype(np.int64)

    def fault(self, name: str) -> str:
        """Say that an id is in no row."""
        hint = (
            "Correct it, or add a line to nodes.csv. An edge to a node of another owner "
            "belongs into outside.csv, which fedgcn reads; or make it a node of this "
            'graph, with a column that flags it: flower-fgl prepare, foreign = "flag".'
            if self.of == NODES
            else "Correct it, or add a line there."
        )
        return f': {self.column} "{clip(name)}" is not an id in {self.of}. {hint}'


def read_csv_folder(
    folder: Path, wanted: Wanted, attempt: ErrorCollector
) -> dict[str, Array]:
    """Read the tables into arrays named as in an ``.npz`` graph file.

    Edges keep their classes if labels are not needed. ``names`` are the ids of the nodes,
    in the order of the table, and ``notes`` sentences on how the tables were read. An
    error is a DataError that names file, line and column; arrays with an error that was
    collected are missing in the result.
    """
    path = folder / NODES
    reject_set(path)
    required = ("id", "label") if wanted.needs_labels else ("id",)
    nodes = read_table(path, required, TEXT_COLUMNS, target_kind=wanted.kind_of_nodes)
    index = attempt(index_ids, nodes)
    arrays: dict[str, Array | None] = {}
    if wanted.needs_labels:
        arrays |= read_predicted(nodes, "node", folder, attempt)
    arrays["x"] = nodes.features(attempt)
    arrays["feature_names"] = np.array(nodes.feature_names, dtype=np.str_)
    notes = [*unread_tables(folder), *split_note(nodes)]
    if index is not None:
        ends = (End("source", NODES, index), End("target", NODES, index))
        path = folder / "edges.csv"
        arrays |= attempt(_edges, path, ends, attempt, wanted, notes) or {}
        arrays["names"] = np.array(nodes.text["id"], dtype=object)
        arrays |= attempt(read_prepared_cell, folder) or {}
        if os.path.exists(path := folder / "outside.csv"):
            arrays["outside_edges"] = attempt(_outside_edges, path, index)
            arrays["outside_ids"] = hash_ids(nodes.text["id"])
    if nodes.targets.read and not wanted.needs_labels:
        unread = f"{', '.join(nodes.targets.read)} will not be read: only edges are."
        notes.append(f"{nodes.where}: {unread}")
    arrays["notes"] = np.array(notes, dtype=np.str_)
    return {key: array for key, array in arrays.items() if array is not None}


def read_predicted(
    table: Table, item: str, folder: Path, attempt: ErrorCollector
) -> dict[str, Array]:
    """Return what is predicted of the rows of a table, and their split.

    ``folder`` may hold tables that list the classes or numbers.
    """
    found = (
        attempt(read_columns, table, folder)
        if table.targets.read
        else attempt(_read_classes, table, folder, item)
    )
    return (found or {}) | (attempt(_read_masks, table) or {})


def reject_set(path: Path) -> None:
    """Reject the nodes of a set without the table of its graphs."""
    rows = csv_rows(path, ("graph", "id"))
    try:
        next(rows)
    except DataError:  # without these columns it is none, or the reader names the error
        return
    rows.close()
    raise DataError(
        f"{show_path(path)} has a column graph, but graphs.csv is missing. Provide it with "
        "the columns id and label (or target). If graph is a feature, rename it."
    )


def index_ids(nodes: Table, item: str = "node") -> dict[str, int]:
    """Return the row of each id; reject empty, duplicate and unprintable ids."""
    index: dict[str, int] = {}
    for line, name in nodes.cells("id"):
        if not name:
            raise DataError(
                f"{nodes.where}, line {line}: the id is empty. Give each {item} an id."
            )
        if len(name) > LONGEST_NAME or has_control_characters(name):
            raise DataError(
                f'{nodes.where}, line {line}: id "{clip(name)}" must be one line of at '
                f"most {LONGEST_NAME} characters. Shorten it, or remove the control "
                "characters."
            )
        if name in index:
            raise DataError(
                f'{nodes.where}, line {line}: id "{clip(name)}" is already taken by a line '
                f"above. Give each {item} its own id."
            )
        index[name] = len(index)
    return index


def _read_classes(table: Table, folder: Path, item: str) -> dict[str, Array]:
    """Convert the labels to class numbers and class names; a table may list these."""
    listing = folder / f"{'edge_' * (item == 'edge')}classes.csv"
    names = _class_names(table, listing, item)
    number = dict(zip(names, range(len(names)), strict=True)) | {"": -1}

    def fault(name: str) -> str:
        hint = "leave the cell empty if the class is unknown"
        return (
            f': class "{clip(name)}" is not in {listing.name}. Add it there, or '
            f"{hint if marks_unknown(name) else 'correct the label'}."
        )

    y = table.numbers("label", number.get, fault).astype(np.int64)
    if not os.path.exists(listing):
        doubt = doubtful_labels(
            torch.from_numpy(y),
            names,
            item=item,
            unknown="Leave the cell empty",
            declare=f"list all classes in {listing.name}",
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
    path: Path,
    ends: tuple[End, End],
    attempt: ErrorCollector,
    wanted: Wanted,
    notes: list[str],
) -> dict[str, Array]:
    """Return the edges as row numbers of ``nodes.csv``, shape (M, 2), and their classes."""
    _, header = next(csv_rows(path, ENDS))
    if len(header) == 2:
        return {"edges": read_ends(path, ends)}
    return read_described_edges(path, ends, attempt, path.parent, wanted, notes)


def read_ends(path: Path, ends: tuple[End, End]) -> Array:
    """Return the rows of the source and the target of each edge, shape (M, 2)."""
    found = array("q")
    sources, targets = (end.rows for end in ends)
    for line, (source, target) in csv_cells(path, ENDS):
        pair = sources.get(source, -1), targets.get(target, -1)
        if -1 in pair:
            fault = ends[0].fault(source) if pair[0] < 0 else ends[1].fault(target)
            raise DataError(f"{show_path(path)}, line {line}{fault}")
        found.extend(pair)
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def read_described_edges(
    path: Path,
    ends: tuple[End, End],
    attempt: ErrorCollector,
    folder: Path,
    wanted: Wanted,
    notes: list[str],
) -> dict[str, Array]:
    """Return the arrays of an edge table with classes, numbers or features of edges.

    Times and a split are refused unless edges are predicted. ``folder`` may list classes
    or numbers; ``notes`` get those of :func:`split_note`.
    """
    table = read_table(path, ENDS, EDGE_COLUMNS, target_kind=wanted.target_kind)
    is_labelled = "label" in table.header or bool(table.targets.read)
    is_read = is_labelled or wanted.scores_edges
    unread = [name for name in EDGE_COLUMNS[2:] if table.text[name]]
    unread += table.parts.values()
    if unread and not is_read:
        raise DataError(
            f"{table.where}: Remove {clip(', '.join(unread), 200)}, or rename a number "
            "that describes the edges. Times and a split of edges are read only together "
            "with a column label, the class of each edge, or target:NAME, a number of "
            'each, and setting = "edge".'
        )
    arrays: dict[str, Array | None] = {
        "edges": np.stack([end.rows_in(table) for end in ends], axis=1),
        "edge_attr": table.features(attempt),
        "edge_attr_names": np.array(table.feature_names, dtype=np.str_),
    }
    notes += split_note(table)
    if wanted.scores_edges:
        arrays["edge_label"] = _known_edges(table)
    elif is_read:
        found = read_predicted(table, "edge", folder, attempt)
        y = "edge_target" if "target_names" in found else "edge_label"
        arrays |= {y if k == "y" else f"edge_{k}": one for k, one in found.items()}
    if table.text["time"]:
        arrays["edge_time"] = attempt(_times, table)
    return {key: array for key, array in arrays.items() if array is not None}


def _known_edges(table: Table) -> Array:
    """Return 0 for an edge with a known class or number, else -1; (M,), int64."""
    is_known = np.zeros(len(table.lines), dtype=np.bool_)
    for name in ("label", *table.targets.read):
        if texts := table.text[name]:
            tests = (bool(cell) and not marks_unknown(cell) for cell in texts)
            if name != "label":  # -1 is a number like others
                tests = (read_finite(cell) is not None for cell in texts)
            is_known |= np.fromiter(tests, dtype=np.bool_, count=len(texts))
    return is_known.astype(np.int64) - 1


def _times(table: Table) -> Array:
    """Return the times of edges, shape (M,); reject those that are missing or go back."""

    def fault(cell: str) -> str:
        got = f'"{clip(cell)}"' if cell else "an empty cell"
        return (
            f": time must be a number such as seconds or days, got {got}. Give every edge "
            "a time, or remove the column. flower-fgl prepare reads dates: kind "
            '"time" with format = "iso".'
        )

    times = table.numbers("time", read_finite, fault).astype(np.float64)
    if len(back := (np.diff(times) < 0).nonzero()[0]):
        row = int(back[0])
        raise DataError(
            f"{table.where}, line {table.lines[row + 1]}: time {times[row + 1]:.15g} goes "
            f"backwards, the line above has {times[row]:.15g}. Sort the lines by time. An "
            "hour of the day, which starts again every day, is no time."
        )
    return times


def hash_ids(ids: Sequence[str]) -> Array:
    """Return the first 63 bits of the BLAKE2b hash of each id, (N,), int64.

    By them data owners name nodes to each other. Guessable ids stay guessable.
    """
    hashes = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in ids]
    numbers = np.frombuffer(b"".join(hashes), dtype="<u8") >> np.uint64(1)
    return numbers.astype(np.int64)


def _only_column(path: Path, column: str) -> list[str]:
    """Return the cells of a table of one column."""
    return [cell for _, (cell,) in csv_cells(path, (column,), more=False)]


def read_prepared_cell(folder: Path) -> dict[str, Array]:
    """Return the only cell of ``prepared.csv``; empty without the table."""
    if not os.path.exists(path := folder / "prepared.csv"):
        return {}
    cells = _only_column(path, "sha256")
    if len(cells) != 1:
        raise DataError(f"{show_path(path)} must have one line, got {len(cells)}.")
    return {"prepared": np.array(cells[0], dtype=np.str_)}


def _outside_edges(path: Path, index: dict[str, int]) -> Array:
    """Return row number and hashed id of the ends of each outside edge, shape (M, 2)."""
    next(csv_rows(path, ENDS, more=False))
    table = read_table(path, ENDS, ENDS)
    own = table.numbers(
        "source",
        index.get,
        lambda name: (
            f': source "{clip(name)}" is not an id in nodes.csv. Write the own '
            "node as source and the other owner's node as target."
        ),
    )
    table.numbers(
        "target",
        lambda name: None if name in index or not name else 0,
        lambda name: (
            f': target "{clip(name)}" must be the id of a node of another data '
            "owner. Edges between nodes of nodes.csv belong into edges.csv."
        ),
    )
    return np.stack([own.astype(np.int64), hash_ids(table.text["target"])], axis=1)


def _read_masks(table: Table) -> dict[str, Array]:
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
    if not any(table.text["split"]):
        return {}

    def fault(name: str) -> str:
        part = part_of_split(name)
        return (
            f': split must be {", ".join(PARTS)} or empty, got "{clip(name)}".'
            + f" Write {part}." * bool(part)
        )

    place = {name: number for number, name in enumerate((*PARTS, ""))}
    places = table.numbers("split", place.get, fault)
    return {f"{name}_mask": places == place[name] for name in PARTS}


def split_note(table: Table) -> list[str]:
    """Return notes that name the columns of the split, and targets that are not read."""
    parts = ", ".join(table.parts.values())
    note = parts and f"the columns {parts} hold the split and are not features."
    texts = (note, table.targets.why)
    return [f"{table.path.name}: {text}" for text in texts if text]


def unread_tables(folder: Path) -> list[str]:
    """Return a note on tables in a folder that have no meaning, such as ``class.csv``."""
    names = [name for name in sorted(os.listdir(folder)) if name not in KNOWN]
    unread = [name for name in names if name.lower().endswith(".csv")]
    if not unread:
        return []
    return [
        f"{clip(', '.join(unread), 200)} will not be read. {nearest(unread[0], KNOWN)}"
    ]


def _if_features(table: Table) -> str:
    """Say what to do if the columns of the split are features."""
    columns = ", ".join(map(clip, table.parts.values()))
    return f"If {columns} are features, give them other names."


def _flags(table: Table, column: str) -> Array:
    """Convert a column of 0 and 1, or false and true, to booleans."""

    def read(cell: str) -> float | None:
        value = read_number(cell)
        return value if value in (0.0, 1.0) else None

    found = table.numbers(
        column,
        read,
        lambda cell: (
            f': column "{clip(column)}" is read as a part of the split, expected '
            f'0 or 1 (false or true), got "{clip(cell)}". {_if_features(table)}'
        ),
    )
    return found.astype(np.bool_)
