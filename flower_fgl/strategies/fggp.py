"""Server half of FGGP: FedAvg, and clusters of the clients' prototypes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flower_fgl.algorithms.prototypes.graph_views import cluster_means
from flower_fgl.protocols.prototypes import Prototypes, no_prototypes
from flower_fgl.protocols.weights import ModelAndPrototypes
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import FedAvg

__all__ = ["FGGP", "cluster_by_class"]


def cluster_by_class(uploads: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Cluster the prototypes (K, C, p) of each class by FINCH, those ``present`` (K, C).

    Returns cluster means (C, K, p), zero without a cluster, and the mask (C, K) of them:
    the first m_c entries for the m_c clusters of class c.
    """
    clients, classes, width = uploads.shape
    values = uploads.new_zeros(classes, clients, width)
    found = present.new_zeros(classes, clients)
    for c in range(classes):
        if present[:, c].any():
            means = cluster_means(uploads[present[:, c], c])
            values[c, : len(means)] = means
            found[c, : len(means)] = True
    return values, found


class FGGP(FedAvg):
    """Average the models and send the cluster prototypes of every class with them.

    Notes
    -----
    1. A class that no client uploads in a round keeps its previous clusters.
    """

    down = ModelAndPrototypes
    up = ModelAndPrototypes
    kept = ("clusters",)

    def prepare(self) -> None:
        """Build the initial model and start without prototypes."""
        super().prepare()
        classes, width = self.federation.num_classes, self.config.hidden_channels
        self.table = (classes, 1, width)
        self.clusters = no_prototypes((classes, self.federation.num_partitions, width))
        self.restored()

    def restored(self) -> None:
        """Make the download of the next round."""
        self.sent = ModelAndPrototypes(self.weights.tensors, self.clusters)

    def download(self, server_round: int, partition_id: int) -> ModelAndPrototypes:
        """Return the aggregated weights and all clusters."""
        return self.sent

    def upload_spec(self, partition_id: int) -> Any:
        """Return the shapes of the weights and of one prototype per class."""
        return self.shapes, self.table

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Average the weights and cluster the prototypes."""
        old = self.clusters
        super().aggregate(server_round, uploads)
        sent = [upload.payload.prototypes for upload in uploads.values()]
        made, found = cluster_by_class(
            torch.stack([payload.values[:, 0] for payload in sent]),
            torch.stack([payload.present[:, 0] for payload in sent]),
        )
        values, present = old.values.clone(), old.present.clone()
        new = found.any(dim=1)
        values[new], present[new] = 0.0, False
        values[new, : len(sent)], present[new, : len(sent)] = made[new], found[new]
        self.clusters = Prototypes(values, present)
        self.restored()
