"""Server halves of FedNH and FedSpray: average the bodies, and combine class means."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from flower_fgl.algorithms.fednh import PROTOTYPES, move_prototypes
from flower_fgl.algorithms.fedspray import PROXIES, SprayEncoder, combine_proxies
from flower_fgl.core.config import RunConfig
from flower_fgl.core.seeds import SERVER, derive_seed, seeded
from flower_fgl.methods.fednh import FedNHSettings
from flower_fgl.methods.fedspray import FedSpraySettings
from flower_fgl.nn import state_shapes
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.prototypes import CountedTable, LocalPrototypes
from flower_fgl.protocols.weights import ModelAndMeans
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import FedAvg

__all__ = ["FedNH", "FedSpray", "WeightsAndMeans"]


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
    averages_network = True

    def combine(
        self, old: Tensor, means: Tensor, counts: Tensor, clients: Iterable[int]
    ) -> Tensor:
        """Move the prototypes towards the means."""
        return move_prototypes(old, means, counts, rho=self.config.method_config.rho)


class FedSpray(WeightsAndMeans):
    """Average encoder and classifiers by ``weight-by``, proxies by shares of classes.

    Notes
    -----
    1. A class that no client uploads in a round keeps its proxy; the published code
       divides 0 by 0.
    """

    config: RunConfig[FedSpraySettings]
    table = PROXIES

    def prepare(self) -> None:
        """Draw the initial encoder; the clients' networks may differ."""
        with seeded(derive_seed(self.config.seed, 0, SERVER, "init")):
            encoder = SprayEncoder(
                self.federation.num_features,
                self.federation.num_classes,
                self.config.method_config.width,
            )
        state = encoder.state_dict()
        self.weights = Weights({name: t.detach() for name, t in state.items()})
        self.shapes = state_shapes(encoder)

    def combine(
        self, old: Tensor, means: Tensor, counts: Tensor, clients: Iterable[int]
    ) -> Tensor:
        """Combine the proxies."""
        sizes = [self.federation.clients[pid].num_train for pid in clients]
        return combine_proxies(old, means, counts, torch.tensor(sizes))
