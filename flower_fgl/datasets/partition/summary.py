"""Statistics of a partition: client sizes, share of edges kept, label skew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flower_fgl.datasets.client_graph import GraphDataset, NodeDataset
from flower_fgl.datasets.partition.label_skew import count_classes
from flower_fgl.datasets.transforms.subgraph import owner_of_nodes

__all__ = ["PartitionSummary", "describe_partition"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PartitionSummary:
    """Statistics of a partition.

    Parameters
    ----------
    class_counts : ndarray of shape (K, C), int64
        Nodes (or graphs) of each class on each client, without those of unknown class.
    sizes : ndarray of shape (K,), int64
        Nodes (or graphs) of each client.
    share_edges_kept : float in [0, 1]
        Share of edges with both ends on one client; 1 for a dataset without edges.
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
    def exp_label_entropy(self) -> FloatArray:
        """Exp of each client's label entropy, shape (K,), in [1, C]; 0 without labels."""
        total = self.class_counts.sum(axis=1, keepdims=True)  # (K, 1)
        share = self.class_counts / np.maximum(total, 1)
        log_share = np.log(np.where(share > 0, share, 1.0))
        entropy = -(share * log_share).sum(axis=1)
        return np.where(total[:, 0] > 0, np.exp(entropy), 0.0)

    @property
    def mean_classes_present(self) -> float:
        """Mean number of classes of a client."""
        return float(self.num_classes_present.mean())

    @property
    def mean_exp_label_entropy(self) -> float:
        """Mean effective number of classes of a client."""
        return float(self.exp_label_entropy.mean())


def describe_partition(
    dataset: NodeDataset | GraphDataset, parts: Sequence[IntArray]
) -> PartitionSummary:
    """Compute the statistics of a partition.

    Parameters
    ----------
    dataset : NodeDataset or GraphDataset
        Partitioned dataset: its nodes, or its graphs.
    parts : sequence of K ndarray of shape (n_i,), int64
        Disjoint members of each client; they need not cover the dataset.

    Raises
    ------
    ValueError
        If two parts share a node of a dataset with edges.
    """
    kept = 1.0
    if isinstance(dataset, NodeDataset) and dataset.edge_index.shape[1]:
        owner = owner_of_nodes(dataset.num_nodes, parts)
        source, target = owner[dataset.edge_index.numpy()]
        kept = float(np.mean((source == target) & (source >= 0)))
    return PartitionSummary(
        class_counts=count_classes(parts, dataset.y.numpy(), dataset.num_classes),
        sizes=np.array([len(members) for members in parts], dtype=np.int64),
        share_edges_kept=kept,
    )
