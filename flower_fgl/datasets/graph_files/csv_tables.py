"""Reader of a graph stored as a folder of CSV tables, e.g. from a spreadsheet.

``nodes.csv``
    ``id`` (any text, unique), ``label`` (class name, empty if unknown), and optionally
    ``split`` (``train``, ``val``, ``test`` or empty; if all are empty there is no split).
    Every other column is a feature.
``edges.csv``
    ``source`` and ``target``: ids of nodes; one direction is enough.
``classes.csv``
    Optional: ``name``, one class per line. By default the classes are the sorted labels
    of ``nodes.csv``. The server agrees with all data owners on one numbering, by name.

Blank lines and spaces around text are ignored.
"""

from __future__ import annotations

import csv
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.graph_files.problems import ErrorCollector

__all__ = ["read_csv_folder"]

Array = np.ndarray[Any, np.dtype[Any]]

SPLITS = ("train", "val", "test")
NOT_FEATURES = ["id", "label", "split"]
TEXT_COLUMNS = ("id", "label", "split", "source", "target", "name")


def read_csv_folder(
    folder: Path, *, needs_labels: bool = True, attempts: ErrorCollector | None = None
) -> dict[str, Array]:
    """Read the tables into arrays named as in an ``.npz`` graph file.

    Parameters
    ----------
    folder : Path
        Folder with ``nodes.csv`` and ``edges.csv``.
    needs_labels : bool
        Whether to read labels, classes and split; if not, they may be missing.
    attempts : ErrorCollector, optional
        Collector of errors; by default the first error is raised.

    Returns
    -------
    dict of str to array
        ``x``, ``feature_names`` (its columns in the header), ``edges`` and ``names`` (the
        ids as text), with nodes in the order of the table. Labels add ``y`` and
        ``class_names``, and a column ``split`` that is not all empty adds ``train_mask``,
        ``val_mask`` and ``test_mask``. Arrays with a collected error are missing.

    Raises
    ------
    DataError
        If a table is missing or malformed, an id is empty, duplicate or unknown, a label
        is not in ``classes.csv``, or a feature is not a finite number. The message names
        file, line and column.
    """
    attempt = attempts or ErrorCollector()
    path = folder / "nodes.csv"
    required = ("id", "label") if needs_labels else ("id",)
    nodes = attempt(_read_table, path, required=required)
    if nodes is None:
        return {}
    ids = attempt(_ids, nodes, path)
    arrays: dict[str, Array | None] = {}
    if needs_labels:
        arrays |= attempt(_labels, nodes["label"], folder) or {}
    arrays["x"] = _features(nodes, path, attempt)
    columns = [name for name in nodes.columns if name not in NOT_FEATURES]
    arrays["feature_names"] = np.array(columns, dtype=np.str_)
    if ids is not None:
        arrays["edges"] = attempt(_edges, folder / "edges.csv", ids)
        arrays["names"] = np.array(ids.tolist(), dtype=np.str_)
    if needs_labels and "split" in nodes and (nodes["split"] != "").any():
        arrays |= attempt(_masks, nodes["split"], path) or {}
    return {key: array for key, array in arrays.items() if array is not None}


def _labels(label: Any, folder: Path) -> dict[str, Array]:
    """Convert the labels to class numbers and class names."""
    path = folder / "nodes.csv"
    class_names = _class_names(label, folder)
    y = np.full(len(label), -1, dtype=np.int64)
    is_known = (label != "").to_numpy(bool)
    y[is_known] = class_names.get_indexer(label[is_known])
    unknown = is_known & (y < 0)
    if unknown.any():
        raise DataError(
            f'{path}, line {label.index[unknown][0]}: class "{label[unknown].iloc[0]}" '
            "is not in classes.csv. Add it there, or correct the label."
        )
    names = np.array(class_names.tolist(), dtype=np.str_)
    return {"y": y, "class_names": names}


def _read_table(path: Path, required: tuple[str, ...], *, more: bool = True) -> Any:
    """Read one table, indexed by line; keep text columns and empty cells as text."""
    import pandas as pd  # type: ignore[import-untyped]  # takes a second to import

    if not path.is_file():
        raise DataError(
            f"{path} is missing. Provide it with the columns {', '.join(required)}."
        )
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
            warnings.simplefilter("error", pd.errors.ParserWarning)  # for long rows
            read = partial(
                pd.read_csv,
                path,
                dtype=dict.fromkeys(TEXT_COLUMNS, str),
                keep_default_na=False,
                index_col=False,
                skip_blank_lines=False,
                low_memory=False,
                encoding="utf-8-sig",
            )
            table = read()
            is_blank = _blank_rows(table, required[0])
            if is_blank.any():  # blank rows make numeric columns text: read again
                table = read(skiprows=np.flatnonzero(is_blank) + 1)
    except (
        pd.errors.ParserError,
        pd.errors.EmptyDataError,
        pd.errors.ParserWarning,
        UnicodeDecodeError,
        csv.Error,
    ) as error:
        raise DataError(
            f"{path} is not a CSV table in UTF-8 with one header line: {error}. Export it "
            "again as CSV."
        ) from error
    table.index = np.flatnonzero(~is_blank) + 2  # line 1 is the header
    for column in table.columns.intersection(TEXT_COLUMNS):
        table[column] = table[column].str.strip()
    return table


def _blank_rows(table: Any, column: str) -> Array:
    """Mark the rows with only blank cells; ``column`` is a text column."""
    is_blank: Array = (table[column].str.strip() == "").to_numpy(bool, copy=True)
    rows = table[is_blank].to_numpy(object)
    is_blank[is_blank] = [not "".join(map(str, row)).strip() for row in rows]
    return is_blank


def _ids(nodes: Any, path: Path) -> Any:
    """Return the node ids; reject empty and duplicate ones."""
    import pandas as pd

    ids = pd.Index(nodes["id"])
    if not len(ids):
        raise DataError(f"{path} holds no nodes. Add one line per node.")
    is_empty = (nodes["id"] == "").to_numpy(bool)
    if is_empty.any():
        raise DataError(
            f"{path}, line {nodes.index[is_empty][0]}: the id is empty. Give each node "
            "an id."
        )
    is_repeated = ids.duplicated()
    if is_repeated.any():
        raise DataError(
            f'{path}, line {nodes.index[is_repeated][0]}: id "{ids[is_repeated][0]}" is '
            "already taken by a line above. Give each node its own id."
        )
    return ids


def _class_names(label: Any, folder: Path) -> Any:
    """Return the classes in ``classes.csv``, or by default those of the labels."""
    import pandas as pd

    path = folder / "classes.csv"
    if path.is_file():
        names = pd.Index(_read_table(path, required=("name",), more=False)["name"])
        if not len(names) or names.has_duplicates or "" in names:
            raise DataError(
                f"{path} must name each class once, without empty or repeated names."
            )
        return names
    found = label[label != ""].unique().tolist()
    if not found:
        raise DataError(
            f"{folder / 'nodes.csv'}: no node has a label. List the classes in "
            "classes.csv."
        )
    is_number = all(name.isdecimal() for name in found)
    return pd.Index(sorted(found, key=lambda n: (int(n), n) if is_number else (0, n)))


def _features(nodes: Any, path: Path, attempt: ErrorCollector) -> Array | None:
    """Return the feature columns as float32, shape (N, d)."""
    table = nodes.drop(columns=NOT_FEATURES, errors="ignore")
    if not table.shape[1]:
        return attempt(_no_features, path)
    columns = [
        attempt(_feature, table[column], column, path) for column in table.columns
    ]
    found = [column for column in columns if column is not None]
    return np.stack(found, axis=1) if len(found) == len(columns) else None


def _no_features(path: Path) -> Array:
    """Raise the error for a table without features."""
    raise DataError(
        f"{path} has no feature column besides id, label and split. Add one."
    )


def _feature(values: Any, column: str, path: Path) -> Array:
    """Return one feature of all nodes as float32, shape (N,)."""
    import pandas as pd

    if not pd.api.types.is_numeric_dtype(values):
        read = pd.to_numeric(values, errors="coerce")
        if read.isna().any():
            line = values.index[read.isna()][0]
            raise DataError(
                f'{path}, line {line}, column "{column}": expected a number, got '
                f'"{values[line]}".'
            )
        values = read  # integers above 64 bits
    with np.errstate(over="ignore"):  # values beyond float32 become inf, rejected below
        x: Array = np.array(values, dtype=np.float32)
    wrong = ~np.isfinite(x)
    if wrong.any():
        line = values.index[wrong][0]
        raise DataError(
            f'{path}, line {line}, column "{column}": expected a finite number, got '
            f"{values[line]}."
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
                f'{path}, line {table.index[dangling][0]}: {column} "'
                f'{table[column][dangling].iloc[0]}" is not an id in nodes.csv.'
            )
    return edges


def _masks(split: Any, path: Path) -> dict[str, Array]:
    """Convert the column ``split`` to masks."""
    wrong = ~split.isin([*SPLITS, ""]).to_numpy(bool)
    if wrong.any():
        raise DataError(
            f"{path}, line {split.index[wrong][0]}: split must be "
            f"{', '.join(SPLITS)} or empty, got "
            f'"{split[wrong].iloc[0]}".'
        )
    return {f"{name}_mask": np.array(split == name, dtype=np.bool_) for name in SPLITS}
