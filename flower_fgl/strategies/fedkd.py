"""Server half of FedKD: average the students, and send their mean in factors."""

from collections.abc import Mapping

import torch
from torch import Tensor

from flower_fgl.algorithms.fedkd import compress, energy_threshold
from flower_fgl.core.config import RunConfig
from flower_fgl.core.seeds import SERVER, derive_seed, seeded
from flower_fgl.methods.fedkd import FedKDSettings
from flower_fgl.nn import state_shapes
from flower_fgl.protocols.base import Shapes
from flower_fgl.protocols.weights import FactoredWeights
from flower_fgl.strategies.aggregation import weighted_mean
from flower_fgl.strategies.base import FglStrategy, Upload
from flower_fgl.strategies.fedavg import draw_model

__all__ = ["FedKD"]


class FedKD(FglStrategy):
    """Average the clients' students with equal weights.

    Notes
    -----
    1. The paper sends the factors of gradients. Here, as in later implementations, they
       are those of the weights, so that a client that missed rounds needs nothing else.
    2. The server keeps the mean of the uploads whole; each download keeps the energy of
       its round.
    """

    config: RunConfig[FedKDSettings]
    down = FactoredWeights
    up = FactoredWeights
    kept = ("mean",)

    def prepare(self) -> None:
        """Draw the initial student."""
        config = self.config
        with seeded(derive_seed(config.seed, 0, SERVER, "student")), torch.no_grad():
            student = draw_model(config, self.federation, config.method_config.student)
        self.shapes = state_shapes(student)
        self.mean: dict[str, Tensor] = dict(student.state_dict())
        self._sent: tuple[float, FactoredWeights] | None = None

    def download(self, server_round: int, partition_id: int) -> FactoredWeights:
        """Return the mean student, truncated to the energy of the round."""
        settings = self.config.method_config
        energy = energy_threshold(
            server_round,
            self.config.rounds,
            start=settings.energy_start,
            end=settings.energy_end,
        )
        if self._sent is None or self._sent[0] != energy:
            self._sent = energy, FactoredWeights(compress(self.mean, energy))
        return self._sent[1]

    def upload_spec(self, partition_id: int) -> Shapes:
        """Return the shapes of the student's weights."""
        return self.shapes

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Replace the student by the mean of the uploads."""
        payloads = [upload.payload for upload in uploads.values()]
        self.mean = weighted_mean([p.tensors for p in payloads], [1.0] * len(payloads))
        self._sent = None
        whole = sum(tensor.numel() for tensor in self.mean.values())
        sent = sum(t.numel() for p in payloads for t in p.factors.values())
        self.log(upload_share=sent / len(payloads) / whole)

    def restored(self) -> None:
        """Compress the mean student anew."""
        self._sent = None
