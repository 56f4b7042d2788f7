"""F²L's server half: the client model and the adaptation module are averaged.

Wang et al., "Federated Few-shot Learning", KDD 2023.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from flower_fgl.nn import Backbone
from flower_fgl.nn.adaptation import Adaptation
from flower_fgl.protocols.f2l import ADAPTATION
from flower_fgl.seeds import SERVER, derive_seed, seeded
from flower_fgl.strategies.fedavg import FedAvg

__all__ = ["F2L"]


class F2L(FedAvg):
    """Average P + 3p² + pC + C weights, Algorithm 1."""

    def shared(self, model: Backbone) -> Mapping[str, Tensor]:
        """Return the model's weights and those of a new adaptation module."""
        with seeded(derive_seed(self.config.seed, 0, SERVER, "adaptation")):
            module = Adaptation(model.hidden_channels, self.federation.num_classes)
        added = {ADAPTATION + name: t for name, t in module.state_dict().items()}
        return {**model.state_dict(), **added}

    def global_state(self) -> Mapping[str, Tensor]:
        """Return the averaged client model, which classifies by itself."""
        tensors = self.weights.tensors
        return {n: t for n, t in tensors.items() if not n.startswith(ADAPTATION)}

    def finish(self) -> None:
        """Do nothing: clients adapt as it is."""
