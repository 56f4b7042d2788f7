"""Client half of FedStar: train both channels, upload the structure encoder."""

from collections.abc import Collection

from flower_fgl.algorithms.fedstar import STRUCTURE, FedStarNet
from flower_fgl.client_apps.partly_shared import PartlySharedClientApp
from flower_fgl.client_apps.runtime.client import Client

__all__ = ["FedStarClientApp"]


class FedStarClientApp(PartlySharedClientApp):
    """Keep the feature channel and the head, share the structure encoder."""

    def build(self, client: Client) -> FedStarNet:
        """Build FedStar's network with initial weights."""
        readout = client.config.graph_readout
        return client.build_own(FedStarNet, readout=readout)

    initial_model = build

    def shared_names(self, client: Client) -> Collection[str]:
        """Return the names of the structure encoder's tensors."""
        return {n for n in self.state_shapes(client) if n.startswith(STRUCTURE)}
