"""Client half that trains a network of the method's own, and else works as FedAvg's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import load_state
from flower_fgl.nn import Backbone, state_shapes
from flower_fgl.protocols.fedavg import Weights

__all__ = ["OwnNetworkClientApp"]


class OwnNetworkClientApp(FedAvgClientApp):
    """Train the received weights of the method's network and upload all of them."""

    @abstractmethod
    def build(self, client: Client) -> Backbone:
        """Build the network on the client's device; its weights are overwritten."""

    def download_spec(self, client: Client) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the network's state."""
        key = ("own-network", client.model_name, client.config.method_config)
        return client.cached(key, lambda: state_shapes(self.build(client)))

    def empty_model(self, client: Client) -> Backbone:
        """Build the method's network."""
        return self.build(client)

    def personal_model(
        self, client: Client, download: Weights | None
    ) -> Backbone | None:
        """Return the model trained last, or the received one before the first training."""
        saved = client.state.group("model")
        state = saved or (None if download is None else download.tensors)
        if state is None:
            return None
        model = self.build(client)
        load_state(model, state)
        return model
