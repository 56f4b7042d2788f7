"""Equations of GCFL+: when a cluster of clients splits, and how.

Xie et al., "Federated Graph Classification over Non-IID Graphs", NeurIPS 2021.
"""

from itertools import combinations

import networkx as nx
import torch
from torch import Tensor

__all__ = ["bipartition", "dtw_distances", "splits", "update_norms"]


def update_norms(updates: Tensor) -> tuple[float, float]:
    """Return the norm of the mean update, and the largest norm of an update Δθ_i, a row.

    Notes
    -----
    1. The paper prints the norm of the sum. The published code takes the mean of all
       clients with equal weights, which its thresholds belong to.
    """
    largest = torch.linalg.vector_norm(updates, dim=1).max()
    return float(torch.linalg.vector_norm(updates.mean(dim=0))), float(largest)


def splits(mean: float, largest: float, *, eps1: float, eps2: float) -> bool:
    """Return whether a cluster stands still while a client of it does not.

    The ``mean`` must be below ε_1, and the ``largest`` must exceed ε_2, see
    :func:`update_norms`.
    """
    return mean < eps1 and largest > eps2


def dtw_distances(series: Tensor) -> Tensor:
    """Compute the distances (n, n) of time series (n, L) by dynamic time warping, float64.

    The root of the sum of the squared differences along the best alignment.
    """
    values = series.double()
    count, length = values.shape
    step = (values[:, None, :, None] - values[None, :, None, :]).square()
    total = torch.full(
        (count, count, length + 1, length + 1), torch.inf, dtype=torch.float64
    )
    total[..., 0, 0] = 0
    for a in range(length):
        for b in range(length):
            before = torch.stack(
                [total[..., a, b], total[..., a, b + 1], total[..., a + 1, b]]
            )
            total[..., a + 1, b + 1] = step[..., a, b] + before.amin(dim=0)
    return total[..., -1, -1].sqrt()


def bipartition(distances: Tensor) -> tuple[list[int], list[int]]:
    """Split clients by the global minimum cut of their similarities.

    Stoer & Wagner, "A Simple Min-Cut Algorithm", JACM 1997. The similarity of two clients
    is the largest distance minus theirs. ``distances`` (n, n) are β, symmetric; n at
    least 2. Returns both parts, ascending; the first one contains client 0.
    """
    similarity = (distances.max() - distances).tolist()
    graph = nx.Graph()
    for i, j in combinations(range(len(similarity)), 2):
        graph.add_edge(i, j, weight=similarity[i][j])
    _, parts = nx.stoer_wagner(graph)
    first, second = sorted(map(sorted, parts))
    return first, second
