"""Client half of FedPer: train the received body together with the client's own head.

Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv 1912.00818,
2019.
"""

from collections.abc import Collection

from flower_fgl.client_apps.partly_shared import PartlySharedClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.nn.state import encoder_state

__all__ = ["FedPerClientApp"]


class FedPerClientApp(PartlySharedClientApp):
    """Train body and head, upload the body; the heads start from the same weights."""

    stacked = True

    def shared_names(self, client: Client) -> Collection[str]:
        """Return the names of the weights of the body."""
        return encoder_state(client.shared(client.state_shapes()))
