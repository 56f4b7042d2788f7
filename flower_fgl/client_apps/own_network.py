"""Client half that trains a network of the method's own, and else works as FedAvg's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.nn import Backbone, state_shapes

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
