"""A graph as a folder of CSV tables, for owners who keep theirs in a spreadsheet.

``nodes.csv``
    ``id`` (any text, unique), ``label`` (class name, empty where unknown), optionally
    ``split`` (``train``, ``val``, ``test`` or empty); every other column is a feature.
``edges.csv``
    ``source`` and ``target``: ids of nodes; one direction is enough.
``classes.csv``
    Optional: ``name``, one class a line. Without it the classes are the labels that
    occur, sorted. The server agrees with all owners on one numbering, by name.
"""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from flower_fgl.errors import DataError

__all__ = ["read_csv_folder"]

Array = np.ndarray[Any, np.dtype[Any]]

SPLITS = ("train", "val", "test")
TEXT_COLUMNS = ("id", "label", "split", "source", "target", "name")


def read_csv_folder(folder: Path) -> dict[str, Array]:
    """Read the tables into the arrays that an ``.npz`` file would hold.

    Parameters
    ----------
    folder : Path
        Folder with ``nodes.csv`` and ``edges.csv``.

    Returns
    -------
    dict of str to array
        ``x``, ``edges``, ``y``, ``class_names`` and, if there is a column ``split``,
        ``train_mask``, ``val_mask`` and ``test_mask``. Nodes in the order of the table.

    Raises
    ------
    DataError
        If a table is missing or malformed, an id is empty, doubled or unknown, a label
        is not in ``classes.csv``, or a feature is no finite number; the message names
        file, line and column.
    """
    path = folder / "nodes.csv"
    nodes = _read_table(path, required=("id", "label"))
    ids = _ids(nodes, path)
    class_names = _class_names(nodes["label"], folder)
    label = nodes["label"]
    y = np.full(len(nodes), -1, dtype=np.int64)
    is_known = (label != "").to_numpy(bool)
    y[is_known] = class_names.get_indexer(label[is_known])
    unknown = is_known & (y < 0)
    if unknown.any():
        raise DataError(
            f'{path}, line {_line(unknown)}: class "{label[unknown].iloc[0]}" is not '
            "in classes.csv."
        )
    arrays = {
        "x": _features(nodes, path),
        "edges": _edges(folder / "edges.csv", ids),
        "y": y,
        "class_names": np.array(class_names.tolist(), dtype=np.str_),
    }
    if "split" in nodes:
        arrays |= _masks(nodes["split"], path)
    return arrays


def _line(is_wrong: Array) -> int:
    """Line of the first wrong row; line 1 is the header."""
    return int(np.argmax(is_wrong)) + 2


def _read_table(path: Path, required: tuple[str, ...], *, more: bool = True) -> Any:
    """Read one table; text columns stay text, empty cells stay empty."""
    import pandas as pd  # type: ignore[import-untyped]  # a second to import

    if not path.is_file():
        raise DataError(f"{path} is missing: {', '.join(required)} are its columns.")
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            header = next(csv.reader(file), [])
        absent = [column for column in required if column not in header]
        extra = [] if more else [column for column in header if column not in required]
        doubled = sorted({column for column in header if header.count(column) > 1})
        if absent or extra or doubled:
            raise DataError(
                f"{path}: the columns must be {', '.join(required)}"
                + (" and features, each once" if more else ", each once, and no others")
                + f"; got {', '.join(header) or 'none'}."
            )
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # too long a row
            table = pd.read_csv(
                path,
                dtype=dict.fromkeys(TEXT_COLUMNS, str),
                keep_default_na=False,
                index_col=False,
                skip_blank_lines=False,
                low_memory=False,
                encoding="utf-8-sig",
            )
    except (
        pd.errors.ParserError,
        pd.errors.EmptyDataError,
        pd.errors.ParserWarning,
        UnicodeDecodeError,
        csv.Error,
    ) as error:
        raise DataError(
            f"{path} is not a CSV table in UTF-8 with one header line: {error}."
        ) from error
    return table


def _ids(nodes: Any, path: Path) -> Any:
    import pandas as pd

    ids = pd.Index(nodes["id"])
    if not len(ids):
        raise DataError(f"{path} holds no nodes.")
    is_empty = (nodes["id"] == "").to_numpy(bool)
    if is_empty.any():
        raise DataError(f"{path}, line {_line(is_empty)}: the id is empty.")
    is_repeated = ids.duplicated()
    if is_repeated.any():
        raise DataError(
            f'{path}, line {_line(is_repeated)}: id "{ids[is_repeated][0]}" is already '
            "taken by a line above; ids must differ."
        )
    return ids


def _class_names(label: Any, folder: Path) -> Any:
    """Take the classes from ``classes.csv``, or else from the labels."""
    import pandas as pd

    path = folder / "classes.csv"
    if path.is_file():
        names = pd.Index(_read_table(path, required=("name",), more=False)["name"])
        if not len(names) or names.has_duplicates or "" in names:
            raise DataError(f"{path} must name each class once, and none empty.")
        return names
    found = label[label != ""].unique().tolist()
    if not found:
        raise DataError(
            f"{folder / 'nodes.csv'}: no node has a label. Name the classes in "
            "classes.csv."
        )
    is_number = all(name.isdecimal() for name in found)
    return pd.Index(sorted(found, key=lambda n: (int(n), n) if is_number else (0, n)))


def _features(nodes: Any, path: Path) -> Array:
    """Return the feature columns as float32, shape (N, d)."""
    import pandas as pd

    table = nodes.drop(columns=["id", "label", "split"], errors="ignore")
    if not table.shape[1]:
        raise DataError(f"{path} has no feature column besides id, label and split.")
    for column in table.columns:
        if not pd.api.types.is_numeric_dtype(table[column]):
            values = pd.to_numeric(table[column], errors="coerce")
            line = _line(values.isna().to_numpy(bool))
            raise DataError(
                f'{path}, line {line}, column "{column}": expected a number, got '
                f'"{table[column].iloc[line - 2]}".'
            )
    with np.errstate(over="ignore"):  # beyond float32 becomes inf: refused below
        x: Array = np.array(table, dtype=np.float32)
    wrong = ~np.isfinite(x)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise DataError(
            f'{path}, line {row + 2}, column "{table.columns[column]}": expected a '
            f"finite number, got {table.iloc[row, column]}."
        )
    return x


def _edges(path: Path, ids: Any) -> Array:
    """Return the edges as row numbers of ``nodes.csv``, shape (M, 2)."""
    table = _read_table(path, required=("source", "target"), more=False)
    edges = np.empty((len(table), 2), dtype=np.int64)
    for i, column in enumerate(("source", "target")):
        edges[:, i] = ids.get_indexer(table[column])
        dangling = edges[:, i] < 0
        if dangling.any():
            raise DataError(
                f'{path}, line {_line(dangling)}: {column} "'
                f'{table[column][dangling].iloc[0]}" is no id of nodes.csv.'
            )
    return edges


def _masks(split: Any, path: Path) -> dict[str, Array]:
    wrong = ~split.isin([*SPLITS, ""]).to_numpy(bool)
    if wrong.any():
        raise DataError(
            f'{path}, line {_line(wrong)}: split "{split[wrong].iloc[0]}" is none of '
            f"{', '.join(SPLITS)} or empty."
        )
    return {f"{name}_mask": np.array(split == name, dtype=np.bool_) for name in SPLITS}
