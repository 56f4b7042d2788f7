"""Server half of FedTGP: train global prototypes that keep the classes apart."""

from __future__ import annotations

from torch import Tensor

from flower_fgl.algorithms.prototypes.universal import class_spread, topology_loss
from flower_fgl.core.config import RunConfig
from flower_fgl.methods.fedtgp import FedTGPSettings
from flower_fgl.runs.checkpoints import Snapshot
from flower_fgl.strategies.fedproto import FedProto
from flower_fgl.strategies.prototype_trainer import (
    PrototypeTrainer,
    load_training,
    training_state,
)

__all__ = ["FedTGP"]

SERVER_LR = 0.01
"""Learning rate (Adam) of the global prototypes."""
MARGIN_LIMIT = 100.0
"""κ, the largest margin."""


class FedTGP(FedProto):
    """Replace FedProto's average by trained prototypes."""

    config: RunConfig[FedTGPSettings]

    def prepare(self) -> None:
        """Draw the initial table P̂ and network F."""
        super().prepare()
        self.trainer = PrototypeTrainer(
            self.table, seed=self.config.seed, is_normalised=False, lr=SERVER_LR
        )

    def combine(self, server_round: int, uploads: Tensor, counts: Tensor) -> Tensor:
        """Train for ``server-epochs`` and return P̂."""
        method_config = self.config.method_config
        margin = class_spread(uploads, counts, limit=MARGIN_LIMIT)
        members = (counts > 0)[None]  # (H, K, C, H) with one hop
        return self.trainer.train(
            method_config.server_epochs,
            lambda made: topology_loss(made, uploads, members, margin=margin),
        )

    def server_state(self) -> Snapshot:
        """Return the prototypes, the network and Adam's moments."""
        return Snapshot.join(
            {
                "prototypes": super().server_state(),
                "trainer": training_state(
                    self.trainer.generator, self.trainer.optimizer
                ),
            }
        )

    def load_server_state(self, state: Snapshot) -> None:
        """Restore the prototypes, the network and Adam's moments."""
        super().load_server_state(state.part("prototypes"))
        load_training(
            self.trainer.generator, self.trainer.optimizer, state.part("trainer")
        )
