"""Server half of FedDC: average the corrected weights, and the changes of a round."""

from collections.abc import Mapping

from flower_fgl.protocols.weights import ControlledWeights
from flower_fgl.strategies.aggregation import weighted_mean
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import FedAvg
from flower_fgl.strategies.scaffold import Scaffold

__all__ = ["FedDC"]


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
        self.sent = ControlledWeights(self.weights.tensors, self.control)
