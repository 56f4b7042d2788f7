"""Server half of methods whose clients share some layers and keep the others."""

from abc import abstractmethod
from collections.abc import Collection

from flower_fgl.nn.models import hidden_names
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.strategies.fedavg import FedAvg, common_model

__all__ = ["HiddenLayers", "PartlyShared"]


class PartlyShared(FedAvg):
    """Average the shared tensors of a network; all others never leave the clients.

    Notes
    -----
    1. The average weights clients by ``weight-by``, as in FedAvg.
    """

    has_global = False

    @abstractmethod
    def shared_names(self, names: Collection[str]) -> Collection[str]:
        """Return the names of the shared tensors among those of the whole network."""

    def local_names(self, model: str) -> frozenset[str]:
        """Return no names: :meth:`shared_names` states what is exchanged."""
        return frozenset()

    def prepare(self) -> None:
        """Build the initial network and keep its shared tensors."""
        super().prepare()
        held, shapes = self.weights.tensors, self.shapes
        shared = self.shared_names(held.keys())
        self.weights = Weights({n: t for n, t in held.items() if n in shared})
        self.shapes = {n: shape for n, shape in shapes.items() if n in shared}


class HiddenLayers(PartlyShared):
    """Share the layers of a backbone between its input layer and its head."""

    def shared_names(self, names: Collection[str]) -> Collection[str]:
        """Return the names of these layers."""
        return hidden_names(
            common_model(self.config, self.federation),
            hidden_channels=self.config.hidden_channels,
            num_layers=self.config.num_layers,
            readout=self.config.classifies_graphs,
        )
