"""Partitions of nodes or graphs among clients, their hash and their cache key.

A rule of the tables in ``rules.py`` is a pure function of the dataset, the number of
clients K, the seed and its options, and returns K ascending arrays.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import numpy as np
from torch import Tensor

from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.options import nearest
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.datasets.partition.communities import (
    IN_PLACE_OF_1,
    RECURSIVE_UP_TO,
    IntArray,
)
from flower_fgl.datasets.partition.rules import (
    EDGE_RULES,
    GRAPH_RULES,
    NETWORK_RULES,
    NODE_RULES,
    PartitionInput,
    PartitionRule,
)

__all__ = [
    "EDGE_RULES",
    "GRAPH_RULES",
    "NETWORK_RULES",
    "NODE_RULES",
    "IntArray",
    "partition_edges",
    "partition_graphs",
    "partition_key",
    "partition_nodes",
    "partition_sha256",
]


RULES_VERSION = 2
"""Increment this when a rule's result changes, to invalidate stored partitions."""
LEAST_SHARING = 3
"""Minimum number of clients of which several, but not all, share an edge."""
SEED_END = 2**31
"""METIS needs a signed 32-bit seed, Louvain and K-means an unsigned one."""


def partition_nodes(
    dataset: NodeDataset, rule: str, num_clients: int, *, seed: int, alpha: float = 0.5
) -> list[IntArray]:
    """Partition the N nodes of a graph among K clients by a rule.

    ``rule`` is a name in ``NODE_RULES`` or ``NETWORK_RULES``, K lies in [1, N],
    ``seed`` in [0, 2**31), and ``alpha``, above 0, is the concentration of
    ``dirichlet``. The ascending nodes of the K clients are disjoint and none is empty;
    they cover the graph, except with ``network``.

    Raises
    ------
    ConfigError
        If the rule is unknown, or the number of clients, the seed or ``alpha`` is out
        of range, or the rule is ``network`` and the dataset has a single network.
    DataError
        If the rule leaves a client without nodes, or cannot assign each client its
        minimum number of nodes or its own network.
    """
    rules, labels = NODE_RULES, dataset.y.numpy()
    if rule in NETWORK_RULES:
        if dataset.network is None:
            raise ConfigError(
                f'partition = "{rule}" assigns each client its own network, but '
                f'{dataset.name} is one graph: use partition = "metis".'
            )
        rules, labels = NETWORK_RULES, dataset.network.numpy()
    given = PartitionInput(
        dataset.edge_index.numpy(),
        labels,
        dataset.num_classes,
        num_clients,
        seed,
        alpha,
    )
    return _partition(given, rule, rules, "nodes")


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
    """Assign the M edges of a typed graph to K clients by a rule of ``EDGE_RULES``.

    Returns the ascending edges of each client, in the order of ``dataset.messages``; some
    are held by several. K is at least 3.

    Raises
    ------
    ConfigError
        If the graph is not typed, or the number of clients or the seed is out of range.
    DataError
        If there are too few edges or relations.
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
    _check(given, _find(rule, rules), rule, members)
    if given.num_clients == 1 and rules is not NETWORK_RULES:
        return [np.arange(given.num_nodes, dtype=np.int64)]
    parts = rules[rule].assign(given)
    empty = [client for client, nodes in enumerate(parts) if len(nodes) == 0]
    if empty:
        raise DataError(
            f'The rule "{rule}" left {len(empty)} of {given.num_clients} clients '
            f"without {members}, the first is client {empty[0]}: the dataset has only "
            f"{given.num_nodes} {members}. Use fewer clients or another rule."
        )
    return parts


def _find(rule: str, rules: Mapping[str, PartitionRule]) -> PartitionRule:
    """Look up a rule by its name."""
    if rule not in rules:
        kind = "nodes" if rules is NODE_RULES else "graphs"
        raise ConfigError(
            f'Unknown partition rule "{rule}" for {kind}. {nearest(rule, rules)}'
        )
    return rules[rule]


def _check(given: PartitionInput, row: PartitionRule, rule: str, members: str) -> None:
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
    is_read = "alpha" in row.options
    if is_read and not (math.isfinite(given.alpha) and given.alpha > 0):
        raise ConfigError(
            f'dirichlet-alpha must be finite and above 0 for partition = "{rule}", got '
            f"{given.alpha}."
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


def partition_key(
    rule: str,
    num_clients: int,
    *,
    seed: int,
    alpha: float = 0.5,
    rules: Mapping[str, PartitionRule] = NODE_RULES,
) -> str:
    """Return a text key of everything that determines a partition except the dataset.

    For example ``"rules=2 metis clients=10 seed=42 recursive-up-to=8 pymetis=2025.2.2"``.

    Raises a ConfigError if the rule is not in ``rules``.
    """
    row = _find(rule, rules)
    words = [f"rules={RULES_VERSION}", rule, f"clients={num_clients}", f"seed={seed}"]
    if "alpha" in row.options:
        words.append(f"alpha={float(alpha)!r}")
    if "pymetis" in row.libraries:
        words.append(f"recursive-up-to={RECURSIVE_UP_TO}")
        if seed == 1:  # stored partitions had METIS' own seed 1
            words.append(f"metis-seed={IN_PLACE_OF_1}")
    words += [f"{library}={_version(library)}" for library in row.libraries]
    return " ".join(words)


@functools.cache
def _version(library: str) -> str:
    """Return the version of an installed library; reading it takes milliseconds."""
    return version(library)
