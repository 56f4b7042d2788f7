"""Cut out the part of a graph that the prediction for one item depends on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.core.model_spec import EDGE_READERS, LAYERED, TYPED, read_model
from flower_fgl.core.options import nearest
from flower_fgl.nn import GraphInput
from flower_fgl.nn.graph_union import select_rows
from flower_fgl.nn.relations import Relations
from flower_fgl.nn.topology import Direction
from flower_fgl.runs.model_file import ModelCard
from flower_fgl.runs.saved_model import SavedModel
from flower_fgl.simulation.prediction.fit import Features, fit_graph
from flower_fgl.simulation.prediction.pairs import PairNodes
from flower_fgl.simulation.prediction.read import (
    read_graph,
    read_set,
    without_kinds,
)
from flower_fgl.simulation.prediction.table import schema_of

__all__ = ["Edges", "Neighbourhood", "cut_out", "cut_out_graph"]

MOST_SHOWN = 3
"""Features of an edge that its label names."""


class Edges(NamedTuple):
    """The E edges over which messages pass, each of which can be removed.

    ``ends`` (2, E) are nodes, ``labels`` the relation or features of each edge, and ``of``
    the edge of each message, see :meth:`~flower_fgl.nn.GraphInput.masked`.
    """

    ends: Tensor
    labels: Sequence[str]
    of: Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """The part of a graph that one prediction depends on.

    ``graph`` has dense features, ``places`` are the item's nodes in it, ``columns`` the
    names of features; ``is_graph``: all nodes are one graph. ``listed`` counts the edges
    that the item may stand for, between the same nodes; the last one is meant.
    """

    graph: GraphInput
    edges: Edges
    places: Tensor
    names: Sequence[str]
    columns: Sequence[str]
    is_graph: bool
    listed: int = 1


def cut_out(
    saved: SavedModel, graph: Path | str | Any, item: Sequence[str], task: str
) -> Neighbourhood:
    """Cut the neighbourhood of a node or of a pair out of a graph."""
    owned, where = read_graph(graph, saved.card)
    owned = without_kinds(owned, saved.card)
    ids = [str(one) for one in owned.ids.tolist()]
    places = [_place(ids, one, "node", where) for one in item]
    sent = row = None
    listed = 1
    if task == "edges":
        table = owned.dataset.edges
        assert table is not None  # the reader was told to read edges
        is_named = torch.tensor([[one == name for one in ids] for name in item])
        is_own = is_named[0, table.pairs[0]] & is_named[1, table.pairs[1]]
        if not bool(is_own.any()):
            raise DataError(
                f"{where} has no edge from {item[0]} to {item[1]}. Give source and target "
                "of an edge of the file."
            )
        listed = int(is_own.sum())
        row = int(is_own.nonzero()[-1])
        places = table.pairs[:, row].tolist()
        if table.time is not None:
            sent = table.time < table.time[row]
    fitted, whole = fit_graph(owned, saved, where, sent)
    if fitted.typed is not None and task != "edges":
        rows: tuple[Tensor, ...] = (fitted.typed.rows,)
        if task == "links":
            rows = PairNodes.of(whole, schema_of(saved.card)).rows
        # several kinds may have a node of this name
        places = [
            _place(ids, one, "node of the kind to predict", where, own.tolist())
            for one, own in zip(item, rows, strict=True)
        ]
    if task == "links" and places[0] == places[1]:
        raise DataError(
            f'Both ends of the pair are "{item[0]}". A pair needs two nodes: give another.'
        )
    nodes, own = _reach(saved.card, whole, places)
    part = _part(whole, nodes)
    if task in ("edges", "links"):
        pair_x = None if fitted.pair_x is None else fitted.pair_x[[row]]
        part = part.with_pairs(own[:, None], pair_x)
    names = [ids[k] for k in nodes.tolist()]
    found = _neighbourhood(saved, part, own, names, fitted, is_graph=False)
    return replace(found, listed=listed)


def cut_out_graph(
    saved: SavedModel, graph: Path | str | Any, item: str
) -> Neighbourhood:
    """Take one graph out of a set."""
    owned, where = read_set(graph, saved.card)
    dataset = owned.dataset
    place = _place([str(one) for one in owned.ids], item, "graph", where)
    fitted, whole = fit_graph(owned, saved, where)
    nodes = (dataset.batch == place).nonzero().flatten()
    part = _part(whole, nodes, batch=torch.zeros_like(nodes))
    own, names = torch.arange(len(nodes)), [str(k) for k in range(len(nodes))]
    return _neighbourhood(saved, part, own, names, fitted, is_graph=True)


def _place(
    ids: Sequence[str],
    item: str,
    kind: str,
    where: Path | str,
    rows: Sequence[int] | None = None,
) -> int:
    """Return the row of an identifier, of some rows if given, or raise a DataError."""
    known = ids if rows is None else [ids[row] for row in rows]
    if item not in known:
        raise DataError(
            f'{where} has no {kind} "{item}". {nearest(item, known[:100_000])}'
        )
    place = known.index(item)
    return place if rows is None else rows[place]


def _passing(graph: GraphInput) -> Tensor:
    """Return the edges (2, M) of a graph over which messages pass, in one way at least."""
    if graph.relations is not None:
        return graph.relations.index
    return graph.edge_index if graph.messages is None else graph.messages.index


def _reach(
    card: ModelCard, graph: GraphInput, places: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the nodes that the item may depend on, and the item's places among them.

    One hop more than the network has layers, since degrees count in normalised sums; the
    whole graph if the backbone counts steps apart from layers.
    """
    from torch_geometric.utils import k_hop_subgraph

    backbone, passing = read_model(card.model), _passing(graph)
    if passing is not graph.edge_index:
        passing = torch.cat([passing, passing.flip(0)], dim=1)
    nodes, own = torch.arange(graph.num_nodes), torch.tensor(places)
    is_layered = backbone.name in (*LAYERED, *EDGE_READERS, *TYPED)
    if is_layered and not card.settings:
        hops = 1 + (backbone.num_layers or card.num_layers)
        nodes, _, own, _ = k_hop_subgraph(own, hops, passing, num_nodes=graph.num_nodes)
    return nodes, own


def _part(graph: GraphInput, nodes: Tensor, batch: Tensor | None = None) -> GraphInput:
    """Return the subgraph of some nodes, ascending, with dense features."""
    number = torch.full((graph.num_nodes,), -1)
    number[nodes] = torch.arange(len(nodes))

    def within(index: Tensor) -> tuple[Tensor, Tensor]:
        own = number[index]
        kept = (own >= 0).all(dim=0)
        return own[:, kept], kept

    x = select_rows(graph.x, nodes)
    x = x if x.layout == torch.strided else x.to_dense()
    num_graphs = None if batch is None else 1
    part = GraphInput(
        x, within(graph.edge_index)[0], batch=batch, num_graphs=num_graphs
    )
    if (found := graph.relations) is not None:
        index, kept = within(found.index)
        own = Relations(found.node_type[nodes], index, found.relation[kept])
        return part.with_relations(own)
    if (messages := graph.messages) is not None:
        index, kept = within(messages.index)
        return part.with_messages(index, messages.x[kept])
    return part


def _neighbourhood(
    saved: SavedModel,
    graph: GraphInput,
    own: Tensor,
    names: Sequence[str],
    fitted: Features,
    *,
    is_graph: bool,
) -> Neighbourhood:
    """Add the edges, and the names of features, of a model's input."""
    direction = saved.model.edge_direction
    if graph.relations is not None:
        assert fitted.typed is not None
        found, typed = graph.relations, fitted.typed
        edges = _distinct([found.index], found.relation, typed.names)
    elif graph.messages is not None:
        of_edges = () if fitted.edges is None else fitted.edges.feature_names
        edges = _edges_with_features(graph, direction, of_edges)
    else:
        ends = graph.edge_index.sort(dim=0).values
        edges = _distinct([ends], torch.zeros_like(ends[0]), [""])
    columns = fitted.names or saved.card.feature_names[: graph.num_features]
    if fitted.typed is not None and any(fitted.typed.columns):
        columns = tuple(fitted.typed.columns)
    return Neighbourhood(graph, edges, own, names, columns, is_graph)


def _distinct(rows: Sequence[Tensor], group: Tensor, labels: Sequence[str]) -> Edges:
    """Return distinct edges of some parts (2, M), each with the label of its group."""
    every = torch.cat([torch.cat(list(rows), dim=1), group[None]])
    found, which = torch.unique(every, dim=1, return_inverse=True)
    texts = [labels[k] for k in found[2].tolist()]
    return Edges(found[:2], texts, which.split([part.shape[1] for part in rows]))


def _edges_with_features(
    graph: GraphInput, direction: Direction, names: Sequence[str]
) -> Edges:
    """Return the edges as listed, labelled with features; equal ones are one.

    Without a direction, edges with equal features one way and back are one, too.
    """
    rows, x = [], []
    ways = [way for way in graph.ways(direction) if way is not None]
    for is_back, way in enumerate(ways):
        ends = way.index.flip(0) if is_back else way.index
        rows.append(ends.sort(dim=0).values if direction == "both" else ends)
        x.append(way.x)
    values, group = torch.unique(torch.cat(x), dim=0, return_inverse=True)
    prefix = "" if direction == "both" else "directed"
    labels = [
        ", ".join(filter(None, (prefix, _label(row, names)))) for row in values.tolist()
    ]
    return _distinct(rows, group, labels)


def _label(row: Sequence[float], names: Sequence[str]) -> str:
    """Return the features of an edge that are not 0, the largest ones first."""
    order = sorted(range(len(row)), key=lambda k: -abs(row[k]))
    shown = [k for k in order if row[k]][:MOST_SHOWN]
    return ", ".join(
        f"{names[k] if names else f'feature {k}'} = {row[k]:.4g}" for k in shown
    )
