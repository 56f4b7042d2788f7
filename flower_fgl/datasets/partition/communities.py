"""Groups of nodes that a graph's structure suggests: METIS and Louvain.

Every function is pure: the same graph, number of groups and seed give the same groups
in every process. Groups are ascending arrays of node numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pymetis
import scipy.sparse
from numpy.typing import NDArray

from flower_fgl.core.errors import DataError

__all__ = [
    "MAX_SIZE_DIFFERENCE",
    "NUM_COMMUNITIES",
    "RECURSIVE_UP_TO",
    "MergedCommunities",
    "group_nodes",
    "louvain_communities",
    "merge_communities",
    "metis_communities",
    "metis_parts",
]

IntArray = NDArray[np.int64]

RECURSIVE_UP_TO = 8
"""Most parts that METIS finds by recursive bisection; more are found k-way."""

NUM_COMMUNITIES = 100
"""Communities from which ``louvain-label`` and ``metis-label`` build their clients."""

MAX_SIZE_DIFFERENCE = 20
"""δ of the greedy merge: how many nodes above ⌊N/K⌋ a client may hold."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MergedCommunities:
    """Communities dealt to clients by :func:`merge_communities`.

    Parameters
    ----------
    parts : list of ndarray of shape (n_i,), int64
        Nodes of each client, ascending; a client may have none.
    max_size_difference : int
        The δ used, smaller than the one asked for on a tiny graph.
    num_fallbacks : int
        Chunks that fitted nowhere and went to the smallest client still filling.
    """

    parts: list[IntArray]
    max_size_difference: int
    num_fallbacks: int


def group_nodes(owner: IntArray, num_groups: int) -> list[IntArray]:
    """List the nodes of each group.

    Parameters
    ----------
    owner : ndarray of shape (N,), int64, values 0..num_groups-1
        Group of each node.
    num_groups : int
        Number of groups.

    Returns
    -------
    list of ndarray of shape (n_i,), int64
        Ascending node numbers of each group.
    """
    order = np.argsort(owner, kind="stable").astype(np.int64)
    ends = np.cumsum(np.bincount(owner, minlength=num_groups))
    return np.split(order, ends[:-1])


def metis_communities(
    edge_index: IntArray, num_nodes: int, num_parts: int, *, seed: int
) -> list[IntArray]:
    """Cut a graph into equal parts with few edges between, Karypis & Kumar 1998.

    Parameters
    ----------
    edge_index : ndarray of shape (2, 2E), int64
        Both directions of each edge, no self-loops.
    num_nodes : int
        Number of nodes N.
    num_parts : int in [1, N]
        Number of parts.
    seed : int in [0, 2**31)
        Seed of METIS.

    Returns
    -------
    list of ndarray of shape (n_i,), int64
        The parts; METIS may leave some empty on a graph that is tiny or has hardly any
        edge.

    Notes
    -----
    1. Unweighted, edge cut as objective, METIS' default imbalance. Recursive bisection
       up to ``RECURSIVE_UP_TO`` parts and k-way above are pymetis' own choice, fixed
       here so that another release cannot change a partition.
    2. METIS takes the seed as it is; in its generator 0 and 1 start the same stream.
    """
    ones = np.ones(edge_index.shape[1], dtype=np.int8)
    shape = (num_nodes, num_nodes)
    adjacency = scipy.sparse.csr_array((ones, (edge_index[0], edge_index[1])), shape)
    dtype = pymetis.zero_copy_dtype()
    _, owner = pymetis.part_graph(
        num_parts,
        pymetis.CSRAdjacency(
            adjacency.indptr.astype(dtype), adjacency.indices.astype(dtype)
        ),
        recursive=num_parts <= RECURSIVE_UP_TO,
        options=pymetis.Options(seed=seed),
    )
    return group_nodes(np.asarray(owner, dtype=np.int64), num_parts)


def metis_parts(
    edge_index: IntArray, num_nodes: int, num_clients: int, *, seed: int
) -> list[IntArray]:
    """Cut a graph into one METIS part for each client.

    Parameters
    ----------
    edge_index, num_nodes, seed
        See :func:`metis_communities`.
    num_clients : int in [1, N]
        Number of clients K.

    Returns
    -------
    list of ndarray of shape (n_i,), int64
        Nodes of each client, none empty.

    Raises
    ------
    DataError
        If METIS leaves a part empty, as it may for tiny graphs.
    """
    parts = metis_communities(edge_index, num_nodes, num_clients, seed=seed)
    num_empty = sum(len(nodes) == 0 for nodes in parts)
    if num_empty:
        raise DataError(
            f"METIS left {num_empty} of {num_clients} parts of a graph with "
            f"{num_nodes} nodes and {edge_index.shape[1] // 2} edges empty. Use fewer "
            'clients or partition = "uniform".'
        )
    return parts


def louvain_communities(
    edge_index: IntArray, num_nodes: int, *, seed: int
) -> list[IntArray]:
    """Find the communities of highest modularity, Blondel et al. 2008.

    Parameters
    ----------
    edge_index : ndarray of shape (2, 2E), int64
        Both directions of each edge, no self-loops.
    num_nodes : int
        Number of nodes N.
    seed : int in [0, 2**32)
        Seed of the order in which nodes are visited.

    Returns
    -------
    list of ndarray of shape (n_i,), int64
        Communities in the order of their first node, at resolution 1. An isolated node
        is a community by itself.
    """
    # Most processes that import this module only open a partition made by another.
    import community
    import networkx

    graph = networkx.Graph()
    graph.add_nodes_from(range(num_nodes))
    upper = np.unique(edge_index[:, edge_index[0] < edge_index[1]], axis=1)
    graph.add_edges_from(zip(*upper.tolist(), strict=True))
    found = community.best_partition(graph, resolution=1.0, random_state=seed)
    name = np.fromiter((found[node] for node in range(num_nodes)), np.int64, num_nodes)
    _, first, owner = np.unique(name, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return group_nodes(rank[owner], len(first))


def merge_communities(
    communities: Sequence[IntArray],
    num_clients: int,
    *,
    max_size_difference: int = MAX_SIZE_DIFFERENCE,
) -> MergedCommunities:
    """Deal communities to clients of about equal size, greedily and largest first.

    Communities longer than the cap ⌊N/K⌋ - δ are first cut into consecutive chunks of
    that length.

    Parameters
    ----------
    communities : sequence of ndarray of shape (n_i,), int64
        Disjoint communities in the order of their first node, nodes ascending; N nodes
        in all.
    num_clients : int in [1, N]
        Number of clients K.
    max_size_difference : int, at least 0
        δ. Every client stays below ⌊N/K⌋ + δ unless a chunk fits nowhere. Where the cap
        would fall below 1, δ is lowered to half of ⌊N/K⌋.

    Returns
    -------
    MergedCommunities

    Notes
    -----
    1. The published code takes up to 1000 turns looking for a place and then picks a
       wrong index. Here one full turn without a place sends the chunk to the smallest
       client that is not yet full (the first of the ring among equals).
    """
    size = sum(len(nodes) for nodes in communities) // num_clients
    delta = max_size_difference
    if size - delta < 1:
        delta = size // 2
        logger.info(
            "Louvain merge: %d nodes a client are too few for a size difference of %d; "
            "using %d.",
            size,
            max_size_difference,
            delta,
        )
    chunks = _cut(communities, size - delta)
    held, num_fallbacks = _deal(chunks, num_clients, size=size, limit=size + delta)
    parts = [np.sort(np.concatenate([np.empty(0, np.int64), *own])) for own in held]
    if num_fallbacks:
        logger.info(
            "Louvain merge: %d of %d chunks fitted nowhere and went to the smallest "
            "client still filling; client sizes are %d to %d nodes for a target of %d.",
            num_fallbacks,
            len(chunks),
            min(map(len, parts)),
            max(map(len, parts)),
            size,
        )
    return MergedCommunities(parts, delta, num_fallbacks)


def _cut(communities: Sequence[IntArray], cap: int) -> list[IntArray]:
    """Cut communities into chunks of at most ``cap`` nodes, largest first."""
    chunks = [
        chunk
        for nodes in communities
        for chunk in np.split(nodes, range(cap, len(nodes), cap))
    ]
    return sorted(chunks, key=len, reverse=True)  # sorted() is stable


def _deal(
    chunks: Sequence[IntArray], num_clients: int, *, size: int, limit: int
) -> tuple[list[list[IntArray]], int]:
    """Deal chunks round the ring of clients that are not yet full.

    A client leaves the ring when it holds ``size`` nodes and takes no chunk with which
    it would hold ``limit``. Returns the chunks of each client and the number of chunks
    that fitted nowhere.
    """
    ring = list(range(num_clients))
    held: list[list[IntArray]] = [[] for _ in ring]
    sizes = [0] * num_clients
    pointer = num_fallbacks = 0
    for chunk in chunks:
        while len(ring) > 1 and sizes[ring[pointer]] >= size:
            del ring[pointer]
            pointer %= len(ring)
        turn = [(pointer + step) % len(ring) for step in range(len(ring))]
        room = limit - len(chunk)
        place = next((slot for slot in turn if sizes[ring[slot]] < room), None)
        if place is None:
            place = min(range(len(ring)), key=lambda slot: sizes[ring[slot]])
            num_fallbacks += 1
        pointer = place
        held[ring[pointer]].append(chunk)
        sizes[ring[pointer]] += len(chunk)
    return held, num_fallbacks
