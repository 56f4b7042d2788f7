"""Client half of FedPer: train the received body together with the client's own head.

Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv 1912.00818,
2019.
"""

from __future__ import annotations

from collections.abc import Mapping

from flower_fgl.client_apps.base import FglClientApp, Fit
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import load_state
from flower_fgl.nn import Backbone
from flower_fgl.nn.body_head import classifier_state, encoder_state
from flower_fgl.protocols.fedavg import Weights

__all__ = ["FedPerClientApp"]


class FedPerClientApp(FglClientApp):
    """Train body and head, upload the body, keep the head.

    Notes
    -----
    1. The heads of all clients start from the same weights, drawn once from the seed.
    """

    stacked = "flower_fgl.client_apps.stacked.personal:StackedFedPer"
    down = Weights
    up = Weights

    def download_spec(self, client: Client) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the weights of the body."""
        return encoder_state(client.shared(client.state_shapes()))

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Join the received body and the client's head, and train for ``local-epochs``."""
        model = self.assemble(client, download)
        loss = self.train_parts(client, model, server_round)
        state = client.shared(model.state_dict())
        return Fit(model, Weights(encoder_state(state)), loss)

    def assemble(self, client: Client, download: Weights) -> Backbone:
        """Combine the received body with the client's head, or with the initial one."""
        model = client.build_model(initialise=True)
        own, kept = client.state.group("model"), client.local_names()
        load_state(model, classifier_state(own))
        load_state(model, {name: t for name, t in own.items() if name in kept})
        load_state(model, download.tensors)
        return model

    def train_parts(self, client: Client, model: Backbone, server_round: int) -> float:
        """Train body and head jointly; return the loss."""
        return client.train(model, server_round)

    def personal_model(
        self, client: Client, download: Weights | None
    ) -> Backbone | None:
        """Return the model trained last, or the received body with the initial head."""
        own = super().personal_model(client, download)
        if own is not None or download is None:
            return own
        return self.assemble(client, download)
