"""How partition rules assign nodes, graphs or edges to clients or communities.

Equal graphs, numbers of groups and seeds give equal groups, ascending arrays of members.

Rules of the edges of a typed graph, which clients share, follow the published code of Fu
and King, IJCAI 2023: of K + 2 pieces, one is held by each client alone, one by several
clients, and one by all. An own generator replaces theirs.
"""

import logging
import warnings
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import pymetis
import scipy.sparse
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from flower_fgl.core.errors import DataError
from flower_fgl.core.seeds import SERVER, numpy_generator

__all__ = ["MIN_CLIENT_SIZE", "NUM_COMMUNITIES", "IntArray"]
__all__ += ["cluster_by_labels", "deal_edges", "deal_evenly_by_class"]
__all__ += ["deal_relations", "dirichlet_parts", "draw_networks", "exp_label_entropy"]
__all__ += ["follow_neighbours", "group_nodes", "louvain_communities"]
__all__ += ["merge_communities", "metis_communities"]

IntArray = NDArray[np.int64]

IN_PLACE_OF_1 = 2**31 - 2
"""METIS' seed for partition seed 1, see :func:`metis_communities`."""
RECURSIVE_UP_TO = 8
"""Largest number of parts for recursive bisection; METIS finds more parts k-way."""
NUM_COMMUNITIES = 100
"""Number of communities that ``louvain-label`` and ``metis-label`` merge to clients."""
MAX_SIZE_DIFFERENCE = 20
"""δ of the greedy merge: a client may hold up to δ nodes more than ⌊N/K⌋."""

MIN_CLIENT_SIZE = 5
"""Minimum number of nodes (or graphs) per client under the Dirichlet rule."""
DIRICHLET_TRIES = 100
KMEANS_TRIES = 100

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
    cap = size - delta
    divided = (np.split(nodes, range(cap, len(nodes), cap)) for nodes in communities)
    in_rows = (c for row in zip_longest(*divided) for c in row if c is not None)
    # sorted() is stable: of equal ones, first chunks of all communities come first
    chunks = sorted(in_rows, key=len, reverse=True)
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


def count_classes(
    parts: Sequence[IntArray], labels: IntArray, num_classes: int
) -> IntArray:
    """Count the members of known class in each part: (parts, C)."""
    held = (labels[nodes] for nodes in parts)
    return np.stack([np.bincount(y[y >= 0], minlength=num_classes) for y in held])


def draw_networks(network: IntArray, num_clients: int, *, seed: int) -> list[IntArray]:
    """Assign each client one network, sampled without replacement, FedPANO Sec. 4.1."""
    names, index = np.unique(network, return_inverse=True)
    if num_clients > len(names):
        raise DataError(
            f"The dataset has {len(names)} networks, and each client needs its own: use "
            f"at most {len(names)} clients, got {num_clients}."
        )
    nodes = group_nodes(index, len(names))
    order = numpy_generator(seed, 0, SERVER, "networks").permutation(len(names))
    return [nodes[chosen] for chosen in order[:num_clients]]


def deal_evenly_by_class(
    labels: IntArray, num_clients: int, *, seed: int
) -> list[IntArray]:
    """Assign the members of each class at random and evenly.

    Clients differ by at most one member per class and in total, because each class starts
    at the client after the last one of the class before.
    """
    generator = numpy_generator(seed, 0, SERVER, "partition/uniform")
    shuffled = generator.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_class] = np.arange(len(labels)) % num_clients
    return group_nodes(owner, num_clients)


def dirichlet_parts(
    labels: IntArray,
    num_clients: int,
    *,
    alpha: float,
    seed: int,
    min_size: int = MIN_CLIENT_SIZE,
) -> list[IntArray]:
    """Assign each client class shares sampled from a Dirichlet distribution.

    Members of unknown class (-1) are assigned like one more class, the last. A client that
    holds N/K members gets no members of the following classes. Sampling is repeated, with
    another generator each time, until the smallest client holds ``min_size`` members.

    Notes
    -----
    1. If rounding leaves a share of 0 to every client with room, these clients share the
       class evenly.
    """
    if num_clients * min_size > len(labels):
        raise DataError(
            f"The Dirichlet rule assigns at least {min_size} members to each client: "
            f"{num_clients} clients need {num_clients * min_size}, but the dataset has "
            f"{len(labels)}. Use at most {len(labels) // min_size} clients."
        )
    for attempt in range(DIRICHLET_TRIES):
        generator = numpy_generator(seed, 0, SERVER, f"partition/dirichlet/{attempt}")
        owner = _dirichlet_owner(labels, num_clients, alpha, generator)
        if np.bincount(owner, minlength=num_clients).min() >= min_size:
            return group_nodes(owner, num_clients)
    raise DataError(
        f"The Dirichlet rule with alpha = {alpha:g} did not reach {min_size} members "
        f"for each of {num_clients} clients in {DIRICHLET_TRIES} attempts. Use a larger "
        "alpha, fewer clients or another seed."
    )


def _dirichlet_owner(
    labels: IntArray, num_clients: int, alpha: float, generator: np.random.Generator
) -> IntArray:
    """Sample the client of each member once, class by class."""
    owner = np.empty(len(labels), dtype=np.int64)
    sizes = np.zeros(num_clients, dtype=np.int64)
    known = np.unique(labels)
    for label in np.roll(known, -1) if known[0] < 0 else known:  # -1 comes last
        members = generator.permutation(np.flatnonzero(labels == label))
        shares = generator.dirichlet(np.full(num_clients, alpha))
        has_room = sizes * num_clients < len(labels)
        shares = np.where(has_room, shares, 0.0)
        if shares.sum() == 0:
            shares = has_room.astype(np.float64)
        shares /= shares.sum()
        # The last boundary is the class size; a rounded sum of shares may miss it.
        ends = np.floor(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        client = np.searchsorted(ends, np.arange(len(members)), side="right")
        owner[members] = client
        sizes += np.bincount(client, minlength=num_clients)
    return owner


def follow_neighbours(
    edge_index: IntArray, owner: IntArray, num_clients: int
) -> IntArray:
    """Assign the nodes without a client (-1) to that of most of their assigned neighbours.

    Breadth-first: those that are as far from the first ones at once; on a tie to the first
    client. Nodes that no edge reaches stay without.
    """
    owner, (source, target) = owner.copy(), edge_index
    while (reached := (owner[source] >= 0) & (owner[target] < 0)).any():
        votes = target[reached] * num_clients + owner[source[reached]]
        votes, counts = np.unique(votes, return_counts=True)
        # the last vote for a node wins
        order = np.lexsort((-votes, counts, votes // num_clients))
        owner[votes[order] // num_clients] = votes[order] % num_clients
    return owner


def cluster_by_labels(
    communities: Sequence[IntArray],
    labels: IntArray,
    num_classes: int,
    num_clients: int,
    *,
    seed: int,
) -> list[IntArray]:
    """Merge communities with similar label shares to clients by K-means.

    K-means is Euclidean, the best of 10 starts; if a cluster is empty, it is repeated with
    the next seed. Sizes of the clients may differ by two orders of magnitude.
    """
    sizes = np.array([len(nodes) for nodes in communities])
    shares = count_classes(communities, labels, num_classes) / sizes[:, None]  # (M, C)
    num_different = len(np.unique(shares, axis=0))
    if num_different < num_clients:
        raise DataError(
            f"{num_clients} clients need {num_clients} communities with different label "
            f"shares, but there are {len(sizes)} communities with {num_different} "
            f"different label shares. Use at most {num_different} clients or another "
            "partition rule."
        )
    for attempt in range(KMEANS_TRIES):
        cluster = _kmeans(shares, num_clients, seed=(seed + attempt) % 2**32)
        if len(np.unique(cluster)) == num_clients:
            owner = np.repeat(cluster, sizes)
            nodes = np.concatenate(list(communities))
            return [np.sort(nodes[owner == client]) for client in range(num_clients)]
    raise DataError(
        f"K-means left one of {num_clients} clusters of {len(sizes)} communities empty "
        f"for {KMEANS_TRIES} seeds from {seed} on. Use fewer clients or another "
        "partition rule."
    )


def _kmeans(points: NDArray[np.float64], num_clusters: int, *, seed: int) -> IntArray:
    """Return the cluster of each point."""
    # Imported here: most processes only load a partition that another one computed.
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    model = KMeans(num_clusters, n_init=10, random_state=seed)
    # One thread: partial sums, and so ties, must not depend on the number of cores.
    with threadpool_limits(limits=1), warnings.catch_warnings():
        # It warns about an empty cluster; the caller then uses the next seed.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return np.asarray(model.fit_predict(points), dtype=np.int64)


def deal_edges(num_edges: int, num_clients: int, *, seed: int) -> list[IntArray]:
    """Assign edges at random; a client's edges are ascending."""
    if num_edges < num_clients + 2:
        raise DataError(
            f'partition = "random-edges" needs at least {num_clients + 2} edges for '
            f"{num_clients} clients, but the graph has {num_edges}. Use fewer clients."
        )
    generator = numpy_generator(seed, 0, SERVER, "partition/random-edges")
    order = generator.permutation(num_edges)
    return share_out(order, num_clients, generator=generator)


def deal_relations(
    relations: IntArray, num_clients: int, *, seed: int
) -> list[IntArray]:
    """Assign the edges of whole relations (M,) at random, as :func:`deal_edges`."""
    held = np.unique(relations)
    if len(held) <= num_clients:
        raise DataError(
            f'partition = "random-edge-types" needs more relations than the {num_clients} '
            f"clients, but the graph has {len(held)} with edges. Use fewer clients, or "
            'partition = "random-edges".'
        )
    generator = numpy_generator(seed, 0, SERVER, "partition/random-edge-types")
    parts = share_out(generator.permutation(held), num_clients, generator=generator)
    return [np.flatnonzero(np.isin(relations, part)) for part in parts]


def share_out(
    order: IntArray, num_clients: int, *, generator: np.random.Generator
) -> list[IntArray]:
    """Give K clients pieces of their own, a piece that several share, and one of all.

    ``order`` are the E shuffled edges or relations, at least K + 1, for at least 3 clients.
    With s = ⌊E / (K + 2)⌋, client k gets the k-th s items, those after the first (K + 1)s,
    and some of the s items before these: each goes to m random clients, with m uniform in
    2, …, K - 1. With E = K + 1 a client has its own item and the last one.
    """
    size = len(order) // (num_clients + 2)
    own, last = size or 1, (num_clients + 1) * size or num_clients
    parts = [list(order[k * own : (k + 1) * own]) for k in range(num_clients)]
    for item in order[num_clients * own : last]:
        number = generator.integers(2, num_clients)
        for client in generator.choice(num_clients, number, replace=False):
            parts[client].append(item)
    return [
        np.sort(np.concatenate([np.array(part, dtype=np.int64), order[last:]]))
        for part in parts
    ]


def exp_label_entropy(class_counts: IntArray) -> NDArray[np.float64]:
    """Return the exp of the label entropy of each client, (K,), from its counts (K, C).

    It lies in [1, C]; without labels it is 0.
    """
    total = class_counts.sum(axis=1, keepdims=True)  # (K, 1)
    share = class_counts / np.maximum(total, 1)
    log_share = np.log(np.where(share > 0, share, 1.0))
    entropy = -(share * log_share).sum(axis=1)
    return np.where(total[:, 0] > 0, np.exp(entropy), 0.0)
