"""Statistics of a partition: client sizes, share of edges kept, label skew."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PartitionSummary"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PartitionSummary:
    """Statistics of a partition.

    ``class_counts`` (K, C) are the nodes (or graphs) of each class on each client,
    without those of unknown class, and ``sizes`` (K,) all of them. ``share_edges_kept``
    in [0, 1] is the share of edges with both ends on one client; 1 for a dataset
    without edges.
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
