"""Partition rules that ignore edges: uniform, by network, Dirichlet, label clusters.

Those of the edges of a typed graph, which clients share, follow the published code of Fu
and King, IJCAI 2023: of K + 2 pieces, one is held by each client alone, one by several
clients, and one by all. An own generator replaces theirs.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from flower_fgl.core.errors import DataError
from flower_fgl.core.seeds import SERVER, numpy_generator
from flower_fgl.datasets.partition.communities import IntArray, group_nodes

__all__ = [
    "MIN_CLIENT_SIZE",
    "PartitionSummary",
    "cluster_by_labels",
    "deal_edges",
    "deal_evenly",
    "deal_evenly_by_class",
    "deal_relations",
    "dirichlet_parts",
    "draw_networks",
    "follow_neighbours",
]


MIN_CLIENT_SIZE = 5
"""Minimum number of nodes (or graphs) per client under the Dirichlet rule."""
DIRICHLET_TRIES = 100
KMEANS_TRIES = 100


def count_classes(
    parts: Sequence[IntArray], labels: IntArray, num_classes: int
) -> IntArray:
    """Count the members of known class in each part: (parts, C)."""
    members = np.concatenate([np.empty(0, np.int64), *parts])
    part = np.repeat(np.arange(len(parts)), [len(nodes) for nodes in parts])
    label = labels[members]
    cell = (part * num_classes + label)[label >= 0]
    counts = np.bincount(cell, minlength=len(parts) * num_classes)
    return counts.reshape(len(parts), num_classes)


def deal_evenly(num_nodes: int, num_clients: int, *, seed: int) -> list[IntArray]:
    """Assign nodes at random, independent of labels; sizes differ by at most one."""
    return deal_evenly_by_class(np.zeros(num_nodes, np.int64), num_clients, seed=seed)


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


@dataclass(frozen=True, eq=False)
class PartitionSummary:
    """Statistics of a partition.

    ``class_counts`` (K, C) are the members of each known class, ``sizes`` (K,) all of them,
    and ``share_edges_kept`` the share of edges with both ends on one client; 1 without
    edges.
    """

    class_counts: IntArray
    sizes: IntArray
    share_edges_kept: float

    @property
    def num_classes_present(self) -> IntArray:
        """Classes with at least one member on each client, shape (K,)."""
        present: IntArray = (self.class_counts > 0).sum(axis=1, dtype=np.int64)
        return present

    @property
    def exp_label_entropy(self) -> NDArray[np.float64]:
        """Exp of each client's label entropy, shape (K,), in [1, C]; 0 without labels."""
        total = self.class_counts.sum(axis=1, keepdims=True)  # (K, 1)
        share = self.class_counts / np.maximum(total, 1)
        log_share = np.log(np.where(share > 0, share, 1.0))
        entropy = -(share * log_share).sum(axis=1)
        return np.where(total[:, 0] > 0, np.exp(entropy), 0.0)
