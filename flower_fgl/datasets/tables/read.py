"""Readers of CSV, Parquet, GraphML and ``.npz`` tables, in blocks of rows.

Text of a CSV table is not converted, so that account numbers keep all digits. Integers,
floats and dates of other files keep their types.
"""

import itertools
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flower_fgl.core.errors import DataError, clip, show_path
from flower_fgl.datasets.graph_files.archive import Array, read_arrays
from flower_fgl.datasets.graph_files.own_split import split_names
from flower_fgl.datasets.tables.recipe import TableRecipe

__all__ = ["Block", "read_blocks"]

BLOCK_ROWS = 100_000
GRAPHML = b'<graphml xmlns="http://graphml.graphdrawing.org/xmlns">'
"""In place of a first element without a namespace."""
NO_PYARROW = (
    "needs pyarrow. Install it with pip install 'flower-fgl[tables]', or write the table "
    "as CSV."
)


@dataclass(frozen=True)
class Block:
    """Some rows of a table."""

    name: str  # of the file
    rows: Array  # (n,) number of each row; the header of a CSV table is row 1
    columns: Mapping[str, Array]  # (n,) text ("" if empty), numbers or dates (NaN, NaT)
    # of a CSV table: numbers of the rows whose cell has a line break, by column
    breaks: Mapping[str, list[int]] = field(default_factory=dict)

    def place(self, row: int) -> str:
        """Name a row for a message."""
        return f"{self.name}, row {int(self.rows[row]):,}"


def read_blocks(path: Path, table: TableRecipe) -> Iterator[Block]:
    """Yield the rows of a table; ``table.part`` says which of a file with a whole graph.

    A ``DataError`` says that the file is missing, damaged or of another kind.
    """
    readers = {".csv": _read_csv, ".tsv": _read_csv, ".txt": _read_csv}
    readers |= {".parquet": _read_parquet, ".pq": _read_parquet}
    readers |= {".graphml": _read_graphml, ".npz": _read_npz}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{show_path(path)} is no table that can be read. Known endings: "
            f"{', '.join(readers)}."
        )
    if not os.path.isfile(path):
        raise DataError(f"{show_path(path)} does not exist, or is no file.")
    return reader(path, table)


def _read_csv(path: Path, table: TableRecipe) -> Iterator[Block]:
    """Yield the rows of a CSV table as text; blank lines are left out."""
    import pandas as pd

    where = show_path(path)
    first = 2 if table.header else 1
    malformed = (
        pd.errors.ParserError,
        pd.errors.ParserWarning,
        pd.errors.EmptyDataError,
    )
    try:
        with pd.read_csv(
            path,
            sep=table.separator,
            encoding="utf-8-sig",
            dtype=object,
            na_filter=False,
            index_col=False,
            header=0 if table.header else None,
            skip_blank_lines=False,
            skipinitialspace=True,
            chunksize=BLOCK_ROWS,
        ) as reader:
            while (frame := _next_frame(reader)) is not None:
                columns = _columns(frame, where, table)
                rows = np.arange(first, first + len(frame))
                first += len(frame)
                filled = np.logical_or.reduce([c != "" for c in columns.values()])
                rows = rows[filled]
                columns = {name: cells[filled] for name, cells in columns.items()}
                breaks = {
                    name: rows[["\n" in cell for cell in cells]].tolist()
                    for name, cells in columns.items()
                    if "\n" in "".join(cells)
                }
                yield Block(path.name, rows, columns, breaks)
    except malformed as error:
        raise DataError(
            f"{where} is not a CSV table whose rows have equally many cells, separated by "
            f'"{table.separator}": {clip(error, 200)}. Correct it, or set separator in the '
            "recipe."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not in UTF-8: save it in this encoding."
        ) from error
    except OSError as error:
        raise DataError(f"Cannot read {where}: {clip(error, 200)}.") from error


def _next_frame(reader: Any) -> Any:
    """Return the next rows; ``None`` at the end."""
    import pandas as pd

    with warnings.catch_warnings():
        # a first row with more cells than the header would lose them
        warnings.simplefilter("error", pd.errors.ParserWarning)
        return next(reader, None)


def _columns(frame: Any, where: str, table: TableRecipe) -> dict[str, Array]:
    """Return the columns of a CSV table; those without a header are named 1, 2, …."""
    names = [str(name).strip() for name in frame.columns]
    if not table.header:
        names = [str(number) for number in range(1, len(names) + 1)]
    others = [mark for mark in ";\t|," if len(names) == 1 and mark in names[0]]
    if others:
        raise DataError(
            f"{where} has one column, {clip(names[0])}. Set separator = {others[0]!r} in "
            "its table of the recipe."
        )
    _require_distinct(names, where)
    cells = (frame.iloc[:, number].to_numpy() for number in range(len(names)))
    return dict(zip(names, cells, strict=True))


def _require_distinct(names: list[str], where: str) -> None:
    """Reject a table of which two columns have one name."""
    if len(set(names)) < len(names):
        raise DataError(f"{where} has two columns with one name. Rename one of them.")


def _read_parquet(path: Path, table: TableRecipe) -> Iterator[Block]:
    """Yield the rows of a Parquet file."""
    where = show_path(path)
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(f"{where} {NO_PYARROW}") from error
    try:
        first = 1
        with pq.ParquetFile(path) as file:
            _require_distinct(file.schema_arrow.names, where)
            for batch in file.iter_batches(batch_size=BLOCK_ROWS):
                cells = map(_arrow_cells, batch.columns)
                columns = dict(zip(batch.schema.names, cells, strict=True))
                yield Block(path.name, np.arange(first, first + len(batch)), columns)
                first += len(batch)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"Cannot read {where}: {clip(error, 200)}.") from error


def _arrow_cells(column: Any) -> Array:
    """Return the cells of an Arrow column; integers with gaps become text."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if types.is_timestamp(column.type) or types.is_date(column.type):
        return np.asarray(column.cast(pa.timestamp("us"), safe=False))  # in UTC
    is_whole = types.is_integer(column.type) and not column.null_count
    if is_whole or types.is_floating(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    cells: Array = np.asarray(column.cast(pa.string()).to_numpy(zero_copy_only=False))
    cells = cells.astype(object)
    cells[np.asarray(column.is_null())] = ""
    return cells


def _read_graphml(path: Path, table: TableRecipe) -> Iterator[Block]:
    """Yield the nodes or edges of a GraphML file; their ids are text."""
    import networkx as nx

    reader = nx.GraphMLReader(force_multigraph=True)
    malformed = (nx.NetworkXError, SyntaxError, OSError, KeyError, ValueError)
    try:
        text = path.read_bytes().replace(b"<graphml>", GRAPHML)
        graphs = list(reader(string=text))
        defaults = _graphml_defaults(reader, table.part)
    except (*malformed, TypeError, AttributeError) as error:  # an empty default
        raise DataError(
            f"{show_path(path)} is no GraphML file: {clip(error, 200)}."
        ) from error
    if len(graphs) != 1:
        raise DataError(
            f"{show_path(path)} must hold one graph, and has {len(graphs)}. Write one "
            "document for each graph."
        )
    (graph,) = graphs
    if table.part == "nodes":
        keys = {"id": list(graph.nodes)}
        found = [values for _, values in graph.nodes(data=True)]
    else:
        ends = list(graph.edges(data=True))
        keys = {"source": [e[0] for e in ends], "target": [e[1] for e in ends]}
        found = [values for _, _, values in ends]
    columns = {name: np.array(cells, dtype=object) for name, cells in keys.items()}
    found = [defaults | values for values in found]
    for name in dict.fromkeys(name for values in found for name in values):
        column = f"{name}.1" if name in keys else str(name)  # as of a repeated header
        cells = [str(values.get(name, "")) for values in found]
        columns[column] = np.array(cells, dtype=object)
    yield Block(path.name, np.arange(1, len(found) + 1), columns)


def _graphml_defaults(reader: Any, part: str) -> dict[str, Any]:
    """Return what nodes or edges without a value have, by name."""
    mark = f"{{{reader.NS_GRAPHML}}}"
    keys, defaults = reader.find_graphml_keys(reader.xml)
    return {
        keys[name]["name"]: defaults[name]
        for key in reader.xml.findall(f"{mark}key")
        if key.findtext(f"{mark}default")
        and keys[name := key.get("id")]["for"] in (part[:-1], "all", None)
    }


def _read_npz(path: Path, table: TableRecipe) -> Iterator[Block]:
    """Yield the nodes or edges of an ``.npz`` file with ``x`` and ``edge_index``.

    A matrix ``x`` has the columns ``x0``, ``x1``, …. Arrays of node numbers such as
    ``train_mask`` become one column ``split``. Ids are the row numbers. An ``edge_index``
    of shape (2, 2) is (2, edges).
    """
    where = show_path(path)
    arrays = read_arrays(path, None)
    pairs = arrays.pop("edge_index", None)
    if "x" not in arrays or pairs is None or pairs.ndim != 2 or 2 not in pairs.shape:
        raise DataError(
            f"{where} needs the arrays x (nodes, features) and edge_index, (2, edges) or "
            "(edges, 2), to be read as a table."
        )
    pairs = pairs.T if pairs.shape[0] == 2 else pairs
    number = len(arrays["x"]) if table.part == "nodes" else len(pairs)
    columns: dict[str, Array] = {"source": pairs[:, 0], "target": pairs[:, 1]}
    if table.part == "nodes":
        columns = {"id": np.arange(number)}
        masks = split_names(arrays)[0]
        if masks:
            columns["split"] = _split_cells(arrays, masks, number, where)
        for name in itertools.chain(*masks.values()):
            del arrays[name]
    is_edge = {name: name.startswith("edge") for name in arrays}
    for name, array in arrays.items():
        if len(array) != number or is_edge[name] != (table.part == "edges"):
            continue
        if array.ndim == 1:
            columns[name] = array.astype(object) if array.dtype.kind == "U" else array
        elif array.ndim == 2:
            columns |= {f"{name}{i}": array[:, i] for i in range(array.shape[1])}
    yield Block(path.name, np.arange(1, number + 1), columns)


def _split_cells(
    arrays: Mapping[str, Array], masks: Mapping[str, list[str]], number: int, where: str
) -> Array:
    """Return train, val, test or an empty text for each node."""
    cells = np.full(number, "", dtype=object)
    for part, names in masks.items():
        chosen = arrays[names[0]]
        is_mask = chosen.dtype.kind == "b" and chosen.shape == (number,)
        is_list = chosen.dtype.kind in "iu" and chosen.ndim == 1
        if (
            is_list
            and len(chosen) == number > 2
            and chosen.min() >= 0
            and chosen.max() <= 1
        ):
            chosen, is_mask = chosen != 0, True  # three nodes are no list of 0 and 1
        elif is_list and len(chosen):
            is_list = bool(0 <= chosen.min() <= chosen.max() < number)
            is_list &= len(np.unique(chosen)) == len(chosen)
        if len(names) > 1 or not (is_mask or is_list):
            raise DataError(
                f"{where}: {', '.join(names)} must be one array of different node numbers, "
                "or one of True and False, or of 1 and 0, for each node."
            )
        if (cells[chosen] != "").any():
            raise DataError(
                f"{where}: {names[0]} has nodes of another part of the split."
            )
        cells[chosen] = part
    return cells
