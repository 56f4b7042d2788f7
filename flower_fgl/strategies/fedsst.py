"""Server half of FedSST: weights of the clients from their structure signals."""

from collections.abc import Mapping
from typing import Any

import torch

from flower_fgl.algorithms.fedsst import shares
from flower_fgl.core.config import RunConfig
from flower_fgl.methods.fedsst import FedSSTSettings
from flower_fgl.protocols.fedavg import DescribedWeights, Weights
from flower_fgl.strategies.aggregation import weighted_mean
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.partly_shared import HiddenLayers

__all__ = ["FedSST"]


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
