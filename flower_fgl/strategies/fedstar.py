"""Server half of FedStar: average the structure encoders."""

from collections.abc import Collection

from torch import nn

from flower_fgl.algorithms.fedstar import STRUCTURE, build_network
from flower_fgl.strategies.fedavg import build_own
from flower_fgl.strategies.partly_shared import PartlyShared

__all__ = ["FedStar"]


class FedStar(PartlyShared):
    """Average the structure encoders; features and heads stay on the clients."""

    def build(self, model: str) -> nn.Module:
        """Draw the initial network."""
        return build_own(
            build_network,
            self.config,
            self.federation,
            model,
            readout=self.config.graph_readout,
        )

    def shared_names(self, names: Collection[str]) -> Collection[str]:
        """Return the names of the structure encoder's tensors."""
        return {name for name in names if name.startswith(STRUCTURE)}
