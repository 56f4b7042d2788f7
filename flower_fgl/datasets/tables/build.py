"""Graphs, nodes and edges from the tables of a data owner.

In a set of graphs the key of a node is ``GRAPH:ID``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flower_fgl.core.errors import DataError, clip, first_of, show_path
from flower_fgl.core.options import nearest
from flower_fgl.datasets.graph_files.archive import Array
from flower_fgl.datasets.graph_files.own_split import PARTS
from flower_fgl.datasets.graph_files.validate import check_whole_numbers
from flower_fgl.datasets.tables.columns import (
    MOST_VALUES,
    OTHER,
    encode,
    read_cells,
    read_keys,
    words_of,
)
from flower_fgl.datasets.tables.read import Block, read_blocks
from flower_fgl.datasets.tables.recipe import (
    FEATURES,
    FOREIGN,
    KEYS,
    OF_GRAPHS,
    Column,
    Place,
    Recipe,
    TableRecipe,
    find_column,
    items_of,
    match_column,
)

__all__ = ["Part", "encode_part", "propose", "read_graph"]

CONSTANT = "constant"
"""Feature of nodes without another one."""
DIGITS = 6
"""Significant digits of a proposed number."""


@dataclass
class Part:
    """All N graphs or nodes, or all M edges, before their features are encoded."""

    ids: Array  # (N,) text, in a set GRAPH:ID for nodes; of edges empty
    pairs: Array  # (M, 2) numbers of the nodes at the ends; of nodes empty
    columns: dict[str, Column]
    values: dict[str, Array]  # features, label, split and time, see read_cells
    is_foreign: Array  # (N,) or (M,) bool: nodes of others, which only edges name
    lines: list[str]  # what was read and what was dropped


@dataclass
class _Rows:
    """All rows of one file."""

    name: str
    rows: Array
    keys: dict[str, Array]
    columns: dict[str, Column]
    values: dict[str, Array]
    notes: list[str]  # on cells of several lines


def read_graph(recipe: Recipe, paths: Sequence[Path]) -> dict[Place, Part]:
    """Read graphs, nodes, then edges, from an owner's tables; of typed graphs each kind.

    Several files may belong to one table of the recipe. A ``DataError`` names a table that
    is missing or unknown, a column or cell that cannot be read, an id that is repeated, an
    edge that ends at no node, or a node of no graph.
    """
    import pandas as pd

    files = _assign(recipe, paths)
    read = [
        (table, _read(path, table, recipe))
        for table in recipe.edges
        for path in files[table.table]
    ]
    found = {}
    for place in recipe.places:
        if place[0] != "edges":
            ends = [
                (rows, key)
                for table, rows in read
                for key in KEYS["edges"]
                if table.nodes_at(key) == place
            ]
            own = [
                (table, _read(path, table, recipe))
                for table in filter(recipe.needs, recipe.tables(place))
                for path in files.get(table.table, ())
            ]
            found[place] = _join(recipe, place, own, ends)
            if recipe.graphs and place[0] == "nodes":
                _require_graphs(place, found[place].ids, found["graphs",].ids)
            continue
        tables = recipe.tables(place)
        edges = [rows for table, rows in read if table.place == place]
        pairs = np.stack(
            [
                pd.Index(found[tables[0].nodes_at(key)].ids).get_indexer(
                    np.concatenate([rows.keys[key] for rows in edges])
                )
                for key in KEYS["edges"]
            ],
            axis=1,
        )
        columns, values = _stack(edges, [*_ranges(edges)], len(pairs))
        lines = _counted(edges, items_of(place))
        none = np.zeros(len(pairs), dtype=np.bool_)
        time = values.get("time")  # in a graph file they ascend
        if time is not None and (time[1:] < time[:-1]).any():
            order = np.argsort(time, kind="stable")
            pairs = pairs[order]
            values = {name: cells[order] for name, cells in values.items()}
            lines.append("The edges were sorted by time.")
        if time is not None and not recipe.has_labels:
            _add_empty_labels(recipe, place, columns, values, lines)
        found[place] = Part(np.empty(0), pairs, columns, values, none, lines)
    return found


def _add_empty_labels(
    recipe: Recipe,
    place: Place,
    columns: dict[str, Column],
    values: dict[str, Array],
    lines: list[str],
) -> None:
    """Add labels without a class, as a graph file holds times with labels only."""
    if not recipe.classes(place):  # a file needs the names of the classes
        del values["time"]
        lines.append(
            f"The times of {items_of(place)} are left out: for predict --from list the "
            "classes of the label in the recipe."
        )
        return
    columns |= {c.name: c for c in recipe.columns(place) if c.kind == "label"}
    values["label"] = np.full(len(values["time"]), "", dtype=object)


def _assign(recipe: Recipe, paths: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the files of each table of the recipe."""
    import fnmatch  # of file names only, which have no brackets with a meaning here

    tables = [table for table in recipe.tables(()) if table.table]
    files: dict[str, list[Path]] = {table.table: [] for table in tables}
    seen: dict[Path, Path] = {}
    for path in paths:
        if first := seen.get(path.resolve()):
            raise DataError(
                f"{show_path(path)} is the same file as {show_path(first)}, and its rows "
                "would be read twice. Name each file once."
            )
        seen[path.resolve()] = path
        found = [name for name in files if fnmatch.fnmatchcase(path.name, name)]
        if not found:
            raise DataError(
                f"{show_path(path)} is no table of {show_path(recipe.path)}. "
                f"{nearest(path.name, files)} Rename the file, or table = in the recipe; "
                "* stands for any text."
            )
        for name in found:
            files[name].append(path)
    for table in tables:
        if not files[table.table] and recipe.needs(table):
            raise DataError(
                f'{show_path(recipe.path)} names the table "{clip(table.table)}", which is '
                "not given. Add its file to the command."
            )
    return files


def _read(path: Path, table: TableRecipe, recipe: Recipe) -> _Rows:
    """Read one file as its recipe says."""
    blocks: list[tuple[Array, dict[str, Array], dict[str, Array]]] = []
    columns: dict[str, Column] = {}
    breaks: dict[str, list[int]] = {}
    for block in read_blocks(path, table):
        for name, found in block.breaks.items():
            breaks.setdefault(name, []).extend(found)
        used = _used(block, table, recipe)
        columns = {column.name: column for column in used.values()}
        keys = {
            kind: read_keys(block, _parts_of(kind, used, table))
            for kind in KEYS[table.part]
        }
        if graph := {k: c for k, c in used.items() if c.kind == "graph" or c.graph}:
            first = read_keys(block, graph, is_first=True)
            keys = {kind: first + ":" + key for kind, key in keys.items()}
        values = {
            column.name: read_cells(block, key, column, table.decimal)
            for key, column in used.items()
            if column.kind not in (*KEYS[table.part], "graph")
        }
        for column in used.values():
            if column.cuts:
                place = np.searchsorted(np.array(column.cuts), values.pop("time"))
                values["split"] = np.array(PARTS, dtype=object)[place]
                columns["split"] = column
        blocks.append((block.rows, keys, values))
    if not blocks or not sum(len(rows) for rows, _, _ in blocks):
        raise DataError(
            f"{show_path(path)} has no rows. Remove it, or its table from the recipe."
        )
    rows = np.concatenate([block[0] for block in blocks])
    keys, values = (
        {k: np.concatenate([b[i][k] for b in blocks]) for k in blocks[0][i]}
        for i in (1, 2)
    )
    return _Rows(path.name, rows, keys, columns, values, _notes(path, breaks))


def _notes(path: Path, breaks: Mapping[str, list[int]]) -> list[str]:
    """Describe cells with a line break; ``breaks`` has their rows by column."""
    notes = []
    for name, rows in breaks.items():
        what = f"1 cell of {clip(name)} spans several lines (row {rows[0]:,})"
        if len(rows) > 1:
            what = (
                f"{len(rows):,} cells of {clip(name)} span several lines (first in row "
                f"{rows[0]:,})"
            )
        notes.append(
            f"{path.name}: {what}. If a quotation mark is not closed, the rows below it "
            "are lost."
        )
    return notes


def _counted(tables: Sequence[_Rows], items: str) -> list[str]:
    """Return the number of rows of each table, and its notes."""
    return [
        line
        for rows in tables
        for line in (f"{rows.name}: {len(rows.rows):,} {items}", *rows.notes)
    ]


def _used(block: Block, table: TableRecipe, recipe: Recipe) -> dict[str, Column]:
    """Return the columns to read, by their name in the table."""
    left_out = set() if recipe.has_labels else {*OF_GRAPHS}
    if table.part == "edges":
        left_out -= {"time"}  # predict chooses edges by it
    where = show_path(recipe.path)
    used: dict[str, Column] = {}
    for name in block.columns:
        column = match_column(name, table.columns)
        if column is None:
            raise DataError(
                f'{block.name} has the column "{clip(name)}", which {where} does not '
                f'declare. Declare it, e.g. "{clip(name)}" = "ignore"; "*" = "ignore" '
                "ignores all others."
            )
        if column.kind in {"ignore", *left_out}:
            continue
        if column.kind in FEATURES and column.name in {c.name for c in used.values()}:
            raise DataError(
                f'{block.name} has two columns with the name "{clip(column.name)}" in '
                f'{where}. Add another name = "…" to one.'
            )
        used[name] = column
    for key, column in table.columns.items():
        is_there = any(match_column(name, {key: column}) for name in block.columns)
        if not is_there and column.kind not in {"ignore", *left_out}:
            is_label = column.kind in ("label", "split")
            raise DataError(
                f'{where} declares the column "{clip(key)}", which {block.name} lacks. '
                f"{nearest(key, block.columns)}"
                + " With --no-labels a table may lack labels, for predict."
                * is_label
            )
    return used


def _parts_of(
    kind: str, used: Mapping[str, Column], table: TableRecipe
) -> dict[str, Column]:
    """Return the columns of an id, source or target in the order of the recipe."""
    declared = [*table.columns]

    def order(name: str) -> tuple[int, str]:
        return declared.index(find_column(name, table.columns) or name), name

    names = (name for name, column in used.items() if column.kind == kind)
    return {name: used[name] for name in sorted(names, key=order)}


def _join(
    recipe: Recipe,
    place: Place,
    own: Sequence[tuple[TableRecipe, _Rows]],
    ends: Sequence[tuple[_Rows, str]],
) -> Part:
    """Return the nodes of all tables, and those that only the ends of edges name."""
    import pandas as pd

    lists, items = [rows for table, rows in own if not table.join], items_of(place)
    lines = _counted(lists, items)
    _require_unique(lists)
    listed = pd.Index(_concatenated([rows.keys["id"] for rows in lists]))
    named = _concatenated([rows.keys[key] for rows, key in ends])
    others = pd.Index(pd.unique(named)).difference(listed, sort=False)
    is_own = any(not table.table for table in recipe.tables(place))
    if len(others) and not is_own and recipe.foreign == "refuse":
        raise _unknown_end(ends, listed, recipe, items)
    if ends and len(listed) and not is_own and not listed.isin(named).any():
        raise _nothing_in_common(ends[0][0].name, named, listed, items)
    index = listed.append(others)
    is_foreign = np.zeros(len(index), dtype=np.bool_)
    is_foreign[len(listed) :] = not is_own
    if len(others):
        what = (
            items if is_own else f"foreign {items}, without a row in a table of {items}"
        )
        lines.append(f"ends of edges: {len(others):,} {what}")
    tables, places = [*lists], [*_ranges(lists)]
    for rows in (rows for table, rows in own if table.join):
        _require_unique([rows])
        at = index.get_indexer(rows.keys["id"])
        known = (at >= 0) & ~is_foreign[at]
        if not known.any():
            raise _nothing_in_common(rows.name, rows.keys["id"], index, items)
        lines.append(
            f"{rows.name}: columns of {int(known.sum()):,} nodes, "
            f"{int((~known).sum()):,} rows dropped, which name no own node"
        )
        lines += rows.notes
        rows.values = {name: cells[known] for name, cells in rows.values.items()}
        tables.append(rows)
        places.append(at[known])
    columns, values = _stack(tables, places, len(index))
    ids = index.to_numpy(dtype=object)
    return Part(ids, np.empty((0, 2)), columns, values, is_foreign, lines)


def _require_graphs(place: Place, ids: Array, graphs: Array) -> None:
    """Reject nodes of a graph without a row in a table of graphs."""
    of = np.array([name.partition(":")[0] for name in ids], dtype=object)
    bad = ~np.isin(of, graphs)
    if bad.any():
        first = int(bad.argmax())
        raise DataError(
            f'{int(bad.sum()):,} {items_of(place)} are of no graph, e.g. "'
            f'{clip(ids[first])}": the tables of graphs have no row with the id '
            f'"{clip(of[first])}". Add it, or remove the rows.'
        )


def _concatenated(arrays: Sequence[Array]) -> Array:
    """Return arrays of text as one."""
    return np.concatenate([np.empty(0, dtype=object), *arrays])


def _ranges(tables: Sequence[_Rows]) -> Iterator[Array]:
    """Yield the numbers of the rows of each table, below each other."""
    first = 0
    for rows in tables:
        yield np.arange(first, first + len(rows.rows))
        first += len(rows.rows)


def _require_unique(tables: Sequence[_Rows]) -> None:
    """Reject two rows with one id."""
    import pandas as pd

    ids = _concatenated([rows.keys["id"] for rows in tables])
    twice = pd.Series(ids, dtype=object).duplicated().to_numpy().nonzero()[0]
    if not len(twice):
        return
    names = np.repeat([rows.name for rows in tables], [len(r.rows) for r in tables])
    numbers = np.concatenate([rows.rows for rows in tables])
    first = int((ids == ids[twice[0]]).argmax())
    one, other = (f"{names[i]}, row {numbers[i]:,}" for i in (first, twice[0]))
    raise DataError(
        f'{one} and {other} have one id, "{clip(ids[twice[0]])}". Keep one row for each '
        f"node ({len(twice):,} rows repeat an id). If a table adds columns to nodes of "
        "another one, write join = true into the recipe."
    )


def _nothing_in_common(name: str, ids: Array, listed: Any, items: str) -> DataError:
    """Return the error for a table of which no id is one of the nodes."""
    one, other = clip(ids[0]), clip(listed[0])
    return DataError(
        f'{name}: no id, e.g. "{one}", is one of the {items}, e.g. "{other}". Spell ids '
        "alike in all tables."
    )


def _unknown_end(
    ends: Sequence[tuple[_Rows, str]], listed: Any, recipe: Recipe, items: str
) -> DataError:
    """Return the error for edges that end at no node; it names the first one."""
    first, name, wrong = "", "", dict[int, Array]()
    for rows, key in ends:
        bad = listed.get_indexer(rows.keys[key]) < 0
        wrong[id(rows)] = wrong.get(id(rows), np.zeros_like(bad)) | bad
        if not first and bad.any():
            row = int(bad.argmax())
            first = f"{rows.name}, row {int(rows.rows[row]):,}, {key}"
            name = rows.keys[key][row]
    number = sum(int(bad.sum()) for bad in wrong.values())
    return DataError(
        f'{first}: "{clip(name)}" has no row in the tables of {items} ({number:,} such '
        'edges). Accounts of others become nodes with foreign = "flag" in '
        f"{show_path(recipe.path)}; otherwise add their rows, or remove the edges."
    )


def _stack(
    tables: Sequence[_Rows], places: Sequence[Array], number: int
) -> tuple[dict[str, Column], dict[str, Array]]:
    """Return the columns of all tables, with the values at their nodes or edges."""
    columns: dict[str, Column] = {}
    values: dict[str, Array] = {}
    filled: dict[str, Array] = {}
    for rows, place in zip(tables, places, strict=True):
        for name, cells in rows.values.items():
            columns[name] = rows.columns[name]
            empty: Any = "" if cells.dtype == object else np.nan
            whole = values.setdefault(name, np.full(number, empty, dtype=cells.dtype))
            is_filled = filled.setdefault(name, np.zeros(number, dtype=np.bool_))
            if is_filled[place].any():
                raise DataError(
                    f'{rows.name} gives "{clip(name)}" to a node that has it from another '
                    'table. Declare one of the columns as "ignore".'
                )
            whole[place], is_filled[place] = cells, True
    return columns, values


def encode_part(recipe: Recipe, place: Place, of: Part) -> dict[str, Array]:
    """Return the features of all nodes or edges by name, float32 or bool of shape (N,).

    ``of.lines`` gets what was filled, and what the vocabulary lacks. A ``DataError`` names
    a value without a rule or an entry in the vocabulary, and two features of one name.
    """
    features: dict[str, Array] = {}
    is_foreign, items = of.is_foreign, items_of(place)
    for name, values in of.values.items():
        column = of.columns[name]
        if column.kind not in FEATURES:
            continue
        missing = values == "" if values.dtype == object else np.isnan(values)
        missing &= ~is_foreign
        if missing.any() and column.missing is None:
            raise DataError(
                f'{int(missing.sum()):,} {items} have no "{clip(name)}": they are in no '
                "table with that column. Declare what that means in the recipe, e.g. "
                f'{{kind = "{column.kind}", missing = "zero"}}.'
            )
        if missing.any():
            of.lines.append(
                f'{name}: {int(missing.sum()):,} empty, filled by "{column.missing}"'
            )
        for feature, cells in encode(column, values, words_of(recipe, place, column)):
            if feature in features:
                raise DataError(
                    f'Two features of {items} have the name "{clip(feature)}". Add another '
                    'name = "…" to a column of the recipe.'
                )
            cells[is_foreign] = 0
            if cells.dtype != np.bool_:
                check_whole_numbers(cells[:, None], items, [feature])
                cells = cells.astype(np.float32)
            features[feature] = cells
            if feature == f"{name}={OTHER}" and cells.any():
                others = sorted(set(values[cells]))
                of.lines.append(
                    f"{name}: {int(cells.sum()):,} cells are not in the vocabulary: "
                    f"{clip(first_of(others))}"
                )
    if place == ("nodes",) and not features:  # a kind of nodes may have none
        of.lines.append(
            f'The nodes have no feature: "{CONSTANT}" is 1 for all of them.'
        )
        features[CONSTANT] = np.ones(len(of.ids), dtype=np.bool_)
    has_foreign = not recipe.is_typed or any(t.table for t in recipe.tables(place))
    if place[0] == "nodes" and recipe.foreign == "flag" and has_foreign:
        features[FOREIGN] = is_foreign
    return features


def propose(parts: Mapping[Place, Part]) -> dict[str, Any]:
    """Return a vocabulary of one owner's features.

    A ``DataError`` names a category of more than 1,000 values, or a number without any.
    """
    found: dict[str, Any] = {}
    for place, of in parts.items():
        for name, values in of.values.items():
            kind = of.columns[name].kind
            if kind not in FEATURES or kind == "yes/no":
                continue
            is_category = kind == "category"
            table = found
            for key in (*place, "categories" if is_category else "numbers"):
                table = table.setdefault(key, {})
            table[name] = _words(name, values) if is_category else _scale(name, values)
    return found


def _words(name: str, values: Array) -> list[str]:
    """Return the sorted values of a category."""
    words = sorted(set(values) - {""})
    if len(words) > MOST_VALUES:
        raise DataError(
            f'The category "{clip(name)}" has {len(words):,} values, the limit is '
            f"{MOST_VALUES:,}: each becomes a feature. If the column holds ids or free "
            'text, declare it as "ignore".'
        )
    return words


def _scale(name: str, values: Array) -> dict[str, float]:
    """Return mean, standard deviation and median of a number."""
    known = values[~np.isnan(values)]
    if not len(known):
        raise DataError(
            f'The column "{clip(name)}" has no number, so that no scale can be proposed. '
            'Declare it as "ignore", or let another party propose.'
        )
    std = float(known.std())
    numbers = {
        "mean": float(known.mean()),
        "std": std or 1.0,
        "median": float(np.median(known)),
    }
    return {key: float(f"{value:.{DIGITS}g}") for key, value in numbers.items()}
