"""Cut out the part of a graph that the prediction for one item depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.core.model_spec import LAYERED, read_model
from flower_fgl.core.options import nearest
from flower_fgl.datasets.transforms.canonical import undirected_simple
from flower_fgl.datasets.transforms.typed import without_types
from flower_fgl.nn.graph_union import select_rows
from flower_fgl.runs.model_file import ModelCard
from flower_fgl.runs.saved_model import SavedModel
from flower_fgl.simulation.prediction.fit import check_recipe, fit_features
from flower_fgl.simulation.prediction.read import read_graph, read_set

__all__ = ["Neighbourhood", "cut_out", "cut_out_graph"]


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """The part of a graph that one prediction depends on.

    ``x`` (n, d) dense, ``edge_index`` (2, 2E), ``places`` the item's nodes in it,
    ``columns`` the names of features, ``pair_x`` those of a classified edge, ``is_graph``
    whether all nodes are one graph.
    """

    x: Tensor
    edge_index: Tensor
    places: Tensor
    names: Sequence[str]
    columns: Sequence[str]
    pair_x: Tensor | None
    is_graph: bool


def cut_out(
    saved: SavedModel, graph: Path | str | Any, item: Sequence[str], task: str
) -> Neighbourhood:
    """Cut the neighbourhood of a node or of a pair out of a graph."""
    owned, where = read_graph(graph, saved.card)
    check_recipe(owned.prepared, saved.card, where)
    if owned.dataset.schema is not None:
        owned = replace(owned, dataset=without_types(owned.dataset))
    dataset = owned.dataset
    ids = [str(one) for one in owned.ids.tolist()]
    places = [_place(ids, one, "node", where) for one in item]
    edge_index, pair_row = dataset.edge_index, None
    if task == "edges":
        table = dataset.edges
        assert table is not None  # the reader was told to read edges
        is_own = (table.pairs == torch.tensor(places)[:, None]).all(dim=0)
        if not bool(is_own.any()):
            raise DataError(
                f"{where} has no edge from {item[0]} to {item[1]}. Give source and target "
                "of an edge of the file."
            )
        pair_row = int(is_own.nonzero()[-1])
        if table.time is not None:
            sent = table.time < table.time[pair_row]
            edge_index = undirected_simple(
                table.pairs[:, sent].contiguous(), dataset.num_nodes
            )
    fitted, _ = fit_features(owned, edge_index, saved, where)
    pair_x = None
    if pair_row is not None:
        assert fitted.pair_x is not None
        pair_x = fitted.pair_x[[pair_row]]
    nodes, edges, own = _reach(saved.card, edge_index, places, dataset.num_nodes)
    return Neighbourhood(
        _dense(select_rows(fitted.x, nodes)),
        edges,
        own,
        [ids[k] for k in nodes.tolist()],
        fitted.names,
        pair_x,
        False,
    )


def cut_out_graph(
    saved: SavedModel, graph: Path | str | Any, item: str
) -> Neighbourhood:
    """Take one graph out of a set."""
    owned, where = read_set(graph)
    dataset = owned.dataset
    place = _place([str(one) for one in owned.ids], item, "graph", where)
    fitted, _ = fit_features(owned, dataset.edge_index, saved, where)
    nodes = (dataset.batch == place).nonzero().flatten()
    table = torch.full((len(dataset.batch),), -1)
    table[nodes] = torch.arange(len(nodes))
    edges = table[dataset.edge_index]
    edges = edges[:, (edges >= 0).all(dim=0)]
    names = [str(k) for k in range(len(nodes))]
    x = _dense(select_rows(fitted.x, nodes))
    own = torch.arange(len(nodes))
    return Neighbourhood(x, edges, own, names, fitted.names, None, True)


def _place(ids: Sequence[str], item: str, kind: str, where: Path | str) -> int:
    """Return the row of an identifier, or raise a DataError."""
    if item not in ids:
        raise DataError(
            f'{where} has no {kind} "{item}". {nearest(item, ids[:100_000])}'
        )
    return ids.index(item)


def _reach(
    card: ModelCard, edge_index: Tensor, places: Sequence[int], num_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nodes that the item may depend on, their edges, and the item's places.

    One hop more than the network has layers, since degrees count in normalised sums; the
    whole graph if the backbone counts steps apart from layers.
    """
    from torch_geometric.utils import k_hop_subgraph

    backbone = read_model(card.model)
    nodes, edges, own = torch.arange(num_nodes), edge_index, torch.tensor(places)
    if backbone.name in LAYERED and not card.settings:
        hops = 1 + (backbone.num_layers or card.num_layers)
        nodes, edges, _, _ = k_hop_subgraph(
            sorted(set(places)),
            hops,
            edge_index,
            relabel_nodes=True,
            num_nodes=num_nodes,
        )
        own = torch.searchsorted(nodes, own)
    return nodes, edges, own


def _dense(x: Tensor) -> Tensor:
    """Return features as a dense float tensor."""
    return x if x.layout == torch.strided else x.to_dense()
