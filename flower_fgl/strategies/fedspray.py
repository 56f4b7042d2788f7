"""Server half of FedSpray: average the encoders and the class proxies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flower_fgl.algorithms.fedspray import PROXIES, SprayEncoder, combine_proxies
from flower_fgl.core.config import RunConfig
from flower_fgl.core.seeds import SERVER, derive_seed, seeded
from flower_fgl.methods.fedspray import FedSpraySettings
from flower_fgl.nn import state_shapes
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.fednh import ModelAndMeans
from flower_fgl.protocols.prototypes import CountedTable
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import FedAvg

__all__ = ["FedSpray"]


class FedSpray(FedAvg):
    """Average encoder and classifiers by ``weight-by``, proxies by shares of classes.

    Notes
    -----
    1. A class that no client uploads in a round keeps its proxy; the published code
       divides 0 by 0.
    """

    config: RunConfig[FedSpraySettings]

    down = Weights
    up = ModelAndMeans

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

    def upload_spec(self, partition_id: int) -> Any:
        """Return the shapes of the encoder, and at most one proxy of each class."""
        classes, width = self.shapes[PROXIES]
        most = self.federation.clients[partition_id].num_train
        sent = {name: shape for name, shape in self.shapes.items() if name != PROXIES}
        return sent, CountedTable((classes, 1, width), most)

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Average the encoders and combine the proxies."""
        old = self.weights.tensors[PROXIES]
        super().aggregate(server_round, uploads)
        means = [upload.payload.means for upload in uploads.values()]
        clients = self.federation.clients
        new = combine_proxies(
            old,
            torch.stack([m.values[:, 0] for m in means]),
            torch.stack([m.counts[:, 0] for m in means]),
            torch.tensor([clients[pid].num_train for pid in uploads]),
        )
        mean = {**self.weights.tensors, PROXIES: new}
        self.weights = Weights({name: mean[name] for name in self.shapes})

    def global_state(self) -> None:
        """Return ``None``: the networks that classify stay with the clients."""

    def finish(self) -> None:
        """Do nothing: the clients' models are their own."""
