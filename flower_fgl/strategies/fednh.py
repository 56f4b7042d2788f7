"""Server half of FedNH: average the bodies, and move the class prototypes."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from flower_fgl.algorithms.fednh import PROTOTYPES, build_network, move_prototypes
from flower_fgl.core.config import RunConfig
from flower_fgl.methods.fednh import FedNHSettings
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.prototypes import CountedTable, LocalPrototypes
from flower_fgl.protocols.weights import ModelAndMeans
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import FedAvg, build_own

__all__ = ["FedNH", "WeightsAndMeans"]


class WeightsAndMeans(FedAvg):
    """Average weights, and combine one of them, a table, from counted class means."""

    up = ModelAndMeans
    table: ClassVar[str] = PROTOTYPES
    """Name of the table of shape (C, p)."""

    def upload_spec(self, partition_id: int) -> Any:
        """Return the shapes of the other weights, and at most one mean of each class."""
        sent = dict(self.shapes)
        classes, width = sent.pop(self.table)
        most = self.federation.clients[partition_id].num_train
        return sent, CountedTable((classes, 1, width), most)

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Average the weights and combine the means."""
        old = self.weights.tensors[self.table]
        super().aggregate(server_round, uploads)
        means, counts = LocalPrototypes.stack(u.payload.means for u in uploads.values())
        new = self.combine(old, means[:, :, 0], counts[:, :, 0], uploads)
        mean = {**self.weights.tensors, self.table: new}
        self.weights = Weights({name: mean[name] for name in self.shapes})

    @abstractmethod
    def combine(
        self, old: Tensor, means: Tensor, counts: Tensor, clients: Iterable[int]
    ) -> Tensor:
        """Return the new table of the means (K, C, p), and counts (K, C), of clients."""


class FedNH(WeightsAndMeans):
    """Average bodies and scales, and move each class prototype towards its mean.

    Notes
    -----
    1. The default ``weight-by = "equal"`` averages the bodies as the published code does.
    2. A class that no client uploads in a round keeps its prototype.
    """

    config: RunConfig[FedNHSettings]

    def build(self, model: str) -> nn.Module:
        """Draw the initial network and spread the prototypes."""
        return build_own(build_network, self.config, self.federation, model)

    def combine(
        self, old: Tensor, means: Tensor, counts: Tensor, clients: Iterable[int]
    ) -> Tensor:
        """Move the prototypes towards the means."""
        return move_prototypes(old, means, counts, rho=self.config.method_config.rho)
