"""Induced subgraphs of node sets, clients and splits; the largest component."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_fgl.datasets.client_graph import Graph, NodeDataset, numbered_within
from flower_fgl.nn.graph_union import select_rows

__all__ = [
    "InductiveGraphs",
    "cut_clients",
    "edges_between_clients",
    "induced_graph",
    "induced_subgraph",
    "inductive_graphs",
    "largest_component",
    "largest_dataset",
    "owner_of_nodes",
    "select_rows",
]

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class InductiveGraphs:
    """One client's graph, divided so that training does not see evaluation nodes.

    ``train`` has the training nodes and the edges among them, with the masks ``train`` (all
    True), ``val`` and ``test`` (all False). ``val`` and ``test`` have the single mask of
    their name, all True. In a typed graph this holds of the kind to predict.
    ``train_nodes`` (n,) are the ascending numbers of the nodes of ``train`` in the client's
    graph.
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
    ends = numbered_within(edge_index, torch.as_tensor(node_ids), num_nodes)
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
    edge_index: Tensor, num_nodes: int, parts: Sequence[IntArray], *, are_inside: bool
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


def inductive_graphs(graph: Graph, target: int = 0) -> InductiveGraphs:
    """Divide a graph with disjoint masks into training, validation and test graphs.

    Nodes in no mask are dropped. In a typed graph, in which ``target`` is the number of the
    kind to predict, the nodes of other kinds are in all three.
    """
    stays = torch.zeros(graph.num_nodes, dtype=torch.bool)
    if graph.node_type is not None:
        stays = graph.node_type != target
    nodes = {
        n: (graph.masks[n] | stays).nonzero().flatten()
        for n in ("train", "val", "test")
    }
    train, val, test = (
        replace(induced_graph(graph, chosen), masks={name: graph.masks[name][chosen]})
        for name, chosen in nodes.items()
    )
    # a client's file holds no tensor twice
    none = torch.zeros(train.num_nodes, dtype=torch.bool)
    train = replace(train, masks={**train.masks, "val": none, "test": none.clone()})
    return InductiveGraphs(train, val, test, nodes["train"])


def induced_graph(
    graph: Graph | NodeDataset,
    nodes: Tensor,
    edge_index: Tensor | None = None,
    masks: Mapping[str, Tensor] | None = None,
) -> Graph:
    """Return the subgraph of some different nodes, by default without masks.

    ``edge_index`` are its edges if they are known.
    """
    if edge_index is None:
        edge_index = induced_subgraph(graph.edge_index, graph.num_nodes, nodes)
    return Graph(
        x=select_rows(graph.x, nodes),
        edge_index=edge_index,
        y=graph.y[nodes],
        masks=masks or {},
        targets=None if graph.targets is None else graph.targets[nodes],
        messages=graph.messages and graph.messages.within(nodes, graph.num_nodes),
        node_type=None if graph.node_type is None else graph.node_type[nodes],
    )


def largest_component(edge_index: IntArray, num_nodes: int) -> IntArray:
    """Return the ascending nodes of the largest component; on a tie, of the first one.

    ``edge_index`` (2, 2E) has both directions of each edge; N is at least 1.
    """
    ones = np.ones(edge_index.shape[1], dtype=np.int8)
    shape = (num_nodes, num_nodes)
    adjacency = scipy.sparse.csr_array((ones, (edge_index[0], edge_index[1])), shape)
    # SciPy numbers components in the order of their first node
    _, component = scipy.sparse.csgraph.connected_components(adjacency, directed=False)
    largest = np.bincount(component).argmax()
    return np.flatnonzero(component == largest).astype(np.int64)


def largest_dataset(dataset: NodeDataset) -> tuple[NodeDataset, Tensor]:
    """Keep the largest connected component, FedLoG Appendix A.12.

    Returns it, its nodes in their order, and their ascending numbers (n,) in ``dataset``.
    """
    edge_index, num_nodes = dataset.edge_index, dataset.num_nodes
    nodes = torch.from_numpy(largest_component(edge_index.numpy(), num_nodes))
    component = replace(
        dataset,
        x=select_rows(dataset.x, nodes),
        edge_index=induced_subgraph(edge_index, num_nodes, nodes),
        y=dataset.y[nodes],
        masks={name: mask[nodes] for name, mask in dataset.masks.items()},
        network=None if dataset.network is None else dataset.network[nodes],
        targets=None if dataset.targets is None else dataset.targets[nodes],
        messages=dataset.messages and dataset.messages.within(nodes, num_nodes),
        node_type=None if dataset.node_type is None else dataset.node_type[nodes],
    )
    return component, nodes
