"""Server half of FedNH: average the bodies, and move the class prototypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flower_fgl.algorithms.fednh import PROTOTYPES, build_network, move_prototypes
from flower_fgl.core.config import RunConfig
from flower_fgl.methods.fednh import FedNHSettings
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.fednh import ModelAndMeans
from flower_fgl.protocols.prototypes import CountedTable
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import FedAvg, build_own

__all__ = ["FedNH"]


class FedNH(FedAvg):
    """Average bodies and scales, and move each class prototype towards its mean.

    Notes
    -----
    1. The default ``weight-by = "equal"`` averages the bodies as the published code does.
    2. A class that no client uploads in a round keeps its prototype.
    """

    config: RunConfig[FedNHSettings]

    down = Weights
    up = ModelAndMeans

    def build(self, model: str) -> nn.Module:
        """Draw the initial network and spread the prototypes."""
        return build_own(build_network, self.config, self.federation, model)

    def upload_spec(self, partition_id: int) -> Any:
        """Return the shapes of the weights, and at most one mean of each class."""
        classes, width = self.shapes[PROTOTYPES]
        most = self.federation.clients[partition_id].num_train
        sent = {
            name: shape for name, shape in self.shapes.items() if name != PROTOTYPES
        }
        return sent, CountedTable((classes, 1, width), most)

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Average the bodies and move the prototypes."""
        old = self.weights.tensors[PROTOTYPES]
        super().aggregate(server_round, uploads)
        means = [upload.payload.means for upload in uploads.values()]
        new = move_prototypes(
            old,
            torch.stack([m.values[:, 0] for m in means]),
            torch.stack([m.counts[:, 0] for m in means]),
            rho=self.config.method_config.rho,
        )
        mean = {**self.weights.tensors, PROTOTYPES: new}
        self.weights = Weights({name: mean[name] for name in self.shapes})
