"""Server half of FedTGP: train global prototypes that keep the classes apart."""

from torch import Tensor

from flower_fgl.algorithms.prototypes.universal import class_spread, topology_loss
from flower_fgl.core.config import RunConfig
from flower_fgl.methods.fedtgp import FedTGPSettings
from flower_fgl.strategies.fedproto import FedProto
from flower_fgl.strategies.prototype_trainer import PrototypeTrainer

__all__ = ["FedTGP"]

SERVER_LR = 0.01
"""Learning rate (Adam) of the global prototypes."""
MARGIN_LIMIT = 100.0
"""κ, the largest margin."""


class FedTGP(FedProto):
    """Replace FedProto's average by trained prototypes."""

    config: RunConfig[FedTGPSettings]
    kept = ("prototypes", "generator")

    def prepare(self) -> None:
        """Draw the initial table P̂ and network F."""
        super().prepare()
        self.trainer = PrototypeTrainer(
            self.table, seed=self.config.seed, is_normalised=False, lr=SERVER_LR
        )
        self.generator = self.trainer.generator
        self.optimizers = {"generator": self.trainer.optimizer}

    def combine(self, server_round: int, uploads: Tensor, counts: Tensor) -> Tensor:
        """Train for ``server-epochs`` and return P̂."""
        method_config = self.config.method_config
        margin = class_spread(uploads, counts, limit=MARGIN_LIMIT)
        members = (counts > 0)[None]  # (H, K, C, H) with one hop
        return self.trainer.train(
            method_config.server_epochs,
            lambda made: topology_loss(made, uploads, members, margin=margin),
        )
