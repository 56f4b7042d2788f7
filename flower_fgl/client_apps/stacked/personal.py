"""Stacked forms of local training, FedPer and FedRep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flower_fgl.client_apps.stacked.averaging import weights_of
from flower_fgl.client_apps.stacked.cohort import Cohort
from flower_fgl.client_apps.stacked.half import StackedFit, StackedHalf
from flower_fgl.nn import Backbone
from flower_fgl.nn.body_head import classifier_state, encoder_state
from flower_fgl.protocols.base import Empty

__all__ = ["StackedFedPer", "StackedFedRep", "StackedLocal"]


class StackedLocal(StackedHalf):
    """Continue training from each client's own last weights."""

    def fit(self, cohort: Cohort, downloads: Sequence[Any]) -> StackedFit:
        """Train for another ``local-epochs``."""
        initial = cohort.initial_state()
        model = cohort.build_model([own or initial for own in cohort.stored_models()])
        losses = cohort.train(model)
        return StackedFit(model, [Empty()] * len(cohort), losses)


class StackedFedPer(StackedHalf):
    """Train body and head, upload the body, keep the head."""

    def fit(self, cohort: Cohort, downloads: Sequence[Any]) -> StackedFit:
        """Join the received body and each client's head, and train."""
        initial = cohort.initial_state()
        states = [
            {**initial, **classifier_state(own), **download.tensors}
            for own, download in zip(cohort.stored_models(), downloads, strict=True)
        ]
        model = cohort.build_model(states)
        losses = self.train_parts(cohort, model)
        return weights_of(model, encoder_state(model.state_dict()), losses)

    def train_parts(self, cohort: Cohort, model: Backbone) -> list[float]:
        """Train body and head jointly; return the losses."""
        return cohort.train(model)


class StackedFedRep(StackedFedPer):
    """Train head and body in turn."""

    def train_parts(self, cohort: Cohort, model: Backbone) -> list[float]:
        """Train the heads for ``head-epochs``, then the bodies; return their losses."""
        epochs = cohort.config.method_config.head_epochs
        model.encoder.requires_grad_(requires_grad=False)
        cohort.train(model, epochs=epochs, purpose="head training")
        model.requires_grad_()
        model.classifier.requires_grad_(requires_grad=False)
        losses = cohort.train(model)
        model.requires_grad_()
        return losses
