"""FedPANO's server half: graph network, generic classifier and generator are averaged.

Zhao et al., "Personalized federated few-shot node classification", Sci China Inf Sci
68(1):112105, 2025.

===============================  ==================================================
symbol                           argument or attribute
===============================  ==================================================
θ_*^g, θ_*^s, φ_*                ``encoder.*``, ``classifier.*``, ``generator.*`` of
                                 ``FedPANO.weights``
size of V_i                      ``Upload.num_examples``, by ``weight-by``
===============================  ==================================================

===============================================  ===========================
Algorithm 1, server                              function
===============================================  ===========================
initialise θ_*^g, θ_*^s, φ_*                     ``FedPANO.build``
aggregate by Eq. (10)                            ``FedAvg.aggregate``
===============================================  ===========================
"""

from __future__ import annotations

from torch import nn

from flower_fgl.algorithms.fedpano.shared import SharedParts
from flower_fgl.strategies.fedavg import FedAvg

__all__ = ["FedPANO"]


class FedPANO(FedAvg):
    """Average what the clients share, Eq. (10); their classifiers never leave them.

    Notes
    -----
    1. The sums of Eq. (10) run over the participants of the round, the printed ones over
       all clients, of which only five take part.
    2. The size of V_i is the number of training nodes: losses need labels.
    """

    def build(self, model: str) -> nn.Module:
        """Draw the parts that are shared."""
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

    def global_state(self) -> None:
        """Return nothing: classifiers are the clients' own."""

    def finish(self) -> None:
        """Do nothing: every client's model is its own already."""
