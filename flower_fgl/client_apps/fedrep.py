"""Client half of FedRep: train the head on a fixed body, then the body under that head.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021.

===========  ==================================================
symbol       here
===========  ==================================================
φ            the body, names that begin with ``encoder.``
h_i          the head, names that begin with ``classifier.``
τ            ``fedrep.head-epochs``, epochs instead of steps
===========  ==================================================
"""

from dataclasses import replace

from flower_fgl.client_apps.fedper import FedPerClientApp
from flower_fgl.client_apps.stacked.group import Group
from flower_fgl.core.config import RunConfig
from flower_fgl.methods.fedrep import FedRepSettings
from flower_fgl.nn import Backbone

__all__ = ["FedRepClientApp"]


class FedRepClientApp(FedPerClientApp):
    """Train head and body in turn, Algorithm 1; the rest is FedPer."""

    stacked = True

    def train_parts(self, group: Group, model: Backbone) -> list[float]:
        """Train the heads for ``head-epochs``, then the bodies; return their losses."""
        settings: FedRepSettings = group.config.method_config
        epochs = settings.head_epochs
        model.encoder.requires_grad_(requires_grad=False)
        group.train(model, epochs=epochs, purpose="head training")
        model.requires_grad_()
        for part in (model.classifier, model.decoder):
            if part is not None:
                part.requires_grad_(requires_grad=False)
        losses = group.train(model)
        model.requires_grad_()
        return losses

    def refresh_config(self, config: RunConfig) -> RunConfig:
        """Train head and body for ``final-local-epochs`` each."""
        epochs = config.final_local_epochs
        settings = replace(config.method_config, head_epochs=epochs)
        return super().refresh_config(replace(config, method_config=settings))
