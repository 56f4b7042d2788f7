"""FINCH: parameter-free clustering by first neighbours.

Sarfraz, Sharma and Stiefelhagen, "Efficient Parameter-Free Clustering Using First
Neighbor Relations", CVPR 2019.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from flower_fgl.algorithms.prototypes.hop_prototypes import class_means

__all__ = ["cluster_means", "finch", "first_neighbour_clusters"]


def first_neighbour_clusters(points: Tensor) -> Tensor:
    """Cluster points (n, p) by first neighbours, Sarfraz et al. 2019, Eq. (1).

    Two points are linked if one is the other's nearest by cosine, or both have the same
    nearest point; clusters (n,), from 0, are the connected components. There is at least
    one point. Among equally near points the first is the nearest. Points with the same
    nearest neighbour are both linked to it, so links between them are redundant and
    omitted.
    """
    number = len(points)
    if number == 1:
        return torch.zeros(1, dtype=torch.int64)
    unit = F.normalize(points.detach().cpu(), dim=1)
    similarity = (unit @ unit.T).fill_diagonal_(-torch.inf)
    nearest = similarity.argmax(dim=1).numpy()
    links = csr_array(
        (np.ones(number), (np.arange(number), nearest)), shape=(number, number)
    )
    _, labels = connected_components(links, directed=False)
    return torch.from_numpy(labels.astype(np.int64))


def finch(points: Tensor) -> Tensor:
    """Cluster points to the coarsest level of FINCH, Sarfraz et al. 2019, Algorithm 1.

    Returns the cluster of each point (n,), from 0: more than one cluster unless the first
    level already has one.
    """
    labels = first_neighbour_clusters(points)
    while True:
        number = int(labels.max()) + 1
        coarser = first_neighbour_clusters(class_means(points.cpu(), labels, number))
        merged = int(coarser.max()) + 1
        if merged in (1, number):
            return labels
        labels = coarser[labels]


def cluster_means(points: Tensor) -> Tensor:
    """Return the mean (m, p) of each FINCH cluster of points (n, p)."""
    labels = finch(points)
    return class_means(points, labels.to(points.device), int(labels.max()) + 1)
