"""Reader of a typed graph stored as a folder of CSV tables, see docs/typed-graphs.md.

A relation is known by its kinds and its name. Its edges have a direction; repeated edges
are one.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.errors import DataError, ErrorCollector, clip, show_path
from flower_fgl.core.schema import Triple, has_name
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import EdgeTable
from flower_fgl.datasets.graph_files.archive import Array
from flower_fgl.datasets.graph_files.csv_rows import (
    Table,
    Wanted,
    csv_rows,
    read_columns,
    read_table,
    target_columns,
)
from flower_fgl.datasets.graph_files.csv_tables import (
    index_ids,
    read_classes,
    read_described_edges,
    read_ends,
    read_masks,
    single_cell,
    split_note,
)
from flower_fgl.datasets.graph_files.npz import (
    LocalGraphFile,
    edge_table,
    read_prepared,
)
from flower_fgl.datasets.graph_files.relations_csv import TypedNames, read_typed_names
from flower_fgl.datasets.graph_files.target_arrays import (
    KNOWN_EDGES,
    read_names,
    read_values,
)
from flower_fgl.datasets.graph_files.typed_arrays import NO_EDGE_FEATURES
from flower_fgl.datasets.graph_files.validate import check_feature_names
from flower_fgl.datasets.transforms.typed import (
    NodeTable,
    TypedTarget,
    typed_dataset,
    with_edge_table,
)

__all__ = ["edge_notes", "read_typed_folder"]


def read_typed_folder(
    folder: Path, wanted: Wanted, attempt: ErrorCollector
) -> LocalGraphFile | None:
    """Read the tables of a typed graph, a folder with ``relations.csv``.

    Kinds are sorted by name, relations are in the order of ``relations.csv``. An error is
    a DataError that names file, line and column; the result is ``None`` if one was
    collected.
    """
    names = read_typed_names(folder, wanted, attempt)
    if names is None:
        return None
    return _read(folder, names, attempt, wanted, _predicted(folder, names, wanted))


def _predicted(folder: Path, names: TypedNames, wanted: Wanted) -> Triple | None:
    """Return the relation whose edges have labels, or are to be scored."""
    found = []
    for one in names.relations:
        path = folder / one.file
        _, header = next(csv_rows(path, ()), (0, []))
        several = target_columns(path, "", of_edges=True).read
        is_labelled = "label" in header or bool(several)
        is_wanted = has_name(one.triple, wanted.target_relation)
        if is_wanted and (is_labelled or wanted.scores_edges):
            found.append(one.triple)
    return found[0] if len(found) == 1 else None


def _read(
    folder: Path,
    names: TypedNames,
    attempt: ErrorCollector,
    wanted: Wanted,
    predicted: Triple | None,
) -> LocalGraphFile | None:
    """Read the tables of kinds and relations whose names were checked."""
    schema, listed = names
    tables, index, notes = {}, {}, list[str]()
    kind_of_nodes = wanted.kind_of_nodes
    for kind in schema.node_types:
        path = folder / "nodes" / f"{kind}.csv"
        table = attempt(_table, path, kind_of_nodes if kind == schema.target else "")
        if table is None:
            continue
        tables[kind] = table
        index[kind] = attempt(index_ids, table)
        if kind != schema.target:
            notes += attempt(_unread, table, schema.target) or ()
    features = {kind: table.features(attempt) for kind, table in tables.items()}
    labels = None
    if target := tables.get(schema.target):
        columns = target_columns(target.path, kind_of_nodes)
        labels = attempt(_labels, target, folder, columns.read, wanted)
        notes += split_note(target, columns).tolist()
    edges: dict[Triple, Tensor] = {}
    described: EdgeTable | None = None
    for one in listed:
        source, _, end = one.triple
        if not ((ids := index.get(source)) and (others := index.get(end))):
            continue
        ends, kinds, path = (ids, others), (source, end), folder / one.file
        if one.triple == predicted:
            described = attempt(_described, path, ends, kinds, folder, wanted)
            if described is not None:
                edges[one.triple] = described.pairs
                why = target_columns(path, wanted.target_kind, of_edges=True).why
                notes += [f"edges/{path.name}: {why}"] if why else []
        elif (found := attempt(_edges, path, *ends, kinds)) is not None:
            edges[one.triple], more = found
            notes += more
    held: dict[str, Array] = {}
    if os.path.exists(path := folder / "prepared.csv"):
        cell = attempt(single_cell, path, "sha256")
        held = {} if cell is None else {"prepared": cell}
    if attempt.problems or labels is None:
        return None
    node_tables = {
        kind: NodeTable(torch.from_numpy(x), tuple(tables[kind].feature_names))
        for kind, x in features.items()
        if x is not None
    }
    where = show_path(folder)
    dataset = attempt(
        typed_dataset,
        folder.name,
        node_tables,
        edges,
        schema.target,
        labels,
        schema.private,
    )
    if dataset is not None:
        attempt(check_feature_names, dataset.feature_names, where)
    if dataset is None or attempt.problems:
        return None
    if described is not None and predicted is not None:
        dataset = with_edge_table(dataset, described, predicted)
    return LocalGraphFile(
        dataset,
        torch.arange(dataset.num_nodes),
        names=tuple(n for table in tables.values() for n in table.text["id"]),
        notes=tuple(notes),
        prepared=attempt(read_prepared, held, where, dataset.schema) or "",
    )


def _table(path: Path, target_kind: str) -> Table:
    """Read the table of one kind of nodes."""
    several, others, _ = target_columns(path, target_kind)
    columns = ("id", "label", "split", *several, *others)
    return read_table(path, ("id",), columns, needs_features=False)


def _unread(table: Table, target: str) -> list[str]:
    """Return notes on the columns of a kind that is not predicted; reject its split."""
    columns = [name for name in table.text if table.text[name] and name != "id"]
    parts = {"split", *table.parts.values()}
    is_labelled = not parts.issuperset(columns)
    if columns and not is_labelled:
        raise DataError(
            f"{table.where}: the column {clip(columns[0])} holds a split, but only nodes "
            f"of the kind {target} are predicted. Remove it, or rename it if it is a "
            "feature."
        )
    if not columns:
        return []
    return [
        f"nodes/{table.path.name}: {clip(', '.join(columns))} will not be read: nodes of "
        f"the kind {target} are predicted."
    ]


def _labels(
    table: Table, folder: Path, several: Sequence[str], wanted: Wanted
) -> TypedTarget:
    """Return labels or numbers, and the split, of the nodes to predict."""
    number = len(table.lines)
    if not wanted.needs_labels:
        return TypedTarget(torch.full((number,), -1), Target.classes(("",)))
    arrays: Mapping[str, Array] = (
        read_columns(table, several, "node", folder)
        if several
        else read_classes(table, folder / "classes.csv", "node")
    )
    target = read_names(arrays, table.where)
    found = read_values(arrays, table.where, target, number)
    masks = {
        name.removesuffix("_mask"): torch.from_numpy(mask)
        for name, mask in read_masks(table).items()
    }
    return TypedTarget(found.y, target, masks, found.targets)


def _unknown_end(
    kinds: tuple[str, str],
) -> Callable[[str, str, Path, int], DataError]:
    """Return a function that makes the error for an id that is in no table."""

    def unknown(name: str, column: str, path: Path, line: int) -> DataError:
        kind = kinds[column == "target"]
        return DataError(
            f'{show_path(path)}, line {line}: {column} "{clip(name)}" is not an id in '
            f"nodes/{kind}.csv. Correct it, or add a line there."
        )

    return unknown


def _described(
    path: Path,
    indexes: tuple[Mapping[str, int], Mapping[str, int]],
    kinds: tuple[str, str],
    folder: Path,
    wanted: Wanted,
) -> EdgeTable:
    """Return the edges of the predicted relation, as row numbers of its two kinds."""
    arrays = read_described_edges(
        path,
        indexes,
        _unknown_end(kinds),
        ErrorCollector(),
        folder,
        wanted,
        is_read=True,
    )
    if wanted.scores_edges:
        arrays |= KNOWN_EDGES
    return edge_table(arrays, show_path(path))


def _edges(
    path: Path,
    ids: Mapping[str, int],
    others: Mapping[str, int],
    kinds: tuple[str, str],
) -> tuple[Tensor, list[str]]:
    """Return the edges of one relation, (2, M), and notes on how they were read."""
    _, header = next(csv_rows(path, ("source", "target")))
    unread = [name for name in header if name not in ("source", "target")]
    edges = torch.from_numpy(
        np.ascontiguousarray(read_ends(path, (ids, others), _unknown_end(kinds)).T)
    )
    return edges, edge_notes(f"edges/{path.name}", unread, edges, len(others))


def edge_notes(
    where: str, unread: Sequence[str], edges: Tensor, num_targets: int
) -> list[str]:
    """Return notes on columns of edges that are not read, and on repeated edges (2, M)."""
    notes = []
    if unread:
        notes.append(
            f"{where}: {clip(', '.join(unread), 200)} will not be read: {NO_EDGE_FEATURES}"
        )
    distinct = len(torch.unique(edges[0] * num_targets + edges[1]))
    if repeated := edges.shape[1] - distinct:
        notes.append(
            f"{where}: {repeated:,} lines repeat an edge, and count once. Write how often "
            "an edge occurs into a feature of its nodes."
        )
    return notes
