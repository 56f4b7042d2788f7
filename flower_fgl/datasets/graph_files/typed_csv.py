"""Reader of a typed graph stored as a folder of CSV tables, see docs/typed-graphs.md.

A relation is known by its kinds and its name. Its edges have a direction; repeated edges
are one.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.errors import DataError, ErrorCollector, clip, show_path
from flower_fgl.core.schema import Triple, has_name
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import EdgeTable, NodeDataset
from flower_fgl.datasets.graph_files.archive import Array
from flower_fgl.datasets.graph_files.csv_rows import (
    Table,
    Wanted,
    csv_rows,
    read_table,
    target_columns,
)
from flower_fgl.datasets.graph_files.csv_tables import (
    ENDS,
    TEXT_COLUMNS,
    End,
    index_ids,
    read_described_edges,
    read_ends,
    read_predicted,
    read_prepared_cell,
    split_note,
)
from flower_fgl.datasets.graph_files.npz import edge_table, read_masks
from flower_fgl.datasets.graph_files.own_split import PARTS
from flower_fgl.datasets.graph_files.relations_csv import Relation, read_typed_names
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
) -> tuple[NodeDataset, dict[str, Array]] | None:
    """Read the tables of a typed graph, a folder with ``relations.csv``.

    Returns also its ``names``, ``notes`` and ``prepared``, as of a graph with one kind.
    Kinds are sorted by name, relations are in the order of ``relations.csv``. An error is
    a DataError that names file, line and column; the result is ``None`` if one was
    collected.
    """
    names = read_typed_names(folder, wanted, attempt)
    if names is None:
        return None
    schema, listed = names
    tables: dict[str, Table] = {}
    index, notes, labels = {}, list[str](), None
    for kind in schema.node_types:
        path, is_target = folder / "nodes" / f"{kind}.csv", kind == schema.target
        kind_of_target = wanted.kind_of_nodes if is_target else ""
        if (columns := attempt(target_columns, path, kind_of_target)) is None:
            continue
        text = (*TEXT_COLUMNS, *columns.held)
        table = attempt(read_table, path, ("id",), text, needs_features=False)
        if table is None:
            continue
        tables[kind], index[kind] = table, attempt(index_ids, table)
        if is_target:
            labels = attempt(_labels, table, columns.read, folder, wanted)
            notes += split_note(table, columns)
        else:
            notes += attempt(_unread, table, schema.target) or ()
    features = {kind: table.features(attempt) for kind, table in tables.items()}
    edges: dict[Triple, Tensor] = {}
    described: EdgeTable | None = None
    predicted = _predicted(folder, listed, wanted)
    for one in listed:
        source, _, target = one.triple
        if not ((ids := index.get(source)) and (others := index.get(target))):
            continue
        ends = (
            End("source", f"nodes/{source}.csv", ids),
            End("target", f"nodes/{target}.csv", others),
        )
        path = folder / one.file
        if one.triple == predicted:
            described = attempt(_described, path, ends, folder, wanted, notes)
            if described is not None:
                edges[one.triple] = described.pairs
        elif (found := attempt(_edges, path, ends, notes)) is not None:
            edges[one.triple] = found
    prepared = attempt(read_prepared_cell, folder) or {}
    if attempt.problems or labels is None:
        return None
    dataset = attempt(
        typed_dataset,
        folder.name,
        {
            kind: NodeTable(torch.from_numpy(x), tuple(tables[kind].feature_names))
            for kind, x in features.items()
            if x is not None
        },
        edges,
        schema.target,
        labels,
        schema.private,
    )
    if dataset is not None:
        attempt(check_feature_names, dataset.feature_names, show_path(folder))
    if dataset is None or attempt.problems:
        return None
    if described is not None and predicted is not None:
        dataset = with_edge_table(dataset, described, predicted)
    ids_of_all = [name for table in tables.values() for name in table.text["id"]]
    return dataset, prepared | {
        "names": np.array(ids_of_all, dtype=object),
        "notes": np.array(notes, dtype=np.str_),
    }


def _predicted(
    folder: Path, listed: Sequence[Relation], wanted: Wanted
) -> Triple | None:
    """Return the relation whose edges have labels, or are to be scored."""
    found = []
    for one in listed:
        path = folder / one.file
        _, header = next(csv_rows(path, ()), (0, []))
        several = target_columns(path, "", of_edges=True).read
        is_labelled = "label" in header or bool(several)
        is_wanted = has_name(one.triple, wanted.target_relation)
        if is_wanted and (is_labelled or wanted.scores_edges):
            found.append(one.triple)
    return found[0] if len(found) == 1 else None


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
    table: Table, several: Sequence[str], folder: Path, wanted: Wanted
) -> TypedTarget:
    """Return labels or numbers, and the split, of the nodes to predict."""
    number = len(table.lines)
    if not wanted.needs_labels:
        return TypedTarget(torch.full((number,), -1), Target.classes(("",)))
    arrays = read_predicted(table, several, "node", folder, ErrorCollector())
    target = read_names(arrays, table.where)
    found = read_values(arrays, table.where, target, number)
    masks = read_masks(arrays, table.where, PARTS)
    return TypedTarget(found.y, target, masks, found.targets)


def _described(
    path: Path,
    ends: tuple[End, End],
    folder: Path,
    wanted: Wanted,
    notes: list[str],
) -> EdgeTable:
    """Return the edges of the predicted relation, as row numbers of its two kinds."""
    columns = target_columns(path, wanted.target_kind, of_edges=True)
    attempt = ErrorCollector()
    arrays = read_described_edges(
        path, ends, columns, attempt, folder, wanted, notes, is_read=True
    )
    if wanted.scores_edges:
        arrays |= KNOWN_EDGES
    return edge_table(arrays, show_path(path))


def _edges(path: Path, ends: tuple[End, End], notes: list[str]) -> Tensor:
    """Return the edges of one relation, (2, M); ``notes`` get how they were read."""
    _, header = next(csv_rows(path, ENDS))
    unread = [name for name in header if name not in ENDS]
    edges = torch.from_numpy(np.ascontiguousarray(read_ends(path, ends).T))
    notes += edge_notes(f"edges/{path.name}", unread, edges, len(ends[1].rows))
    return edges


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
