"""Server half of F²L: average the client model and the adaptation module."""

from collections.abc import Mapping

from torch import Tensor, nn

from flower_fgl.algorithms.f2l import Adaptation
from flower_fgl.methods.f2l import ADAPTATION
from flower_fgl.strategies.fedavg import FedAvg, draw_model

__all__ = ["F2L"]


class F2L(FedAvg):
    """Average P + 3p² + pC + C weights, Algorithm 1."""

    def build(self, model: str) -> nn.Module:
        """Draw the initial client model and the adaptation module."""
        network = draw_model(self.config, self.federation, model)
        module = Adaptation(network.hidden_channels, self.federation.num_classes)
        network.add_module(ADAPTATION.rstrip("."), module)
        return network

    def global_state(self) -> Mapping[str, Tensor]:
        """Return the averaged client model, which classifies without the module."""
        tensors = self.weights.tensors
        return {n: t for n, t in tensors.items() if not n.startswith(ADAPTATION)}
