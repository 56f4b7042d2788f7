"""Server half of GCFL+: clusters of clients that split when a client leaves the mean.

================================================  ==========================
Algorithm 1, server                               function
================================================  ==========================
norms of the updates, Eq. (5)                     ``update_norms``, ``splits``
distances of the series                           ``dtw_distances``
minimum cut                                       ``bipartition``
================================================  ==========================
"""

from collections.abc import Mapping
from typing import Any

import torch

from flower_fgl.algorithms.gcflplus import (
    bipartition,
    dtw_distances,
    splits,
    update_norms,
)
from flower_fgl.core.config import RunConfig
from flower_fgl.methods.gcflplus import GCFLPlusSettings
from flower_fgl.nn.state import state_to_vector
from flower_fgl.protocols.fedavg import DescribedWeights, Weights
from flower_fgl.strategies.aggregation import weighted_mean
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.partly_shared import HiddenLayers

__all__ = ["GCFLPlus"]

LEAST = 3
"""Clients below which a cluster does not split."""


class GCFLPlus(HiddenLayers):
    """Average the hidden layers inside each cluster, and split clusters.

    Notes
    -----
    1. The norms are those of the clients that a round sampled. A split assigns all
       members of the cluster by their series, absent ones too.
    2. A client without an upload gets the model of the first cluster.
    3. A cluster splits only when the series of all clients that ever uploaded are long
       enough. After a split all series start again.
    """

    config: RunConfig[GCFLPlusSettings]
    up = DescribedWeights
    kept = ("clusters", "members", "series")

    def prepare(self) -> None:
        """Build the initial model of the only cluster."""
        super().prepare()
        self.clusters = [self.weights.tensors]
        self.members: dict[int, int] = {}
        self.series: dict[int, list[float]] = {}

    def download(self, server_round: int, partition_id: int) -> Weights:
        """Return the model of the client's cluster."""
        return Weights(self.clusters[self.members.get(partition_id, 0)])

    def upload_spec(self, partition_id: int) -> Any:
        """Return the shapes of the shared layers and of the norm."""
        return self.shapes, {"norm": (1,)}

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Split clusters, then average inside each."""
        for pid, upload in uploads.items():
            self.members.setdefault(pid, 0)
            norm = float(upload.payload.descriptor["norm"])
            self.series[pid] = [*self.series.get(pid, []), norm]
        is_late = server_round > self.config.method_config.warmup
        norms = [
            self.split(cluster, uploads, is_late=is_late)
            for cluster in range(len(self.clusters))
        ]
        for cluster in range(len(self.clusters)):
            here = [up for p, up in uploads.items() if self.members[p] == cluster]
            if here:
                self.clusters[cluster] = weighted_mean(
                    [upload.payload.tensors for upload in here],
                    [upload.num_examples for upload in here],
                )
        sizes = torch.bincount(torch.tensor(list(self.members.values())))
        means, largest = zip(*(pair for pair in norms if pair), strict=True)
        self.log(
            clusters=len(self.clusters),
            largest_cluster=float(sizes.max()),
            update_mean=min(means),
            update_largest=max(largest),
        )

    def split(
        self, cluster: int, uploads: Mapping[int, Upload], *, is_late: bool
    ) -> tuple[float, float] | None:
        """Split a cluster in two if its updates ask for it; return their norms."""
        settings = self.config.method_config
        start = state_to_vector(self.clusters[cluster])
        updates = [
            state_to_vector(upload.payload.tensors) - start
            for pid, upload in uploads.items()
            if self.members[pid] == cluster
        ]
        if not updates:
            return None
        mean, largest = update_norms(torch.stack(updates))
        members = [pid for pid, c in sorted(self.members.items()) if c == cluster]
        is_known = all(len(s) >= settings.length for s in self.series.values())
        can_split = is_late and is_known and len(members) >= LEAST
        if can_split and splits(mean, largest, eps1=settings.eps1, eps2=settings.eps2):
            last = [self.series[pid][-settings.length :] for pid in members]
            _, leaving = bipartition(dtw_distances(torch.tensor(last)))
            self.members |= {members[i]: len(self.clusters) for i in leaving}
            self.clusters.append(self.clusters[cluster])
            self.series = {pid: [] for pid in self.series}
        return mean, largest
