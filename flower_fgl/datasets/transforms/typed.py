"""Build a typed graph from tables of nodes and relations, and change its schema."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from flower_fgl.core.agreement import Told, hash_names
from flower_fgl.core.errors import DataError
from flower_fgl.core.schema import Schema, Triple
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import (
    ClientGraph,
    EdgeTable,
    Graph,
    GraphDataset,
    MessageEdges,
    NodeDataset,
    Scaling,
)
from flower_fgl.datasets.transforms.canonical import (
    SPARSE_BELOW,
    SPARSE_WIDTH,
    csr_tensor,
    scipy_csr,
    undirected_simple,
)
from flower_fgl.datasets.transforms.normalize_features import select_columns
from flower_fgl.nn.graph_union import select_rows

__all__ = [
    "OWN",
    "NodeTable",
    "TypedTarget",
    "agreed_graph",
    "held_parts",
    "in_schema",
    "move_columns",
    "told_parts",
    "typed_dataset",
    "typed_union",
    "with_edge_table",
    "without_types",
]


Dataset = TypeVar("Dataset", bound=NodeDataset | GraphDataset)

OWN = ".own"
"""End of the names of private relations beside those of all clients."""


@dataclass(frozen=True, eq=False)
class NodeTable:
    """The nodes of one kind: features ``x`` (n, d), float32, strided or sparse CSR.

    ``feature_names`` are those of the d columns, empty if they have none; d may be 0.
    """

    x: Tensor
    feature_names: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class TypedTarget:
    """What is predicted of the n nodes of one kind; as in :class:`NodeDataset`."""

    y: Tensor
    target: Target
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    targets: Tensor | None = None


def _first_nodes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the number of the first node of each kind."""
    return dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))


def typed_dataset(
    name: str,
    tables: Mapping[str, NodeTable],
    relations: Mapping[Triple, Tensor],
    target_type: str,
    wanted: TypedTarget,
    private: frozenset[Triple] = frozenset(),
) -> NodeDataset:
    """Build one graph from its tables; kinds and relations keep their order.

    ``relations`` holds the edges (2, M) as row numbers of the tables of their two kinds;
    repeats are merged. ``wanted`` are the labels and masks of the kind ``target_type``;
    without one, no node is predicted, and ``wanted`` is empty. Nodes of the result are
    numbered kind by kind.
    """
    schema = Schema(
        target_type,
        tuple((kind, int(table.x.shape[1])) for kind, table in tables.items()),
        tuple(relations),
        private,
    )
    schema.check(name)
    size = {kind: len(table.x) for kind, table in tables.items()}
    start, number = _first_nodes(size), sum(size.values())
    parts, numbers = [], []
    for place, ((source, relation, target), edges) in enumerate(relations.items()):
        for end, kind in ((0, source), (1, target)):
            outside = (edges[end] < 0) | (edges[end] >= size[kind])
            if bool(outside.any()):
                raise DataError(
                    f'{name}: the relation "{relation}" names node '
                    f"{int(edges[end][outside][0])} of the kind {kind}, which has "
                    f"{size[kind]} nodes."
                )
        moved = edges + torch.tensor([[start[source]], [start[target]]])
        code = torch.unique(moved[0] * number + moved[1])
        parts.append(torch.stack([code // max(number, 1), code % max(number, 1)]))
        numbers.append(torch.full((len(code),), place))
    none = torch.empty((2, 0), dtype=torch.int64)
    index = torch.cat([none, *parts], dim=1)
    relation_of = torch.cat([none[0], *numbers])
    first = start.get(target_type, 0)
    rows = slice(first, first + size.get(target_type, 0))
    if (targets := wanted.targets) is not None:
        unknown = torch.nan if targets.is_floating_point() else -1
        targets = _expand(targets, rows, number, unknown)
    return NodeDataset(
        name,
        _joint_features([table.x for table in tables.values()]),
        undirected_simple(index, number),
        _expand(wanted.y, rows, number, -1),
        wanted.target,
        {n: _expand(mask, rows, number, False) for n, mask in wanted.masks.items()},
        feature_names=_joint_names(tables),
        targets=targets,
        messages=MessageEdges(
            index, torch.empty(index.shape[1], 0), relation=relation_of
        ),
        node_type=torch.repeat_interleave(
            torch.arange(len(tables)), torch.tensor(list(size.values()))
        ),
        schema=schema,
    )


def with_edge_table(
    dataset: NodeDataset, table: EdgeTable, predicted: Triple
) -> NodeDataset:
    """Return a typed graph with what is predicted of the edges of one relation.

    The pairs of ``table`` are row numbers of the nodes of its two kinds.
    """
    schema = dataset.schema
    assert schema is not None
    assert dataset.node_type is not None
    sizes = torch.bincount(dataset.node_type, minlength=len(schema.widths)).tolist()
    start = _first_nodes(dict(zip(schema.node_types, sizes, strict=True)))
    first = torch.tensor([[start[predicted[0]]], [start[predicted[2]]]])
    return replace(
        dataset,
        edges=replace(table, pairs=table.pairs + first),
        schema=replace(schema, predicted=predicted),
    )


def _expand(values: Tensor, rows: slice, number: int, unknown: float) -> Tensor:
    """Return values of all nodes, ``unknown`` outside the rows of the kind to predict."""
    out = values.new_full((number, *values.shape[1:]), unknown)
    out[rows] = values
    return out


def _joint_names(tables: Mapping[str, NodeTable]) -> tuple[str, ...]:
    """Return the names of all columns; empty if a kind with features has none."""
    if any(len(t.feature_names) != t.x.shape[1] for t in tables.values()):
        return ()
    return tuple(f"{kind}.{n}" for kind, t in tables.items() for n in t.feature_names)


def _joint_features(parts: Sequence[Tensor]) -> Tensor:
    """Return the block-diagonal feature matrix, in the smaller of two layouts."""
    rows, width = sum(len(x) for x in parts), sum(x.shape[1] for x in parts)
    used = sum(
        len(x.values()) if x.layout == torch.sparse_csr else int(x.count_nonzero())
        for x in parts
    )
    if width >= SPARSE_WIDTH and used < SPARSE_BELOW * rows * width:
        blocks = [scipy_csr(x) for x in parts]
        return csr_tensor(scipy.sparse.block_diag(blocks, format="csr"))
    dense = [x.to_dense() for x in parts]
    joint: Tensor = torch.block_diag(*dense)  # type: ignore[no-untyped-call]
    return joint


def move_columns(x: Tensor, places: Sequence[int], width: int) -> Tensor:
    """Return features (N, width) with column i of ``x`` (N, d) at ``places[i]``, else 0."""
    place = torch.tensor(list(places), dtype=torch.int64)
    if x.layout != torch.sparse_csr:
        out = x.new_zeros(len(x), width)
        out[:, place] = x
        return out
    matrix = scipy_csr(x).copy()
    moved = (matrix.data, place.numpy()[matrix.indices], matrix.indptr)
    return csr_tensor(scipy.sparse.csr_matrix(moved, shape=(len(x), width)))


def typed_union(
    name: str,
    tables: Mapping[str, NodeTable],
    relations: Mapping[Triple, Tensor],
    graph_of: Mapping[str, Tensor],
    private: frozenset[Triple] = frozenset(),
) -> tuple[NodeDataset, Tensor]:
    """Build the disjoint union of typed graphs, and return the graph of each node (N,).

    Tables and edges hold those of all graphs, ``graph_of`` the graphs of the nodes of each
    kind (n,). The nodes of the result are sorted by graph.
    """
    none = TypedTarget(torch.empty(0, dtype=torch.int64), Target.classes(("",)))
    whole = typed_dataset(name, tables, relations, "", none, private)
    assert whole.node_type is not None
    assert whole.messages is not None
    batch = torch.cat([graph_of[kind] for kind in tables])
    order = torch.argsort(batch, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    index = rank[whole.messages.index]
    union = replace(
        whole,
        x=select_rows(whole.x, order),
        edge_index=undirected_simple(index, len(order)),
        messages=replace(whole.messages, index=index),
        node_type=whole.node_type[order],
    )
    return union, batch[order]


def without_types(dataset: Dataset) -> Dataset:
    """Return a typed graph as a plain one, with ``types = "ignore"``."""
    assert dataset.schema is not None
    assert dataset.node_type is not None
    widths = {width for _, width in dataset.schema.widths}
    if len(widths) > 1:
        raise DataError(
            f'{dataset.name}: types = "ignore" needs features of one width, but the kinds '
            f"of nodes have {dict(dataset.schema.widths)}. Give each the same columns, or "
            'set model = "rgcn".'
        )
    width = widths.pop()
    x = torch.ones(len(dataset.node_type), max(width, 1))
    dense = dataset.x.to_dense()
    for number, (_, columns) in enumerate(dataset.schema.blocks() if width else ()):
        of_kind = dataset.node_type == number
        x[of_kind] = dense[of_kind][:, columns]
    messages = dataset.messages and replace(dataset.messages, relation=None)
    return replace(
        dataset, x=x, feature_names=(), messages=messages, node_type=None, schema=None
    )


def held_parts(client: ClientGraph) -> Schema:
    """Return the part of a client's schema with nodes, and edges, in any of its graphs."""
    schema = client.schema
    assert schema is not None
    kinds = {
        schema.node_types[number]
        for g in client.graphs
        if g.node_type is not None
        for number in torch.unique(g.node_type).tolist()
    }
    relations = {
        schema.relations[number]
        for g in client.graphs
        if g.messages is not None and g.messages.relation is not None
        for number in torch.unique(g.messages.relation).tolist()
    }
    return schema.only(kinds, relations)


def told_parts(client: ClientGraph, align: str) -> Told:
    """Return what an owner compares with others of its typed graph, sorted by name.

    With ``schema-align = "name"`` these are kinds and relations that it has, without the
    private ones; with ``same`` all.
    """
    own = client.schema
    assert own is not None
    part = own
    if align == "name":
        held = held_parts(client)
        shared = [one for one in held.relations if one not in own.private]
        part = replace(held.only(held.node_types, shared), private=frozenset())
    part, names = part.ordered(), client.feature_names
    blocks = dict(own.blocks())
    recipe = client.prepared.split() if align == "name" else ()
    recipes = dict(zip(sorted(own.node_types), recipe, strict=False))
    hashes = []
    for kind in part.node_types:
        of_kind = names[blocks[kind]]
        if of_kind and kind in recipes:
            of_kind = (*of_kind, recipes[kind])
        hashes.append(hash_names(of_kind))
    if client.num_edge_features:
        hashes.append(hash_names(names[own.num_features :]))
    return Told(part, tuple(hashes) if names else ())


def agreed_graph(client: ClientGraph, align: str, agreed: Schema | None) -> ClientGraph:
    """Return a typed graph with kinds and relations numbered as all clients number them.

    With ``schema-align = "same"`` the order is that of the names, with ``private`` the
    owner's own, with ``name`` that of ``agreed``, which the server sends (``None`` before
    it does); the owner's private relations follow.
    """
    own = client.schema
    if own is None or align == "private" or (align == "name" and agreed is None):
        return client
    first, schema = own, own.ordered()
    if align == "name":
        assert agreed is not None
        held = held_parts(client)
        part = own.only(held.node_types, held.relations)
        held_only = partial(in_schema, own=own, other=part)
        client = replace(client.changed(held_only), feature_names=())
        # another owner may share a relation of the same name
        own = replace(
            held,
            relations=tuple(
                (a, f"{name[:50]}{OWN}", b)
                if (a, name, b) in held.private
                else (a, name, b)
                for a, name, b in held.relations
            ),
        )
        private = tuple(one for one in own.relations if one not in held.relations)
        schema = replace(
            agreed,
            relations=(*agreed.relations, *private),
            private=frozenset(private),
        )
        missing = {*own.widths} - {*schema.widths} or {*own.relations} - {
            *schema.relations
        }
        if missing:
            raise DataError(
                f"The graph has {sorted(map(str, missing))[0]}, on which the clients did "
                "not agree. A graph file must not change during a run; start it again."
            )
    names = client.feature_names
    if names:
        blocks = dict(own.blocks())
        of_edges = names[first.num_features :]
        names = tuple(n for kind in schema.node_types for n in names[blocks[kind]])
        names += of_edges
    return replace(
        client.changed(partial(in_schema, own=own, other=schema)),
        schema=schema,
        feature_names=names,
        scaling=client.scaling and _moved_scaling(client.scaling, first, schema),
    )


def _moved_scaling(scaling: Scaling, own: Schema, agreed: Schema) -> Scaling:
    """Return the statistics of columns at their places in another schema."""
    if scaling.statistics is None:
        return scaling
    blocks, (mean, std) = dict(own.blocks()), scaling.statistics
    # columns of kinds that the owner lacks hold zeros only
    moved = torch.zeros(agreed.num_features, dtype=mean.dtype)
    spread = torch.ones_like(moved)
    for kind, columns in agreed.blocks():
        if kind in blocks:
            moved[columns], spread[columns] = mean[blocks[kind]], std[blocks[kind]]
    return replace(scaling, statistics=(moved, spread))


def in_schema(graph: Graph, own: Schema, other: Schema) -> Graph:
    """Return a graph with kinds, relations and columns at their places in another schema.

    That holds all kinds and relations of which the graph has nodes and edges, of equal
    widths.
    """
    assert graph.node_type is not None
    assert graph.messages is not None
    assert graph.messages.relation is not None
    places = {kind: number for number, kind in enumerate(other.node_types)}
    numbers = {triple: number for number, triple in enumerate(other.relations)}
    kinds = torch.tensor([places.get(kind, -1) for kind in own.node_types])
    relations = torch.tensor([numbers.get(one, -1) for one in own.relations] or [-1])
    start = {kind: block.start for kind, block in other.blocks()}
    moved = [
        (column, start[kind] + column - block.start)
        for kind, block in own.blocks()
        if kind in start
        for column in range(block.start, block.stop)
    ]
    x = select_columns(graph.x, [column for column, _ in moved])
    return replace(
        graph,
        x=move_columns(x, [place for _, place in moved], other.num_features),
        node_type=kinds[graph.node_type],
        messages=replace(graph.messages, relation=relations[graph.messages.relation]),
    )
