"""Client distributions of clustered sampling, as exact integer tables.

Fraboni et al., "Clustered Sampling: Low-Variance and Improved Representativity for
Clients Selection in Federated Learning", ICML 2021.

Each row of a table is one distribution: ``table[k, i] / n`` is the probability r_{k,i}
that draw k samples client i, where n is the sum of all n_i. Rows sum to n and column i
sums to m·n_i, both exactly (the paper's Proposition 1: the aggregation is unbiased).
"""

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

__all__ = ["draw_clients", "table_by_similarity", "table_by_size", "update_angles"]

Counts = NDArray[np.int64]


def table_by_size(counts: Counts, draws: int) -> Counts:
    """Fill the distributions, large clients first, Fraboni et al., Algorithm 1.

    From n_i, ``counts`` (K,), positive, and m = ``draws``, at least 1. Returns n·r_{k,i},
    (m, K).
    """
    table = np.zeros((draws, len(counts)), dtype=np.int64)
    return _fill(
        table, np.argsort(-counts, kind="stable"), draws * counts, counts.sum()
    )


def table_by_similarity(
    counts: Counts, draws: int, angles: NDArray[np.float64]
) -> Counts:
    """Assign similar clients to one distribution, Fraboni et al., Algorithm 2.

    As :func:`table_by_size`, with the ``angles`` (K, K) of :func:`update_angles`.

    Notes
    -----
    1. A client with m·n_i ≥ n first fills ⌊m·n_i/n⌋ distributions alone. Its remaining
       mass is clustered with the other clients.
    2. Ward's tree is split into the largest clusters whose clients fit into one
       distribution. The largest clusters start one distribution each. The others fill the
       free space by descending size, their clients by number; the published code shuffles
       these.
    3. The published code passes rows of the angle matrix to Ward's method as
       observations. Here the angles are the distances, as in the text.
    """
    capacity = counts.sum()
    whole, rest = np.divmod(draws * counts, capacity)
    table = np.zeros((draws, len(counts)), dtype=np.int64)
    alone = int(whole.sum())
    table[np.arange(alone), np.repeat(np.arange(len(counts)), whole)] = capacity
    remaining = np.flatnonzero(rest)
    if not len(remaining):
        return table
    tree = linkage(
        squareform(angles[np.ix_(remaining, remaining)], checks=False), "ward"
    )
    groups = [remaining[group] for group in _clusters(tree, rest[remaining], capacity)]
    groups.sort(key=lambda group: -int(rest[group].sum()))
    for row, group in zip(table[alone:], groups, strict=False):
        row[group] = rest[group]
    others = groups[draws - alone :]
    return _fill(table, np.concatenate([remaining[:0], *others]), rest, capacity)


def update_angles(updates: NDArray[np.float32]) -> NDArray[np.float64]:
    """Measure angles (K, K), in [0, π], between last updates, Fraboni et al., Section 5.

    ``updates`` (K, P) are θ_i − w of each client's last participation, zeros before the
    first. The angle is ``arccos(cos(u_i, u_j))``; 0 between two zero updates, π/2 between
    a zero and a nonzero update.
    """
    norms = np.linalg.norm(updates, axis=1, keepdims=True)
    unit = (updates / np.where(norms > 0, norms, 1)).astype(np.float64)
    angles = np.arccos(np.clip(unit @ unit.T, -1, 1))
    angles[np.ix_(norms[:, 0] == 0, norms[:, 0] == 0)] = 0
    np.fill_diagonal(angles, 0)
    return np.asarray((angles + angles.T) / 2)


def draw_clients(table: Counts, generator: np.random.Generator) -> Counts:
    """Draw one client from each distribution of a table (m, K): numbers (m,)."""
    upper = table.cumsum(axis=1)  # (m, K)
    point = generator.integers(upper[0, -1], size=len(table))
    return np.asarray((upper <= point[:, None]).sum(axis=1))


def _fill(table: Counts, order: Counts, mass: Counts, capacity: int) -> Counts:
    """Distribute clients over the free capacity of the rows, one after the other."""
    # Rows' free capacities and clients' masses, each concatenated, divide one line: a
    # client's share of a row is the overlap of their segments.
    ends = (capacity - table.sum(axis=1)).cumsum()[:, None]  # (m, 1)
    starts = np.concatenate([[[0]], ends[:-1]])
    upper = mass[order].cumsum()  # (clients,)
    lower = upper - mass[order]
    table[:, order] += np.clip(
        np.minimum(ends, upper) - np.maximum(starts, lower), 0, None
    )
    return table


def _clusters(tree: NDArray[np.float64], mass: Counts, capacity: int) -> list[Counts]:
    """Split a linkage tree into its largest branches of at most ``capacity`` mass."""
    number = len(mass)
    total = np.concatenate([mass, np.zeros(len(tree), dtype=np.int64)])
    pairs = tree[:, :2].astype(np.int64)
    for node, pair in enumerate(pairs, start=number):
        total[node] = total[pair].sum()
    branch = np.arange(len(total))
    for node in range(len(total) - 1, number - 1, -1):
        if total[node] <= capacity:
            branch[pairs[node - number]] = branch[node]
    return [np.flatnonzero(branch[:number] == b) for b in np.unique(branch[:number])]
