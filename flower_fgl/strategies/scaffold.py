"""Server halves of SCAFFOLD and FedDC: mean weights, and a control variate or change."""

from collections.abc import Mapping
from typing import Any

import torch

from flower_fgl.methods.scaffold import ScaffoldSettings
from flower_fgl.protocols.fedavg import DescribedWeights, Weights
from flower_fgl.protocols.weights import ControlledWeights
from flower_fgl.strategies.aggregation import weighted_mean
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import FedAvg

__all__ = ["FedDC", "Scaffold"]


class Scaffold(FedAvg):
    """Step along the mean change of the weights, and average the control variates.

    Notes
    -----
    1. All clients of a round count equally, as in the paper; ``weight-by`` has no effect.
    2. c changes by the sum of the changes over the number of all trainable clients, of
       which a round may sample fewer.
    """

    down = ControlledWeights
    up = DescribedWeights
    kept = ("control",)

    def prepare(self) -> None:
        """Build the initial model; c is 0."""
        super().prepare()
        held = self.weights.tensors
        self.control = {name: torch.zeros_like(t) for name, t in held.items()}
        self.restored()

    def download(self, server_round: int, partition_id: int) -> Any:
        """Return the weights and c."""
        return self.sent

    def upload_spec(self, partition_id: int) -> Any:
        """Return the shapes of the weights and of the change of c_i."""
        return self.shapes, self.shapes

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Move the weights and c."""
        payloads = [upload.payload for upload in uploads.values()]
        equal = [1.0] * len(payloads)
        mean = weighted_mean([payload.tensors for payload in payloads], equal)
        settings: ScaffoldSettings = self.config.method_config
        rate = settings.server_lr
        if rate != 1:
            old = self.weights.tensors
            mean = {
                name: old[name] + rate * (t - old[name]) for name, t in mean.items()
            }
        change = weighted_mean([payload.descriptor for payload in payloads], equal)
        share = len(payloads) / max(len(payloads), len(self.federation.trainable))
        self.weights = Weights(mean)
        self.control = {n: c + share * change[n] for n, c in self.control.items()}
        self.restored()

    def restored(self) -> None:
        """Make the download of the next round."""
        self.sent = ControlledWeights(self.weights.tensors, self.control)


class FedDC(Scaffold):
    """Send the mean of θ_i + h_i, and the mean change Δ̄ where SCAFFOLD sends c.

    Notes
    -----
    1. The weights are averaged by ``weight-by``, the changes equally.
    """

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Replace the weights and the mean change."""
        FedAvg.aggregate(self, server_round, uploads)
        changes = [upload.payload.descriptor for upload in uploads.values()]
        self.control = weighted_mean(changes, [1.0] * len(changes))
        self.restored()
