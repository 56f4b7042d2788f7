"""Reader of a typed graph stored as a folder of CSV tables, see docs/typed-graphs.md.

A relation is known by its kinds and its name. Its edges have a direction; repeated edges
are one.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.errors import DataError, ErrorCollector, clip, first_of, show_path
from flower_fgl.core.held_kind import EDGES, GRAPHS, NODES, RELATIONS
from flower_fgl.core.schema import NAME, Schema, Triple, has_name
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
    unread_tables,
)
from flower_fgl.datasets.graph_files.npz import edge_table, read_masks
from flower_fgl.datasets.graph_files.own_split import PARTS
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

__all__ = ["Relation", "edge_notes", "folder_tables", "read_typed_folder"]
__all__ += ["read_typed_names"]


COLUMNS = ("relation", "source", "target", "file", "private")
PLAIN = (NODES, EDGES, GRAPHS, "outside.csv")
"""Tables of graphs with one kind of nodes."""


@dataclass(frozen=True)
class Relation:
    """One line of ``relations.csv``; ``file`` is a path in the folder."""

    triple: Triple
    file: str
    line: int
    is_private: bool


def folder_tables(folder: Path) -> list[Path]:
    """Return all tables of a folder of CSV tables, sorted, with those of its subfolders."""
    found = list(folder.glob("*.csv"))
    if os.path.exists(folder / RELATIONS):
        found += [*folder.glob("nodes/*.csv"), *folder.glob("edges/*.csv")]
    return sorted(found)


def read_typed_names(
    folder: Path,
    wanted: Wanted,
    attempt: ErrorCollector,
    *,
    is_set: bool = False,
) -> tuple[Schema, list[Relation]] | None:
    """Read ``relations.csv`` and the headers of the tables; widths are 0.

    Kinds are sorted by name, relations are in the order of their lines. The result is
    ``None`` if an error was collected: a table is missing or not listed, a name is
    malformed or given twice, or the kind to predict is not clear. In a set of graphs no
    kind is predicted.
    """
    _reject_plain(folder, is_set=is_set)
    kinds = _tables_in(folder / "nodes", "kind of nodes")
    listed = _relations(folder / RELATIONS, kinds)
    target = "" if is_set else _target_kind(folder, kinds, wanted)
    schema = Schema(
        target,
        tuple((kind, 0) for kind in kinds),
        tuple(one.triple for one in listed),
        frozenset(one.triple for one in listed if one.is_private),
    )
    attempt(schema.check, show_path(folder / RELATIONS))
    attempt(_reject_unlisted, folder, kinds, listed, target, is_set=is_set)
    return None if attempt.problems else (schema, listed)


def _list_kinds(kinds: Sequence[str]) -> str:
    """Return the first kinds for a message."""
    return f"Kinds: {first_of([clip(kind) for kind in kinds])}."


def _reject_plain(folder: Path, *, is_set: bool) -> None:
    """Reject tables of graphs with one kind of nodes, which would not be read."""
    held = [name for name in PLAIN if os.path.exists(folder / name)]
    held = [name for name in held if not (is_set and name == GRAPHS)]
    if held:
        raise DataError(
            f"{show_path(folder)} has {RELATIONS}, by which it is a typed graph, but also "
            f"{', '.join(held)}, which would not be read. Remove {RELATIONS} if all nodes "
            "are alike, else move the tables into nodes/ and edges/."
        )


def _tables_in(folder: Path, item: str) -> list[str]:
    """Return the names of the tables in a folder, without ``.csv``, sorted."""
    where = show_path(folder)
    if not os.path.isdir(folder):
        raise DataError(
            f"{where} is missing. A typed graph has one table in {folder.name}/ per "
            f"{item}. Add it, or remove {RELATIONS} if all nodes are alike."
        )
    found = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    if other := [name for name in found if not name.endswith(".csv")]:
        raise DataError(
            f"{show_path(folder / other[0])} is no table NAME.csv, and would not be read. "
            "Export it as CSV, or remove it."
        )
    if not found:
        raise DataError(f"{where} holds no table. Add one per {item}.")
    return [name.removesuffix(".csv") for name in found]


def _relations(path: Path, kinds: Sequence[str]) -> list[Relation]:
    """Read ``relations.csv``."""
    rows = csv_rows(path, COLUMNS[:3])
    _, header = next(rows)
    if surplus := [column for column in header if column not in COLUMNS]:
        raise DataError(
            f"{show_path(path)}: the column {clip(surplus[0])} is not known. Known: "
            f"{', '.join(COLUMNS)}."
        )
    found = [
        _relation(
            dict(zip(header, map(str.strip, row), strict=True)),
            kinds,
            f"{show_path(path)}, line {line}",
            line,
        )
        for line, row in rows
    ]
    if not found:
        raise DataError(
            f"{show_path(path)} lists no relation. Add one line per relation, or provide "
            "nodes.csv and edges.csv if all nodes are alike."
        )
    _reject_repeats(found, show_path(path))
    return found


def _relation(
    cells: Mapping[str, str], kinds: Sequence[str], where: str, line: int
) -> Relation:
    """Read one line of ``relations.csv``."""
    name = cells["relation"]
    if not NAME.fullmatch(name):
        raise DataError(
            f'{where}: "{clip(name)}" is no name of a relation. Use 1 to 64 of the '
            "characters A-Z a-z 0-9 _ . - and begin with no dot."
        )
    for end in (cells["source"], cells["target"]):
        if end not in kinds:
            raise DataError(
                f'{where}: the kind "{clip(end)}" has no table nodes/{clip(end)}.csv. '
                f"{_list_kinds(kinds)}"
            )
    private = cells.get("private", "")
    if private not in ("", "yes"):
        raise DataError(
            f"{where}: private must be yes, or empty for a relation that is told, got "
            f'"{clip(private)}".'
        )
    file = cells.get("file", "") or f"edges/{name}.csv"
    folder, _, table = file.partition("/")
    if folder != "edges" or not NAME.fullmatch(table.removesuffix(".csv")):
        raise DataError(
            f"{where}: file must name a table in edges/, e.g. edges/{name}.csv, got "
            f'"{clip(file)}".'
        )
    triple = (cells["source"], name, cells["target"])
    return Relation(triple, file, line, bool(private))


def _reject_repeats(found: Sequence[Relation], where: str) -> None:
    """Reject a relation that is listed twice, and a table of two relations."""
    first: dict[object, Relation] = {}
    for one in found:
        for key in (one.triple, one.file):
            other = first.setdefault(key, one)
            if other is one:
                continue
            source, name, target = one.triple
            start = f"{where}, line {one.line}"
            if other.triple == one.triple:
                raise DataError(
                    f"{start}: the relation {source} -{name}-> {target} is already listed "
                    f"in line {other.line}. Remove one of the lines."
                )
            raise DataError(
                f"{start}: the edges of {source} -{name}-> {target} would be read from "
                f"{one.file}, as those of line {other.line}. Give each relation a table of "
                "its own, and name it in a column file."
            )


def _reject_unlisted(
    folder: Path,
    kinds: Sequence[str],
    listed: Sequence[Relation],
    target: str,
    *,
    is_set: bool,
) -> None:
    """Reject missing tables, and those that no line of ``relations.csv`` names."""
    files = {one.file for one in listed}
    held = {f"edges/{name}.csv" for name in _tables_in(folder / "edges", "relation")}
    if other := sorted(held - files):
        raise DataError(
            f"{show_path(folder / other[0])} is not in {RELATIONS}. List it, or remove it."
        )
    if missing := sorted(files - held):
        raise DataError(
            f"{show_path(folder / missing[0])} is missing. Provide it with the columns "
            f"{'graph, ' * is_set}{', '.join(ENDS)}."
        )
    joined = {end for one in listed for end in (one.triple[0], one.triple[2])}
    alone = [kind for kind in kinds if kind not in joined and kind != target]
    if alone and target:  # nodes of a set are pooled, with or without edges
        raise DataError(
            f"{show_path(folder / 'nodes' / alone[0])}.csv: no line of {RELATIONS} has the "
            f'kind "{clip(alone[0])}". List a relation of these nodes, or remove the table.'
        )


def _columns_to_predict(path: Path, *, of_edges: bool = False) -> tuple[str, ...]:
    """Return the columns of a table that hold classes, labels or numbers."""
    _, header = next(csv_rows(path, () if of_edges else ("id",)))
    found = target_columns(path, header, "", of_edges=of_edges).read
    return found or ("label",) * ("label" in header)


def _target_kind(folder: Path, kinds: Sequence[str], options: Wanted) -> str:
    """Return the kind of the nodes to predict."""
    wanted, needs_labels = options.target_node, options.needs_labels
    held = {k: _columns_to_predict(folder / "nodes" / f"{k}.csv") for k in kinds}
    labelled = [kind for kind, columns in held.items() if columns]
    if wanted and wanted not in kinds:
        raise DataError(
            f'{show_path(folder)}: target-node = "{clip(wanted)}", but there is no table '
            f"nodes/{clip(wanted)}.csv. {_list_kinds(kinds)} Correct the setting, or add "
            "the table."
        )
    if wanted and (wanted in labelled or not needs_labels):
        return wanted
    if wanted:
        raise DataError(
            f'{show_path(folder)}: target-node = "{wanted}", but nodes/{wanted}.csv has no '
            "column label or target. Add one; its cells may be empty."
        )
    if not labelled and needs_labels:
        raise DataError(
            f"{show_path(folder)}: no table in nodes/ has a column label or target. Add "
            "one to the table of the nodes to predict; its cells may be empty."
        )
    if len(labelled) > 1 and needs_labels:
        one, other = labelled[:2]
        columns = dict.fromkeys((held[one][0], held[other][0]))
        raise DataError(
            f"{show_path(folder)}: nodes/{one}.csv and nodes/{other}.csv both have a "
            f"column {' or '.join(columns)}. Set target-node to the one to predict."
        )
    return (labelled or kinds)[0]


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
    index, notes, labels = {}, unread_tables(folder), None
    for kind in schema.node_types:
        path, is_target = folder / "nodes" / f"{kind}.csv", kind == schema.target
        table = attempt(
            read_table,
            path,
            ("id",),
            TEXT_COLUMNS,
            needs_features=False,
            target_kind=wanted.kind_of_nodes if is_target else "",
        )
        if table is None:
            continue
        tables[kind], index[kind] = table, attempt(index_ids, table)
        if is_target:
            labels = attempt(_labels, table, folder, wanted)
            notes += split_note(table)
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
    node_tables = {
        kind: NodeTable(torch.from_numpy(x), tuple(tables[kind].feature_names))
        for kind, x in features.items()
        if x is not None
    }
    dataset = typed_dataset(
        folder.name, node_tables, edges, schema.target, labels, schema.private
    )
    check_feature_names(dataset.feature_names, show_path(folder))
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
    found = [
        one.triple
        for one in listed
        if (
            _columns_to_predict(folder / one.file, of_edges=True) or wanted.scores_edges
        )
        and has_name(one.triple, wanted.target_relation)
    ]
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


def _labels(table: Table, folder: Path, wanted: Wanted) -> TypedTarget:
    """Return labels or numbers, and the split, of the nodes to predict."""
    number = len(table.lines)
    if not wanted.needs_labels:
        return TypedTarget(torch.full((number,), -1), Target.classes(("",)))
    arrays = read_predicted(table, "node", folder, ErrorCollector())
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
    arrays = read_described_edges(path, ends, ErrorCollector(), folder, wanted, notes)
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
