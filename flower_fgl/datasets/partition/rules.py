"""Tables of partition rules: name, function, options and libraries of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flower_fgl.datasets.partition.communities import (
    NUM_COMMUNITIES,
    IntArray,
    louvain_communities,
    merge_communities,
    metis_communities,
    metis_parts,
)
from flower_fgl.datasets.partition.label_skew import (
    MIN_CLIENT_SIZE,
    cluster_by_labels,
    deal_evenly,
    deal_evenly_by_class,
    dirichlet_parts,
    draw_networks,
)
from flower_fgl.datasets.partition.shared_edges import deal_edges, deal_relations

__all__ = [
    "EDGE_RULES",
    "GRAPH_RULES",
    "NETWORK_RULES",
    "NODE_RULES",
    "PartitionInput",
    "PartitionRule",
    "describe_rules",
]


@dataclass(frozen=True, eq=False)
class PartitionInput:
    """Input of a partition rule.

    ``edge_index`` (2, 2E) has both directions of each edge, or shape (2, 0) if whole
    graphs are partitioned; ``labels`` (N,) are the classes of the N nodes (or graphs),
    -1 if unknown. If the edges of a typed graph are partitioned, ``edge_index`` (2, N) and
    ``labels`` are these edges and their relations. K lies in [2, N], ``seed`` in
    [0, 2**31); ``alpha``, above 0, is that of Dirichlet.
    """

    edge_index: IntArray
    labels: IntArray
    num_classes: int
    num_clients: int
    seed: int
    alpha: float

    @property
    def num_nodes(self) -> int:
        """Number of nodes (or graphs) N."""
        return len(self.labels)


@dataclass(frozen=True)
class PartitionRule:
    """One row of a table of rules.

    ``more`` says what the one-line description leaves out. ``options`` are those that
    the rule reads in addition to the number of clients and the seed (``alpha``).
    ``libraries`` are packages whose version may change its result.
    """

    description: str
    assign: Callable[[PartitionInput], list[IntArray]]
    more: str = ""
    options: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()


def _louvain_raw(given: PartitionInput) -> list[IntArray]:
    return louvain_communities(given.edge_index, given.num_nodes, seed=given.seed)


def _by_labels(communities: list[IntArray], given: PartitionInput) -> list[IntArray]:
    return cluster_by_labels(
        [nodes for nodes in communities if len(nodes)],
        given.labels,
        given.num_classes,
        given.num_clients,
        seed=given.seed,
    )


def _louvain_label(given: PartitionInput) -> list[IntArray]:
    num_parts = min(NUM_COMMUNITIES, given.num_nodes)
    return _by_labels(merge_communities(_louvain_raw(given), num_parts).parts, given)


def _metis_label(given: PartitionInput) -> list[IntArray]:
    num_parts = min(NUM_COMMUNITIES, given.num_nodes)
    communities = metis_communities(
        given.edge_index, given.num_nodes, num_parts, seed=given.seed
    )
    return _by_labels(communities, given)


def _quantile(given: PartitionInput) -> list[IntArray]:
    # unknown values, -1, come last
    order = np.argsort(given.labels.astype(np.uint64), kind="stable")
    parts = np.array_split(order, given.num_clients)
    return [np.sort(part).astype(np.int64) for part in parts]


UNEQUAL = "the sizes of the clients differ widely"

_DIRICHLET = PartitionRule(
    "class shares from a Dirichlet distribution; small alpha, strong label skew",
    lambda g: dirichlet_parts(g.labels, g.num_clients, alpha=g.alpha, seed=g.seed),
    f"each client gets at least {MIN_CLIENT_SIZE} nodes or graphs",
    options=("alpha",),
    libraries=("numpy",),
)

_QUANTILE = PartitionRule(
    "consecutive pieces of the items, sorted by the number that is predicted",
    _quantile,
    "needs a single number; items without one come last",
)

NODE_RULES: dict[str, PartitionRule] = {
    "metis": PartitionRule(
        "METIS: parts of equal size with few edges between them",
        lambda g: metis_parts(g.edge_index, g.num_nodes, g.num_clients, seed=g.seed),
        "isolated nodes fill up the parts, so that one client may get most of them; an "
        "empty part is an error",
        libraries=("pymetis",),
    ),
    "louvain": PartitionRule(
        "Louvain communities, divided and merged to clients of about equal size",
        lambda g: merge_communities(_louvain_raw(g), g.num_clients).parts,
        "an isolated node is a community of its own",
        libraries=("python-louvain", "networkx"),
    ),
    "louvain-label": PartitionRule(
        "about 100 balanced Louvain communities, merged by K-means on label shares",
        _louvain_label,
        UNEQUAL,
        libraries=("python-louvain", "networkx", "scikit-learn"),
    ),
    "louvain-label-a": PartitionRule(
        "raw Louvain communities, merged by K-means on label shares",
        lambda g: _by_labels(_louvain_raw(g), g),
        UNEQUAL,
        libraries=("python-louvain", "networkx", "scikit-learn"),
    ),
    "metis-label": PartitionRule(
        "100 METIS parts, merged by K-means on label shares",
        _metis_label,
        UNEQUAL,
        libraries=("pymetis", "scikit-learn"),
    ),
    "dirichlet": _DIRICHLET,
    "uniform": PartitionRule(
        "nodes assigned at random and evenly, independent of labels and edges",
        lambda g: deal_evenly(g.num_nodes, g.num_clients, seed=g.seed),
        libraries=("numpy",),
    ),
    "quantile": _QUANTILE,
}
"""Rules that partition the nodes of one graph."""

GRAPH_RULES: dict[str, PartitionRule] = {
    "dirichlet": _DIRICHLET,
    "uniform": PartitionRule(
        "graphs of each class assigned at random: equal class shares on every client",
        lambda g: deal_evenly_by_class(g.labels, g.num_clients, seed=g.seed),
        libraries=("numpy",),
    ),
    "quantile": _QUANTILE,
}
"""Rules that partition a set of graphs."""

NETWORK_RULES: dict[str, PartitionRule] = {
    "network": PartitionRule(
        "one network per client, sampled at random; the others are dropped",
        lambda g: draw_networks(g.labels, g.num_clients, seed=g.seed),
        libraries=("numpy",),
    )
}
"""Rules that assign one whole network of a dataset to each client."""


EDGE_RULES: dict[str, PartitionRule] = {
    "random-edges": PartitionRule(
        "edges of a typed graph assigned at random: some to one client, some to several, "
        "some to all",
        lambda g: deal_edges(g.num_nodes, g.num_clients, seed=g.seed),
        "a client holds the nodes with an edge; clients share nodes and labels",
        libraries=("numpy",),
    ),
    "random-edge-types": PartitionRule(
        "relations of a typed graph assigned at random: some to one client, some to "
        "several, some to all",
        lambda g: deal_relations(g.labels, g.num_clients, seed=g.seed),
        "a client holds the nodes with an edge; clients share nodes and labels",
        libraries=("numpy",),
    ),
}
"""Rules that partition the edges of a typed graph; clients may share edges and nodes."""


def describe_rules() -> dict[str, str]:
    """Return what users read about each rule; one for sets of graphs is named so."""
    rows = NODE_RULES | NETWORK_RULES | EDGE_RULES
    other = {
        f"{name} (sets of graphs)": row
        for name, row in GRAPH_RULES.items()
        if row != rows[name]
    }
    return {
        name: f"{row.description}; {row.more}" if row.more else row.description
        for name, row in (rows | other).items()
    }
