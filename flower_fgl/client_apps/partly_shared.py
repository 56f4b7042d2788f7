"""Client half of methods whose clients share some layers and keep the others."""

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from torch import Tensor

from flower_fgl.client_apps.base import FglClientApp, Fit
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import load_state
from flower_fgl.nn import Backbone
from flower_fgl.nn.models import hidden_names
from flower_fgl.protocols.base import Payload
from flower_fgl.protocols.fedavg import Weights

__all__ = ["HiddenLayersClientApp", "PartlySharedClientApp"]


class PartlySharedClientApp(FglClientApp):
    """Train all layers, upload the shared ones, keep the others.

    The kept layers of all clients start from the same weights, drawn from the seed.
    """

    down: ClassVar[type[Payload]] = Weights
    up: ClassVar[type[Payload]] = Weights

    @abstractmethod
    def shared_names(self, client: Client) -> Collection[str]:
        """Return the names of the shared tensors in the state of the network."""

    def build(self, client: Client) -> Backbone:
        """Build the network with initial weights."""
        return client.build_model(initialise=True)

    def state_shapes(self, client: Client) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the state of the network."""
        return client.state_shapes()

    def download_spec(self, client: Client) -> Any:
        """Return the shapes of the shared tensors."""
        names = self.shared_names(client)
        shapes = self.state_shapes(client)
        return {name: shape for name, shape in shapes.items() if name in names}

    def assemble(self, client: Client, download: Any) -> Backbone:
        """Join the received layers and the client's own, or its initial ones."""
        model = self.build(client)
        load_state(model, client.state.group("model"))
        load_state(model, download.tensors)
        return model

    def shared_state(self, client: Client, model: Backbone) -> dict[str, Tensor]:
        """Return the shared tensors of the network."""
        names = self.shared_names(client)
        return {n: t.detach() for n, t in model.state_dict().items() if n in names}

    def fit(self, client: Client, server_round: int, download: Any) -> Fit:
        """Train the joined network for ``local-epochs``."""
        model = self.assemble(client, download)
        loss = client.train(model, server_round)
        return Fit(model, Weights(self.shared_state(client, model)), loss)

    def first_model(self, client: Client, download: Any) -> Backbone | None:
        """Return the received layers, joined with the initial ones."""
        return None if download is None else self.assemble(client, download)


class HiddenLayersClientApp(PartlySharedClientApp):
    """Share the layers of a backbone between its input layer and its head."""

    def shared_names(self, client: Client) -> Collection[str]:
        """Return the names of these layers."""
        return hidden_names(
            client.model_name,
            hidden_channels=client.config.hidden_channels,
            num_layers=client.config.num_layers,
            readout=client.config.classifies_graphs,
        )
