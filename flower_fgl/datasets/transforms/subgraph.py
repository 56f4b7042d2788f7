"""Induced subgraphs: of one node set, of all clients, and of an inductive split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_fgl.datasets.client_graph import Graph, NodeDataset
from flower_fgl.nn.graph_union import select_rows

__all__ = [
    "InductiveGraphs",
    "cut_clients",
    "edges_between_clients",
    "induced_graph",
    "induced_subgraph",
    "inductive_graphs",
    "owner_of_nodes",
    "select_rows",
]

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class InductiveGraphs:
    """One client's graph, divided so that training does not see evaluation nodes.

    ``train`` has the training nodes and the edges among them, with the masks ``train`` (all
    True), ``val`` and ``test`` (all False). ``val`` and ``test`` have the single mask of
    their name, all True. ``train_nodes`` (n,) are the ascending numbers of the nodes of
    ``train`` in the client's graph.
    """

    train: Graph
    val: Graph
    test: Graph
    train_nodes: Tensor


def owner_of_nodes(num_nodes: int, parts: Sequence[IntArray]) -> IntArray:
    """Return the client of each node, (N,), int64; -1 for nodes of no client.

    ``parts`` are the nodes of each client; they need not cover the graph, and must be
    disjoint (ValueError).
    """
    owner = np.full(num_nodes, -1, dtype=np.int64)
    for client, nodes in enumerate(parts):
        owner[nodes] = client
    num_owned = int(np.count_nonzero(owner >= 0))
    num_listed = sum(len(nodes) for nodes in parts)
    if num_owned != num_listed:
        raise ValueError(
            f"parts must be disjoint, but they list {num_listed} nodes of which only "
            f"{num_owned} differ."
        )
    return owner


def induced_subgraph(
    edge_index: Tensor, num_nodes: int, node_ids: Tensor | IntArray
) -> Tensor:
    """Keep the edges among different nodes, numbered by their position in ``node_ids``.

    They keep the order of ``edge_index``; without any the shape is (2, 0).
    """
    nodes = torch.as_tensor(node_ids)
    local = torch.full((num_nodes,), -1, dtype=torch.int64)
    local[nodes] = torch.arange(len(nodes))
    ends = local[edge_index]
    return ends[:, (ends >= 0).all(dim=0)]


def cut_clients(
    edge_index: Tensor, num_nodes: int, parts: Sequence[IntArray]
) -> list[Tensor]:
    """Compute the induced subgraphs of all clients in one pass over the edges.

    This is :func:`induced_subgraph` for each part, without shared memory. ``parts`` are
    the nodes of each client; they need not cover the graph, and must be disjoint
    (ValueError).
    """
    return _edges_by_client(edge_index, num_nodes, parts, are_inside=True)


def edges_between_clients(
    edge_index: Tensor, num_nodes: int, parts: Sequence[IntArray]
) -> list[Tensor]:
    """Return the edges that :func:`cut_clients` drops, by the client of their source.

    Each Tensor (2, m_i) holds the position of the client's node in its part, and the
    number of the other node in the whole graph; in the order of ``edge_index``.
    """
    return _edges_by_client(edge_index, num_nodes, parts, are_inside=False)


def _edges_by_client(
    edge_index: Tensor,
    num_nodes: int,
    parts: Sequence[IntArray],
    *,
    are_inside: bool,
) -> list[Tensor]:
    """Return the edges inside each part, or those from it to nodes of other parts.

    Sources are positions in their part; so are targets of edges inside, while others are
    numbers in the whole graph.
    """
    owner = owner_of_nodes(num_nodes, parts)
    local = np.empty(num_nodes, dtype=np.int64)
    for nodes in parts:
        local[nodes] = np.arange(len(nodes))
    source, target = edge_index.numpy()
    client = owner[source]
    chosen = np.flatnonzero(((client == owner[target]) == are_inside) & (client >= 0))
    # NumPy sorts 16-bit integers by radix, in time linear in the number of edges.
    narrow = np.int16 if len(parts) < 2**15 else np.int64
    order = chosen[np.argsort(client[chosen].astype(narrow), kind="stable")]
    sizes = np.bincount(client[chosen], minlength=len(parts))
    ends = local[target] if are_inside else target
    return [
        torch.from_numpy(np.stack([local[source[piece]], ends[piece]]))
        for piece in np.split(order, np.cumsum(sizes)[:-1])
    ]


def inductive_graphs(graph: Graph) -> InductiveGraphs:
    """Divide a graph with disjoint masks into training, validation and test graphs.

    Nodes in no mask are dropped.
    """
    nodes = {n: graph.masks[n].nonzero().flatten() for n in ("train", "val", "test")}
    train, val, test = (
        replace(
            induced_graph(graph, chosen),
            masks={name: torch.ones(len(chosen), dtype=torch.bool)},
        )
        for name, chosen in nodes.items()
    )
    # a client's file holds no tensor twice
    none = torch.zeros(train.num_nodes, dtype=torch.bool)
    train = replace(train, masks={**train.masks, "val": none, "test": none.clone()})
    return InductiveGraphs(train, val, test, nodes["train"])


def induced_graph(graph: Graph | NodeDataset, nodes: Tensor) -> Graph:
    """Return the subgraph of some different nodes, without masks."""
    return Graph(
        x=select_rows(graph.x, nodes),
        edge_index=induced_subgraph(graph.edge_index, graph.num_nodes, nodes),
        y=graph.y[nodes],
        masks={},
        targets=None if graph.targets is None else graph.targets[nodes],
        messages=graph.messages and graph.messages.within(nodes, graph.num_nodes),
        node_type=None if graph.node_type is None else graph.node_type[nodes],
    )
