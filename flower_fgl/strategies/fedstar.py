"""Server half of FedStar: average the structure encoders.

Tan et al., "Federated Learning on Non-IID Graphs via Structural Knowledge Sharing",
AAAI 2023.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from flower_fgl.algorithms.fedstar import STRUCTURE, build_network
from flower_fgl.strategies.partly_shared import PartlyShared

__all__ = ["FedStar"]


class FedStar(PartlyShared):
    """Average the structure encoders; features and heads stay on the clients."""

    def build(self, model: str) -> nn.Module:
        """Draw the initial network."""
        return build_network(
            self.config.method_config,
            model=model,
            num_features=self.federation.num_features,
            num_classes=self.federation.num_classes,
            width=self.config.hidden_channels,
            num_layers=self.config.num_layers,
            dropout=self.config.dropout,
            readout=self.config.classifies_graphs,
        )

    def shared_names(self, names: Collection[str]) -> Collection[str]:
        """Return the names of the structure encoder's tensors."""
        return {name for name in names if name.startswith(STRUCTURE)}
