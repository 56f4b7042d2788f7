"""FedPer's server half, which FedRep shares: the body is averaged, heads stay away.

Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv 1912.00818,
2019.
"""

from __future__ import annotations

from torch import nn

from flower_fgl.strategies.fedavg import FedAvg, draw_model

__all__ = ["FedPer"]


class FedPer(FedAvg):
    """Average the bodies, Algorithm 2; 4·P_f bytes up and down per client.

    Notes
    -----
    1. The average weighs clients as ``weight-by`` says, as FedAvg's does.
    2. Nothing here depends on the number of classes, so that clients may have heads of
       different sizes.
    """

    def build(self, model: str) -> nn.Module:
        """Draw a backbone, and leave its head out."""
        network = draw_model(self.config, self.federation, model)
        network.classifier = nn.Identity()
        return network

    def global_state(self) -> None:
        """Return nothing: a body alone does not classify."""

    def finish(self) -> None:
        """Do nothing: every client's model is its own already."""
