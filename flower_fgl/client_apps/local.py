"""Client half of local training: every client trains alone and uploads nothing."""

from __future__ import annotations

from flower_fgl.client_apps.base import FglClientApp, Fit
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.nn import Backbone
from flower_fgl.protocols.base import Empty

__all__ = ["LocalClientApp"]


class LocalClientApp(FglClientApp):
    """Continue training from the client's own last weights.

    Notes
    -----
    1. All clients of one backbone start from the same weights, as with FedAvg.
    """

    stacked = "flower_fgl.client_apps.stacked.personal:StackedLocal"
    down = Empty
    up = Empty

    def fit(self, client: Client, server_round: int, download: Empty) -> Fit:
        """Train for another ``local-epochs``."""
        model = self.personal_model(client, download)
        loss = client.train(model, server_round)
        return Fit(model, Empty(), loss)

    def personal_model(self, client: Client, download: Empty | None) -> Backbone:
        """Return the model trained last, or the initial one before the first training."""
        own = super().personal_model(client, download)
        return own if own is not None else client.build_model(initialise=True)
