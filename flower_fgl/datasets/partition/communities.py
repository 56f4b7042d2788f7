"""Structural node groups: METIS parts, Louvain communities and their merge.

Equal graphs, numbers of groups and seeds give equal groups, ascending arrays of nodes.
"""

import logging
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import pymetis
import scipy.sparse
from numpy.typing import NDArray

__all__ = [
    "NUM_COMMUNITIES",
    "RECURSIVE_UP_TO",
    "group_nodes",
    "louvain_communities",
    "merge_communities",
    "metis_communities",
]

IntArray = NDArray[np.int64]

IN_PLACE_OF_1 = 2**31 - 2
"""METIS' seed for partition seed 1, see :func:`metis_communities`."""
RECURSIVE_UP_TO = 8
"""Largest number of parts for recursive bisection; METIS finds more parts k-way."""
NUM_COMMUNITIES = 100
"""Number of communities that ``louvain-label`` and ``metis-label`` merge to clients."""
MAX_SIZE_DIFFERENCE = 20
"""δ of the greedy merge: a client may hold up to δ nodes more than ⌊N/K⌋."""

logger = logging.getLogger(__name__)


def group_nodes(owner: IntArray, num_groups: int) -> list[IntArray]:
    """List the ascending nodes of each group; ``owner`` (N,) is the group of each node."""
    order = np.argsort(owner, kind="stable").astype(np.int64)
    ends = np.cumsum(np.bincount(owner, minlength=num_groups))
    return np.split(order, ends[:-1])


def metis_communities(
    edge_index: IntArray, num_nodes: int, num_parts: int, *, seed: int
) -> list[IntArray]:
    """Partition a graph into equal parts with few edges between, Karypis & Kumar 1998.

    ``edge_index`` (2, 2E) has both directions of each edge. METIS may leave some parts
    empty if the graph is tiny or has very few edges.

    Notes
    -----
    1. Recursive bisection up to ``RECURSIVE_UP_TO`` parts is that of pymetis, fixed here so
       that another release cannot change a partition.
    2. The generator of METIS gives the same stream for 0 and 1, so that METIS gets
       ``IN_PLACE_OF_1`` for seed 1, and all other seeds unchanged.
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
        options=pymetis.Options(seed=IN_PLACE_OF_1 if seed == 1 else seed),
    )
    return group_nodes(np.asarray(owner, dtype=np.int64), num_parts)


def louvain_communities(
    edge_index: IntArray, num_nodes: int, *, seed: int
) -> list[IntArray]:
    """Find communities by maximizing modularity, Blondel et al. 2008.

    They are in the order of their first node. An isolated node is its own community.
    """
    # Imported here: most processes only load a partition that another one computed.
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
) -> list[IntArray]:
    """Assign communities greedily, largest first, to clients of about equal size.

    Communities of more than ⌊N/K⌋ - δ nodes are first divided into consecutive chunks of
    that size. The list of chunks is breadth-first: the first chunks of all communities,
    then all second chunks, and so on. Every client stays below ⌊N/K⌋ + δ nodes unless a
    chunk fits no client. The disjoint communities, N nodes in all, are in the order of
    their first node, nodes ascending. δ is ``max_size_difference``, or half of ⌊N/K⌋ if
    ⌊N/K⌋ - δ is below 1. Returns the ascending nodes of each client, which may have none.

    Notes
    -----
    1. The published code searches up to 1000 times for a client with room, and then uses
       a wrong index. Here a chunk that fits no client of the ring is assigned to the
       smallest client in it, on a tie to the first in the ring.
    2. The published code appends the rest of a long community to the end of the list that
       it reads. The breadth-first order gives the same list. A list of one community
       after the other would put its equally large chunks into the same clients.
    """
    size = sum(len(nodes) for nodes in communities) // num_clients
    delta = max_size_difference
    if size - delta < 1:
        delta = size // 2
        logger.info(
            "Louvain merge: %d nodes per client are too few for a size difference of %d; "
            "using %d.",
            size,
            max_size_difference,
            delta,
        )
    chunks = _chunks(communities, size - delta)
    held, num_fallbacks = _assign_chunks(
        chunks, num_clients, size=size, limit=size + delta
    )
    parts = [np.sort(np.concatenate([np.empty(0, np.int64), *own])) for own in held]
    if num_fallbacks:
        logger.info(
            "Louvain merge: %d of %d chunks fitted no client and were assigned to the "
            "smallest open client; client sizes are %d to %d nodes, target %d.",
            num_fallbacks,
            len(chunks),
            min(map(len, parts)),
            max(map(len, parts)),
            size,
        )
    return parts


def _chunks(communities: Sequence[IntArray], cap: int) -> list[IntArray]:
    """Divide communities into chunks of at most ``cap`` nodes, largest first.

    Of equally large chunks, the first ones of all communities precede the second ones.
    """
    divided = (np.split(nodes, range(cap, len(nodes), cap)) for nodes in communities)
    chunks = [
        chunk for row in zip_longest(*divided) for chunk in row if chunk is not None
    ]
    return sorted(chunks, key=len, reverse=True)  # sorted() is stable


def _assign_chunks(
    chunks: Sequence[IntArray], num_clients: int, *, size: int, limit: int
) -> tuple[list[list[IntArray]], int]:
    """Assign chunks round-robin; return each client's chunks and the misfit count."""
    # A client leaves the ring once it holds `size` nodes, and takes no chunk with which
    # it would hold `limit` nodes.
    ring = list(range(num_clients))
    held: list[list[IntArray]] = [[] for _ in ring]
    sizes = [0] * num_clients
    pointer = num_fallbacks = 0
    for chunk in chunks:
        while len(ring) > 1 and sizes[ring[pointer]] >= size:
            del ring[pointer]
            pointer %= len(ring)
        slots = [(pointer + step) % len(ring) for step in range(len(ring))]
        room = limit - len(chunk)
        chosen = next((slot for slot in slots if sizes[ring[slot]] < room), None)
        if chosen is None:
            chosen = min(range(len(ring)), key=lambda slot: sizes[ring[slot]])
            num_fallbacks += 1
        pointer = chosen
        held[ring[pointer]].append(chunk)
        sizes[ring[pointer]] += len(chunk)
    return held, num_fallbacks
