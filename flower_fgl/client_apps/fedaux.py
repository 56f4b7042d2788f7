"""Client half of FedAux: train weights and direction together.

Zhuo, Zhan and Yu, "FedAux", NeurIPS 2025.
"""

from __future__ import annotations

from flower_fgl.algorithms.fedaux import FedAuxNet, build_network
from flower_fgl.client_apps.own_network import OwnNetworkClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.core.seeds import SERVER, derive_seed, seeded

__all__ = ["FedAuxClientApp"]


class FedAuxClientApp(OwnNetworkClientApp):
    """Train the received network by the cross-entropy and upload all of it.

    Notes
    -----
    1. The direction is not projected to unit length. The paper's theorem projects it,
       its algorithm and the published code do not.
    2. There is no pull to the received weights, as in the code of the published log.
    """

    def build(self, client: Client) -> FedAuxNet:
        """Build FedAux's network."""
        config = client.config
        with seeded(derive_seed(config.seed, 0, SERVER, "init")):
            network = build_network(
                config.method_config,
                model=client.model_name,
                num_features=client.data.graph.num_features,
                num_classes=client.data.num_classes,
                width=config.hidden_channels,
                num_layers=config.num_layers,
                dropout=config.dropout,
            )
        return client.settle(network)
