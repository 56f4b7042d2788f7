"""Server halves of methods whose clients share some layers and keep the others."""

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from flower_fgl.algorithms.fedsst import shares
from flower_fgl.algorithms.fedstar import STRUCTURE
from flower_fgl.algorithms.gcflplus import (
    bipartition,
    dtw_distances,
    splits,
    update_norms,
)
from flower_fgl.core.config import RunConfig
from flower_fgl.methods.fedsst import FedSSTSettings
from flower_fgl.methods.gcflplus import GCFLPlusSettings
from flower_fgl.nn.models import hidden_names
from flower_fgl.nn.state import state_to_vector
from flower_fgl.protocols.fedavg import DescribedWeights, Weights
from flower_fgl.strategies.aggregation import weighted_mean
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import FedAvg, common_model, draw_model

__all__ = ["FedPer", "FedSST", "FedStar", "GCFLPlus", "HiddenLayers", "PartlyShared"]

LEAST = 3
"""Clients below which a cluster of GCFL+ does not split."""


class PartlyShared(FedAvg):
    """Average the shared tensors of a network; all others never leave the clients.

    Notes
    -----
    1. The average weights clients by ``weight-by``, as in FedAvg.
    """

    @abstractmethod
    def shared_names(self, names: Collection[str]) -> Collection[str]:
        """Return the names of the shared tensors among those of the whole network."""

    def local_names(self, model: str) -> frozenset[str]:
        """Return no names: :meth:`shared_names` states what is exchanged."""
        return frozenset()

    def prepare(self) -> None:
        """Build the initial network and keep its shared tensors."""
        super().prepare()
        held, shapes = self.weights.tensors, self.shapes
        shared = self.shared_names(held.keys())
        self.weights = Weights({n: t for n, t in held.items() if n in shared})
        self.shapes = {n: shape for n, shape in shapes.items() if n in shared}


class HiddenLayers(PartlyShared):
    """Share the layers of a backbone between its input layer and its head."""

    def shared_names(self, names: Collection[str]) -> Collection[str]:
        """Return the names of these layers."""
        return hidden_names(
            common_model(self.config, self.federation),
            hidden_channels=self.config.hidden_channels,
            num_layers=self.config.num_layers,
            readout=self.config.classifies_graphs,
        )


class FedStar(PartlyShared):
    """Average the structure encoders; features and heads stay on the clients."""

    averages_network = True

    def shared_names(self, names: Collection[str]) -> Collection[str]:
        """Return the names of the structure encoder's tensors."""
        return {name for name in names if name.startswith(STRUCTURE)}


class FedPer(FedAvg):
    """Average the bodies, Algorithm 2; 4·P_f bytes up and down per client.

    Notes
    -----
    1. The average weights clients by ``weight-by``, as in FedAvg.
    2. The body does not depend on the number of classes, so clients may have heads of
       different sizes.
    """

    def build(self, model: str) -> nn.Module:
        """Draw the initial backbone and remove its head."""
        network = draw_model(self.config, self.federation, model)
        network.classifier = nn.Identity()
        network.decoder = None
        return network


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


class FedSST(HiddenLayers):
    """Average the hidden GIN layers by weights that follow the structure signals.

    Notes
    -----
    1. A signal comes with the upload of a round and counts in the next one, so that no
       second exchange is needed. Until then a client's weight is 1/K.
    2. The mean is over the clients of the round: their weights are scaled to a sum of 1.
       They take the place of ``weight-by``.
    """

    config: RunConfig[FedSSTSettings]
    down = DescribedWeights
    up = DescribedWeights
    kept = ("signals",)

    def prepare(self) -> None:
        """Build the initial layers; all clients weigh the same."""
        super().prepare()
        self.signals: dict[int, float] = {}
        self.restored()

    def restored(self) -> None:
        """Compute the clients' weights of the next round."""
        clients = len(self.federation.trainable)
        self.equal = 1 / max(clients, len(self.signals), 1)
        if self.signals:
            found = shares(
                torch.tensor(list(self.signals.values()), dtype=torch.float64),
                self.config.method_config,
            )
            scale = len(found) * self.equal
            self.shares: dict[int, float] = {
                pid: share * scale
                for pid, share in zip(self.signals, found.tolist(), strict=True)
            }
        else:
            self.shares = {}

    def share_of(self, partition_id: int) -> float:
        """Return w_k of the next round."""
        return self.shares.get(partition_id, self.equal)

    def download(self, server_round: int, partition_id: int) -> Any:
        """Return the shared layers and the client's weight."""
        weight = torch.tensor([self.share_of(partition_id)], dtype=torch.float32)
        return DescribedWeights(self.weights.tensors, {"weight": weight})

    def upload_spec(self, partition_id: int) -> Any:
        """Return the shapes of the shared layers and of the signal."""
        return self.shapes, {"signal": (1,)}

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Average the uploads by the weights of the round, and weigh anew."""
        weights = [self.share_of(pid) for pid in uploads]
        if not sum(weights) > 0:  # all of them fell below the threshold
            weights = [1.0] * len(weights)
        mean = weighted_mean([u.payload.tensors for u in uploads.values()], weights)
        self.weights = Weights(mean)
        for pid, upload in uploads.items():
            self.signals[pid] = float(upload.payload.descriptor["signal"])
        self.signals = dict(sorted(self.signals.items()))
        self.restored()
        values = [self.share_of(pid) for pid in uploads]
        signals = self.signals.values()
        self.log(
            smallest_weight=min(values),
            largest_weight=max(values),
            smallest_signal=min(signals),
            largest_signal=max(signals),
        )
