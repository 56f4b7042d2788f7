"""Server half of FedSpray: average the encoders and the class proxies."""

from collections.abc import Iterable

import torch
from torch import Tensor

from flower_fgl.algorithms.fedspray import PROXIES, SprayEncoder, combine_proxies
from flower_fgl.core.config import RunConfig
from flower_fgl.core.seeds import SERVER, derive_seed, seeded
from flower_fgl.methods.fedspray import FedSpraySettings
from flower_fgl.nn import state_shapes
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.strategies.fednh import WeightsAndMeans

__all__ = ["FedSpray"]


class FedSpray(WeightsAndMeans):
    """Average encoder and classifiers by ``weight-by``, proxies by shares of classes.

    Notes
    -----
    1. A class that no client uploads in a round keeps its proxy; the published code
       divides 0 by 0.
    """

    config: RunConfig[FedSpraySettings]
    table = PROXIES
    has_global = False

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
