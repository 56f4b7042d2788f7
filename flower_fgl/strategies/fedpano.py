"""Server half of FedPANO: average graph network, generic classifier and generator.

θ_*^g, θ_*^s and φ_* are ``encoder.*``, ``classifier.*`` and ``generator.*`` of
``FedPANO.weights``; ``FedAvg.aggregate`` computes Eq. (10).
"""

from __future__ import annotations

from torch import nn

from flower_fgl.algorithms.fedpano import SharedParts
from flower_fgl.core.config import RunConfig
from flower_fgl.methods.fedpano import FedPANOSettings
from flower_fgl.strategies.fedavg import FedAvg

__all__ = ["FedPANO"]


class FedPANO(FedAvg):
    """Average the shared parts, Eq. (10); each client keeps its own classifier.

    Notes
    -----
    1. The sums of Eq. (10) run over the participants of the round. The paper prints sums
       over all clients, although only five of them take part in a round.
    2. The size of V_i is the number of training nodes, because the losses need labels.
    """

    config: RunConfig[FedPANOSettings]

    def build(self, model: str) -> nn.Module:
        """Draw the initial shared parts."""
        config = self.config
        return SharedParts(
            model,
            in_channels=self.federation.num_features,
            hidden_channels=config.hidden_channels,
            num_classes=self.federation.num_classes,
            num_layers=config.num_layers,
            dropout=config.dropout,
            method_config=config.method_config,
        )
