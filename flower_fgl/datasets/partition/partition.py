"""Partitions of nodes, graphs or edges among clients: rules, hash and versions.

A rule is a pure function of the dataset, the number of clients K, the seed and its options,
and returns K ascending arrays.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
from torch import Tensor

from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.datasets.partition import assign
from flower_fgl.datasets.partition.assign import IntArray

__all__ = [
    "EDGE_RULES",
    "GRAPH_RULES",
    "NETWORK_RULES",
    "NODE_RULES",
    "IntArray",
    "PartitionInput",
    "PartitionRule",
    "describe_rules",
    "partition_edges",
    "partition_graphs",
    "partition_nodes",
    "partition_sha256",
    "versions_of",
]


RULES_VERSION = 3
"""Increment this when a rule's result changes, to invalidate stored partitions."""
LEAST_SHARING = 3
"""Minimum number of clients of which several, but not all, share an edge."""
SEED_END = 2**31
"""METIS needs a signed 32-bit seed, Louvain and K-means an unsigned one."""


@dataclass(frozen=True, eq=False)
class PartitionInput:
    """Input of a partition rule.

    ``edge_index`` (2, 2E) is (2, 0) if whole graphs are partitioned; ``labels`` (N,) are
    the classes of the N nodes (or graphs), -1 if unknown. If the edges of a typed graph are
    partitioned, they are these edges and their relations.
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

    ``more`` says what the one-line description leaves out. ``libraries`` are packages whose
    version may change its result.
    """

    description: str
    assign: Callable[[PartitionInput], list[IntArray]]
    more: str = ""
    libraries: tuple[str, ...] = ()


def _louvain_raw(given: PartitionInput) -> list[IntArray]:
    return assign.louvain_communities(
        given.edge_index, given.num_nodes, seed=given.seed
    )


def _by_labels(communities: list[IntArray], given: PartitionInput) -> list[IntArray]:
    return assign.cluster_by_labels(
        [nodes for nodes in communities if len(nodes)],
        given.labels,
        given.num_classes,
        given.num_clients,
        seed=given.seed,
    )


def _louvain_label(given: PartitionInput) -> list[IntArray]:
    num_parts = min(assign.NUM_COMMUNITIES, given.num_nodes)
    return _by_labels(assign.merge_communities(_louvain_raw(given), num_parts), given)


def _metis(given: PartitionInput, num_parts: int) -> list[IntArray]:
    return assign.metis_communities(
        given.edge_index, given.num_nodes, num_parts, seed=given.seed
    )


def _metis_label(given: PartitionInput) -> list[IntArray]:
    return _by_labels(
        _metis(given, min(assign.NUM_COMMUNITIES, given.num_nodes)), given
    )


def _quantile(given: PartitionInput) -> list[IntArray]:
    # unknown values, -1, come last
    order = np.argsort(given.labels.astype(np.uint64), kind="stable")
    parts = np.array_split(order, given.num_clients)
    return [np.sort(part).astype(np.int64) for part in parts]


UNEQUAL = "the sizes of the clients differ widely"

_DIRICHLET = PartitionRule(
    "class shares from a Dirichlet distribution; small alpha, strong label skew",
    lambda g: assign.dirichlet_parts(
        g.labels, g.num_clients, alpha=g.alpha, seed=g.seed
    ),
    f"each client gets at least {assign.MIN_CLIENT_SIZE} nodes or graphs; in a typed "
    "graph nodes of other kinds follow their neighbours, and those that no edge reaches "
    "are dropped",
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
        lambda g: _metis(g, g.num_clients),
        "isolated nodes fill up the parts, so that one client may get most of them; an "
        "empty part is an error",
        libraries=("pymetis",),
    ),
    "louvain": PartitionRule(
        "Louvain communities, divided and merged to clients of about equal size",
        lambda g: assign.merge_communities(_louvain_raw(g), g.num_clients),
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
        lambda g: assign.deal_evenly_by_class(
            np.zeros_like(g.labels), g.num_clients, seed=g.seed
        ),
        libraries=("numpy",),
    ),
    "quantile": _QUANTILE,
}
"""Rules that partition the nodes of one graph."""

GRAPH_RULES: dict[str, PartitionRule] = {
    "dirichlet": _DIRICHLET,
    "uniform": PartitionRule(
        "graphs of each class assigned at random: equal class shares on every client",
        lambda g: assign.deal_evenly_by_class(g.labels, g.num_clients, seed=g.seed),
        libraries=("numpy",),
    ),
    "quantile": _QUANTILE,
}
"""Rules that partition a set of graphs."""

NETWORK_RULES: dict[str, PartitionRule] = {
    "network": PartitionRule(
        "one network per client, sampled at random; the others are dropped",
        lambda g: assign.draw_networks(g.labels, g.num_clients, seed=g.seed),
        libraries=("numpy",),
    )
}
"""Rules that assign one whole network of a dataset to each client."""

EDGE_RULES: dict[str, PartitionRule] = {
    "random-edges": PartitionRule(
        "edges of a typed graph assigned at random: some to one client, some to several, "
        "some to all",
        lambda g: assign.deal_edges(g.num_nodes, g.num_clients, seed=g.seed),
        "a client holds the nodes with an edge; clients share nodes and labels",
        libraries=("numpy",),
    ),
    "random-edge-types": PartitionRule(
        "relations of a typed graph assigned at random: some to one client, some to "
        "several, some to all",
        lambda g: assign.deal_relations(g.labels, g.num_clients, seed=g.seed),
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


def partition_nodes(
    dataset: NodeDataset, rule: str, num_clients: int, *, seed: int, alpha: float = 0.5
) -> list[IntArray]:
    """Partition the N nodes of a graph among K clients by a rule.

    The ascending nodes of the clients are disjoint and none is empty; they cover the graph,
    except with ``network``. In a typed graph ``dirichlet`` assigns the nodes of the kind to
    predict, which others follow, see :func:`follow_neighbours`.
    """
    rules, labels = NODE_RULES, dataset.y.numpy()
    if rule in NETWORK_RULES:
        if dataset.network is None:
            raise ConfigError(
                f'partition = "{rule}" assigns each client its own network, but '
                f'{dataset.name} is one graph: use partition = "metis".'
            )
        rules, labels = NETWORK_RULES, dataset.network.numpy()
    edge_index, kinds = dataset.edge_index.numpy(), dataset.node_type
    chosen = np.arange(dataset.num_nodes)
    is_of_kind = rule == "dirichlet" and dataset.schema is not None
    if is_of_kind and dataset.schema is not None and kinds is not None:
        of_kind = kinds == dataset.schema.node_types.index(dataset.schema.target)
        chosen = of_kind.nonzero().flatten().numpy()
    given = PartitionInput(
        edge_index, labels[chosen], dataset.target.width, num_clients, seed, alpha
    )
    parts = _partition(given, rule, rules, "nodes")
    if not is_of_kind:
        return parts
    owner = np.full(dataset.num_nodes, -1)
    for client, part in enumerate(parts):
        owner[chosen[part]] = client
    owner = assign.follow_neighbours(edge_index, owner, num_clients)
    return [np.flatnonzero(owner == client) for client in range(num_clients)]


def partition_graphs(
    labels: Tensor | IntArray,
    rule: str,
    num_clients: int,
    *,
    seed: int,
    alpha: float = 0.5,
) -> list[IntArray]:
    """Partition G whole graphs by a rule of ``GRAPH_RULES``, as :func:`partition_nodes`.

    ``labels`` are the classes of the graphs, of shape (G,), int64.
    """
    classes = np.asarray(labels, dtype=np.int64)
    given = PartitionInput(
        np.empty((2, 0), dtype=np.int64),
        classes,
        int(classes.max(initial=-1)) + 1,
        num_clients,
        seed,
        alpha,
    )
    return _partition(given, rule, GRAPH_RULES, "graphs")


def partition_edges(
    dataset: NodeDataset, rule: str, num_clients: int, *, seed: int
) -> list[IntArray]:
    """Assign the M edges of a typed graph to K clients, at least 3, by a rule.

    Returns the ascending edges of each client, in the order of ``dataset.messages``; some
    are held by several.
    """
    messages = dataset.messages
    if messages is None or messages.relation is None:
        raise ConfigError(
            f'partition = "{rule}" assigns the edges of a typed graph, but '
            f'{dataset.name} has one kind of nodes and edges: use partition = "metis".'
        )
    if num_clients < LEAST_SHARING:
        raise ConfigError(
            f'partition = "{rule}" lets several, but not all, clients share edges: it '
            f"needs at least {LEAST_SHARING} clients, got {num_clients}."
        )
    given = PartitionInput(
        messages.index.numpy(),
        messages.relation.numpy(),
        len(dataset.schema.relations) if dataset.schema else 0,
        num_clients,
        seed,
        alpha=0.5,
    )
    return _partition(given, rule, EDGE_RULES, "edges")


def _partition(
    given: PartitionInput, rule: str, rules: Mapping[str, PartitionRule], members: str
) -> list[IntArray]:
    """Check the input, apply the rule and reject an empty client."""
    _check(given, members)
    if given.num_clients == 1 and rules is not NETWORK_RULES:
        return [np.arange(given.num_nodes, dtype=np.int64)]
    parts = rules[rule].assign(given)
    empty = [client for client, nodes in enumerate(parts) if len(nodes) == 0]
    if empty:
        raise DataError(
            f'The rule "{rule}" left {len(empty)} of {given.num_clients} clients '
            f"without {members}, the first is client {empty[0]}: the dataset has only "
            f"{given.num_nodes} {members} and {given.edge_index.shape[1] // 2} edges. Use "
            'fewer clients or another rule, e.g. partition = "uniform".'
        )
    return parts


def _check(given: PartitionInput, members: str) -> None:
    """Reject settings that are out of range."""
    if given.num_clients < 1:
        raise ConfigError(f"clients must be at least 1, got {given.num_clients}.")
    if given.num_clients > given.num_nodes:
        raise ConfigError(
            f"clients = {given.num_clients} is more than the {given.num_nodes} "
            f"{members} of the dataset. Use at most {given.num_nodes} clients."
        )
    if not 0 <= given.seed < SEED_END:
        raise ConfigError(
            f"partition-seed must lie in [0, {SEED_END - 1}], got {given.seed}."
        )


def partition_sha256(parts: Sequence[IntArray]) -> str:
    """Hash the sizes and members of a partition with SHA-256.

    The digest is of K, the K sizes and the concatenated members as little-endian 64-bit
    integers. It is equal on every machine and changes if any member moves.
    """
    header = np.array([len(parts), *map(len, parts)], dtype="<i8")
    digest = hashlib.sha256(header.tobytes())
    for nodes in parts:
        digest.update(np.asarray(nodes, dtype="<i8").tobytes())
    return digest.hexdigest()


def versions_of(rule: str) -> list[str]:
    """Return the versions of the rules, and of the packages that a rule uses.

    For example ``["rules=3", "pymetis=2025.2.2"]``.
    """
    rows = GRAPH_RULES | NODE_RULES | NETWORK_RULES | EDGE_RULES
    used = [f"{library}={_version(library)}" for library in rows[rule].libraries]
    return [f"rules={RULES_VERSION}", *used]


_version = functools.cache(version)  # reading it takes milliseconds
