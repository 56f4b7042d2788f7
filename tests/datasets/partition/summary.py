"""Statistics of a partition of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flower_fgl.datasets.client_graph import GraphDataset, NodeDataset
from flower_fgl.datasets.partition.assign import count_classes, exp_label_entropy

IntArray = NDArray[np.int64]


class PartitionSummary(NamedTuple):
    """Members of each class by client, all members, and the share of edges inside."""

    class_counts: IntArray
    sizes: IntArray
    share_edges_kept: float

    @property
    def num_classes_present(self) -> IntArray:
        return (self.class_counts > 0).sum(axis=1)

    @property
    def exp_label_entropy(self) -> NDArray[np.float64]:
        return exp_label_entropy(self.class_counts)


def describe_partition(
    dataset: NodeDataset | GraphDataset, parts: Sequence[IntArray]
) -> PartitionSummary:
    """Count the members of each client, and the edges that stay within one."""
    kept = 1.0
    if isinstance(dataset, NodeDataset) and dataset.edge_index.shape[1]:
        owner = np.full(dataset.num_nodes, -1)
        for client, members in enumerate(parts):
            owner[members] = client
        source, target = owner[dataset.edge_index.numpy()]
        kept = float(np.mean((source == target) & (source >= 0)))
    return PartitionSummary(
        class_counts=count_classes(parts, dataset.y.numpy(), dataset.num_classes),
        sizes=np.array([len(members) for members in parts], dtype=np.int64),
        share_edges_kept=kept,
    )
