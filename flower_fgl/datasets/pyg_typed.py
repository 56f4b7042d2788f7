"""Typed graphs of PyG: ``HeteroData``, and ``Data`` with kinds of nodes and edges."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.core.schema import Triple
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.datasets.graph_files.own_split import split_names
from flower_fgl.datasets.graph_files.validate import check_texts
from flower_fgl.datasets.pyg_read import (
    BOOKKEEPING,
    EDGE_LABELS,
    INTEGERS,
    TARGET_KEYS,
    check_columns,
    joined,
    read_features,
    read_index,
)
from flower_fgl.datasets.transforms.normalize_features import select_columns
from flower_fgl.datasets.transforms.typed import NodeTable, typed_union
from flower_fgl.nn.graph_union import select_rows

__all__ = [
    "TypeNames",
    "TypedParts",
    "is_hetero",
    "is_typed",
    "read_typed",
    "read_typed_set",
    "unread_of_typed",
]

NODE_NAMES = ("node_type_names", "hetero_node_types", "_node_type_names")
EDGE_NAMES = ("edge_type_names", "hetero_edge_types", "_edge_type_names")
TARGET = ("target_node", "target_node_type")
WIDTHS = ("type_widths",)
"""Attributes of a ``Data`` with the names of kinds and relations, in place of arguments.

``HeteroData.to_homogeneous`` leaves those that begin with an underscore.
"""
READ = {"x", "edge_index", "y", "num_nodes", "node_type", "edge_type"}
READ |= {*NODE_NAMES, *EDGE_NAMES, *TARGET, *WIDTHS}
log = logging.getLogger(__name__)
ALL_NODES, ALL_EDGES = "node", "to"
"""Names of the kind or the relation if a graph distinguishes only the other."""


@dataclass(frozen=True)
class TypeNames:
    """What a caller gives of kinds and relations; by default the graph has it.

    ``nodes`` and ``edges`` are names by the numbers in ``node_type`` and ``edge_type``;
    ``widths`` the columns of ``x`` that each kind has, further ones are padding. If it
    ``is_single``, there are no other owners, so that numbers may be names. ``relation`` is
    that of a ``HeteroData`` whose edges are predicted, see :meth:`.Schema.to_predict`.
    """

    nodes: Sequence[str] = ()
    edges: Sequence[str | Triple] = ()
    target: str = ""
    widths: Mapping[str, int] = field(default_factory=dict)
    private: Collection[Triple] = ()
    is_single: bool = True
    relation: str = ""


@dataclass(frozen=True, eq=False)
class TypedParts:
    """Tables of a typed graph, and where its labels are.

    ``items`` holds ``y`` and masks of ``size`` nodes. ``rows`` are those of the kind to
    predict. ``numbers`` (N,) are the row numbers that the nodes have in PyG, kind by kind.
    """

    tables: dict[str, NodeTable]
    relations: dict[Triple, Tensor]
    target: str
    items: Any
    size: int
    numbers: Tensor
    rows: Tensor


def is_hetero(data: object) -> bool:
    """Return whether an object is a ``torch_geometric.data.HeteroData``."""
    from torch_geometric.data import HeteroData

    return isinstance(data, HeteroData)


def is_typed(data: Any, names: TypeNames) -> bool:
    """Return whether a graph of PyG has several kinds of nodes or edges, or names them."""
    if is_hetero(data):
        return True
    if names.nodes or names.edges or _first(data, (*NODE_NAMES, *EDGE_NAMES)):
        return True
    found = [data.get(key) for key in ("node_type", "edge_type")]
    return any(isinstance(v, Tensor) and len(torch.unique(v)) > 1 for v in found)


def read_typed(
    data: Any,
    name: str,
    names: TypeNames,
    features: Sequence[str] | Mapping[str, Sequence[str]] = (),
    *,
    has_labels: bool = True,
) -> TypedParts:
    """Read kinds and relations of a ``HeteroData``, or of a ``Data`` that has several.

    ``features`` are the names of the columns of ``x``, by kind in a ``HeteroData``. Without
    labels the target is ``names.target``, or the first kind.
    """
    read = _read_hetero if is_hetero(data) else _read_numbered
    return read(data, name, names, features, has_labels=has_labels)


def read_typed_set(graphs: Sequence[Any], name: str) -> tuple[NodeDataset, Tensor]:
    """Return the disjoint union of typed graphs, and the graph of each node (N,).

    They are all ``HeteroData`` or all ``Data``. A graph may lack kinds and relations of
    others.
    """
    if not is_hetero(graphs[0]):
        return _read_numbered_set(graphs, name)
    parts: dict[str, list[NodeTable]] = {}
    graph_of: dict[str, list[Tensor]] = {}
    edges: dict[Triple, list[Tensor]] = {}
    size: dict[str, int] = {}
    for number, graph in enumerate(graphs):
        where = f"graph {number} of {name}"
        found = _read_hetero(graph, where, TypeNames(), (), has_labels=False)
        first = dict(size)
        for kind, table in found.tables.items():
            size[kind] = size.get(kind, 0) + len(table.x)
            parts.setdefault(kind, []).append(table)
            graph_of.setdefault(kind, []).append(torch.full((len(table.x),), number))
            width, other = table.x.shape[1], parts[kind][0].x.shape[1]
            if width != other:
                raise DataError(
                    f'{where}: nodes of the kind "{kind}" have {width} features, but '
                    f"{other} in a graph before. Give them the same columns."
                )
        for triple, index in found.relations.items():
            start = [[first.get(kind, 0)] for kind in triple[::2]]
            edges.setdefault(triple, []).append(index + torch.tensor(start))
    tables = {
        kind: NodeTable(torch.cat([table.x.to_dense() for table in held]))
        for kind, held in parts.items()
    }
    joint = {triple: torch.cat(pieces, dim=1) for triple, pieces in edges.items()}
    return typed_union(
        name, tables, joint, {kind: torch.cat(held) for kind, held in graph_of.items()}
    )


def _read_numbered_set(graphs: Sequence[Any], name: str) -> tuple[NodeDataset, Tensor]:
    """Return the union of ``Data`` with kinds; names are attributes of the first."""
    union = joined(graphs, name, ("x", "node_type", "edge_type"))
    for key in (*NODE_NAMES, *EDGE_NAMES, *WIDTHS):
        held = [getattr(graph, key, None) for graph in graphs]
        if odd := [number for number, one in enumerate(held) if one != held[0]]:
            raise DataError(
                f"{name}: {key} of graphs 0 and {odd[0]} differ. Number kinds and "
                "relations alike in all graphs."
            )
        if held[0] is not None:
            union[key] = held[0]
    found = _read_numbered(union, name, TypeNames(), (), has_labels=False)
    batch, sizes = union.batch[found.numbers], [len(t.x) for t in found.tables.values()]
    graph_of = dict(zip(found.tables, batch.split(sizes), strict=True))
    return typed_union(name, found.tables, found.relations, graph_of)


def _read_hetero(
    data: Any,
    name: str,
    names: TypeNames,
    features: Sequence[str] | Mapping[str, Sequence[str]],
    *,
    has_labels: bool,
) -> TypedParts:
    """Read a ``HeteroData``."""
    if names.nodes or names.edges or names.widths:
        raise DataError(
            f"{name}: node_type_names, edge_type_names and type_widths are for a Data; a "
            "HeteroData has its own."
        )
    columns = _by_kind(features, data.node_types, name)
    tables = {
        kind: _table(data[kind], f"{name}: {kind}", columns.get(kind, ()))
        for kind in data.node_types
    }
    relations = {}
    for triple in data.edge_types:
        where = f"{name}: {' '.join(triple)}"
        for kind in triple[::2]:
            if kind not in tables:
                raise DataError(
                    f'{where}: there are no nodes of the kind "{kind}". Set '
                    f'data["{kind}"].x or data["{kind}"].num_nodes.'
                )
        sizes = (len(tables[triple[0]].x), len(tables[triple[2]].x))
        relations[triple] = read_index(data[triple].get("edge_index"), where, sizes)
    held = [kind for kind in tables if data[kind].get("y") is not None]
    target = _target(names.target, held, list(tables), name, has_labels=has_labels)
    rows = {kind: torch.arange(len(table.x)) for kind, table in tables.items()}
    numbers, own = torch.cat([*rows.values()]), rows[target]
    return TypedParts(tables, relations, target, data[target], len(own), numbers, own)


def _table(store: Any, where: str, columns: Sequence[str]) -> NodeTable:
    """Return the nodes of one kind of a ``HeteroData``."""
    x = store.get("x")
    if x is None:
        number = store.get("num_nodes")
        y = store.get("y")
        if number is None and isinstance(y, Tensor):
            number = len(y)
        if number is None:
            raise DataError(
                f"{where}: expected features x, or num_nodes for a kind without features."
            )
        x = torch.empty(int(number), 0)
    elif not isinstance(x, Tensor) or x.dim() != 2 or 0 not in x.shape:
        x = read_features(x, where, columns)
    check_columns(columns, x, where)
    return NodeTable(x, tuple(columns))


def _by_kind(
    features: Sequence[str] | Mapping[str, Sequence[str]],
    kinds: Sequence[str],
    name: str,
) -> Mapping[str, Sequence[str]]:
    """Return the names of features of each kind."""
    if not features:
        return {}
    if not isinstance(features, Mapping):
        raise DataError(
            f"{name}: feature_names of a HeteroData must be a mapping from kinds of nodes "
            'to names, e.g. {"' + str(kinds[0]) + '": […]}.'
        )
    if unknown := sorted(set(features) - set(kinds)):
        raise DataError(
            f'{name}: feature_names has the kind "{unknown[0]}", but the kinds are '
            f"{', '.join(kinds)}."
        )
    return features


def _target(
    wanted: str,
    held: Sequence[str],
    kinds: Sequence[str],
    name: str,
    *,
    has_labels: bool,
) -> str:
    """Return the kind to predict: the one that was set, or the only one with labels."""
    if wanted:
        if wanted not in kinds:
            raise DataError(
                f'{name}: target-node = "{wanted}" is no kind of nodes. Kinds: '
                f"{', '.join(kinds)}."
            )
        if has_labels and wanted not in held:
            raise DataError(
                f'{name}: nodes of the kind "{wanted}", which target-node sets, have no y. '
                + (f"Kinds with y: {', '.join(held)}." if held else "Set it.")
            )
        return wanted
    if not kinds:
        raise DataError(f"{name}: there is no kind of nodes. Add nodes and edges.")
    if not held or not has_labels:  # enough for links, and for a model without kinds
        return (held or kinds)[0]
    if len(held) > 1:
        raise DataError(
            f"{name}: nodes of {len(held)} kinds have y: {', '.join(held)}. Set "
            "target-node (target_node in Python) to the kind to predict."
        )
    return held[0]


def _read_numbered(
    data: Any,
    name: str,
    names: TypeNames,
    features: Sequence[str] | Mapping[str, Sequence[str]],
    *,
    has_labels: bool,
) -> TypedParts:
    """Read a ``Data`` with ``node_type`` and ``edge_type``, or one of them."""
    if isinstance(features, Mapping):
        raise DataError(
            f"{name}: feature_names of a Data must be a list, one name for each column of "
            "x."
        )
    given = data.get("x")
    number = data.num_nodes if given is None else len(given)
    x = torch.empty(number, 0) if given is None else read_features(given, name)
    check_columns(features, x, name)
    index = read_index(data.edge_index, name, (number, number))
    kind_of, kinds = _numbers(data, "node_type", number, names.nodes, name, names)
    relation_of, relation_names = _numbers(
        data, "edge_type", index.shape[1], names.edges, name, names
    )
    rows = [(kind_of == k).nonzero().flatten() for k in range(len(kinds))]
    place = torch.empty(number, dtype=torch.int64)
    for own in rows:
        place[own] = torch.arange(len(own))
    triples = _triples(relation_names, relation_of, kind_of[index], kinds, name)
    tables = _cut_tables(x, dict(zip(kinds, rows, strict=True)), data, name, names)
    tables = {
        kind: NodeTable(t.x, tuple(features)[: t.x.shape[1]])
        for kind, t in tables.items()
    }
    relations = {one: place[index[:, chosen]] for one, chosen in triples.items()}
    wanted = names.target or _first(data, TARGET) or ""
    held = kinds
    if not wanted and has_labels:
        known = _known(data.get("y"), number)
        held = [kind for kind, own in zip(kinds, rows, strict=True) if known[own].any()]
    target = _target(wanted, held, kinds, name, has_labels=has_labels)
    own = rows[kinds.index(target)]
    return TypedParts(tables, relations, target, data, number, torch.cat(rows), own)


def _known(y: Any, number: int) -> Tensor:
    """Return which nodes have a class, label or number; malformed ``y`` counts as none."""
    if not isinstance(y, Tensor) or y.dim() not in (1, 2) or len(y) != number:
        return torch.zeros(number, dtype=torch.bool)
    values = y.detach().cpu().reshape(number, -1)
    if values.is_floating_point():
        return (~values.isnan() & (values != -1)).any(dim=1)
    return (values >= 0).any(dim=1)


def _numbers(
    data: Any,
    key: str,
    number: int,
    given: Sequence[Any],
    name: str,
    names: TypeNames,
) -> tuple[Tensor, list[Any]]:
    """Return ``node_type`` or ``edge_type`` with the names of its numbers."""
    attributes = NODE_NAMES if key == "node_type" else EDGE_NAMES
    given = given or _first(data, attributes) or ()
    if key == "node_type":  # those of edges may also be triples
        check_texts(given, f"{name}: node_type_names")
    listed = list(given)
    found, what = data.get(key), f"{key[:4]}s"
    if found is None:
        one = ALL_NODES if key == "node_type" else ALL_EDGES
        if len(listed) > 1:
            raise DataError(
                f"{name}: there are {len(listed)} {key}_names, but no {key}. Set data."
                f"{key}, one number for each of the {what}."
            )
        return torch.zeros(number, dtype=torch.int64), listed or [one]
    if not isinstance(found, Tensor) or found.dtype not in INTEGERS or found.dim() != 1:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise DataError(
            f"{name}: {key} must hold integers, one for each of the {number} {what}, got "
            f"{getattr(found, 'dtype', '')} {got}."
        )
    found = found.detach().cpu().to(torch.int64)
    if len(found) != number:
        raise DataError(
            f"{name}: {key} has {len(found)} entries for {number} {what}. It needs one "
            "for each."
        )
    low, high = (int(found.min()), int(found.max())) if number else (0, -1)
    if low < 0:
        raise DataError(f"{name}: {key} holds {low}. Number kinds from 0.")
    if not listed and not names.is_single:
        raise DataError(
            f"{name}: {key} has no names, by which owners agree on kinds. Set data."
            f"{key}_names, a list with a name for each number in {key}."
        )
    if listed and high >= len(listed):
        raise DataError(
            f"{name}: {key} holds {high}, but there are only {len(listed)} {key}_names."
        )
    return found, listed or [str(k) for k in range(high + 1)]


def _triples(
    names: Sequence[str | Triple],
    relation_of: Tensor,
    ends: Tensor,
    kinds: Sequence[str],
    name: str,
) -> dict[Triple, Tensor]:
    """Return the relations with the numbers of their edges.

    ``ends`` (2, M) are the kinds of the ends of each edge. A relation without a triple is
    one for each pair of kinds that its edges join; without edges it is left out.
    """
    found: dict[Triple, Tensor] = {}
    for number, one in enumerate(names):
        edges = (relation_of == number).nonzero().flatten()
        if not isinstance(one, str):
            triple = _checked(one, kinds, name)
            due = torch.tensor([[kinds.index(triple[0])], [kinds.index(triple[2])]])
            wrong = (ends[:, edges] != due).any(dim=0).nonzero().flatten()
            if len(wrong):
                edge = int(edges[wrong[0]])
                joined = " and ".join(kinds[k] for k in ends[:, edge].tolist())
                raise DataError(
                    f"{name}: edge {edge} is of the relation {triple[0]} -{triple[1]}-> "
                    f"{triple[2]}, but joins nodes of the kinds {joined}."
                )
            pieces = {triple: edges}
        else:
            pairs, which = torch.unique(ends[:, edges], dim=1, return_inverse=True)
            pieces = {
                (kinds[a], one, kinds[b]): edges[which == k]
                for k, (a, b) in enumerate(pairs.T.tolist())
            }
        for triple, piece in pieces.items():
            if triple in found:
                raise DataError(
                    f"{name}: edge_type_names lists {' '.join(triple)} twice."
                )
            found[triple] = piece
    return found


def _checked(given: Any, kinds: Sequence[str], name: str) -> Triple:
    """Return a triple of names; reject another object and unknown kinds."""
    triple = tuple(given) if isinstance(given, list | tuple) else ()
    if len(triple) != 3 or not all(isinstance(text, str) for text in triple):
        raise DataError(
            f"{name}: edge_type_names must hold names, or triples (kind of the source, "
            f"name, kind of the target), got {given!r:.80}."
        )
    for kind in triple[::2]:
        if kind not in kinds:
            raise DataError(
                f'{name}: the relation {" ".join(triple)} has the kind "{kind}", but '
                f"the kinds are {', '.join(kinds)}."
            )
    return triple[0], triple[1], triple[2]


def _cut_tables(
    x: Tensor,
    rows: Mapping[str, Tensor],
    data: Any,
    name: str,
    names: TypeNames,
) -> dict[str, NodeTable]:
    """Return the features of each kind, without columns that ``type_widths`` leaves out."""
    widths = names.widths or _first(data, WIDTHS) or {}
    if unknown := sorted(set(widths) - set(rows)):
        raise DataError(
            f'{name}: type_widths has the kind "{unknown[0]}", but the kinds are '
            f"{', '.join(rows)}."
        )
    tables = {}
    for kind, own in rows.items():
        width, block = int(widths.get(kind, x.shape[1])), select_rows(x, own)
        if not 0 <= width <= x.shape[1]:
            raise DataError(
                f'{name}: type_widths gives the kind "{kind}" {width} columns, but x has '
                f"{x.shape[1]}."
            )
        rest = select_columns(block, list(range(width, x.shape[1])))
        values = rest.values() if rest.layout == torch.sparse_csr else rest
        if int(values.count_nonzero()):
            raise DataError(
                f'{name}: type_widths gives the kind "{kind}" {width} columns, but its '
                "nodes have other values than 0 in later ones."
            )
        tables[kind] = NodeTable(select_columns(block, list(range(width))))
        if kind not in widths and (empty := _last_zeros(block)):
            log.warning(
                "%s: the last %d columns of x are 0 for all nodes of the kind %s. If they "
                "are padding, set data.type_widths: {%r: %d, …}.",
                name,
                empty,
                kind,
                kind,
                x.shape[1] - empty,
            )
    return tables


def _last_zeros(x: Tensor) -> int:
    """Return how many of the last columns hold zeros only, 0 if all columns do."""
    used = (x.to_dense() if x.layout == torch.sparse_csr else x).any(dim=0).nonzero()
    return x.shape[1] - 1 - int(used[-1]) if used.numel() else 0


def _first(data: Any, keys: Sequence[str]) -> Any:
    """Return the first of some attributes that a graph has, else ``None``."""
    found = (getattr(data, key, None) for key in keys)
    return next((value for value in found if value is not None), None)


def unread_of_typed(
    data: Any, target: str, predicted: Triple | None, *, has_values: bool
) -> set[str]:
    """Return the attributes with which a typed graph is not read.

    Those of a ``HeteroData`` follow the name of their kind or relation. Of a graph of a
    set, which has no ``target``, the targets are attributes of the whole graph.
    """
    values = set(TARGET_KEYS) if has_values else set()
    if not is_hetero(data):
        own = [key for key in set(data.keys()) if target and "edge" not in key]
        parts, _ = split_names(own)
        return set(data.keys()).difference(READ | BOOKKEEPING | values, *parts.values())
    unread = set(data.to_dict()["_global_store"])
    unread -= set() if target else {"y", *values}
    for kind in data.node_types:
        keys = set(data[kind].keys())
        known = {"x", "num_nodes"} | BOOKKEEPING
        if kind == target:
            parts, _ = split_names([key for key in keys if "edge" not in key])
            known |= {"y"} | values | {key for part in parts.values() for key in part}
        unread |= {f"{kind}.{key}" for key in keys - known}
    for triple in data.edge_types:
        keys = set(data[triple].keys()) - {"edge_index"} - BOOKKEEPING
        if triple == predicted:
            parts, _ = split_names([key for key in keys if "edge" in key])
            keys -= {*EDGE_LABELS, "edge_attr", "edge_time"}
            keys -= {key for part in parts.values() for key in part}
        unread |= {f"({', '.join(triple)}).{key}" for key in keys}
    return unread
