"""Stacked form of MOON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.stacked.averaging import weights_of
from flower_fgl.client_apps.stacked.cohort import Cohort
from flower_fgl.client_apps.stacked.half import StackedFit, StackedHalf
from flower_fgl.nn.embedding_recorder import RecordingBackbone

__all__ = ["StackedMoon"]


class StackedMoon(StackedHalf):
    """Train towards the received models' embeddings, away from the previous models'."""

    def key(self, client: Client) -> bool:
        """Separate clients in their first round: they have no previous model."""
        return any(name.startswith("model/") for name in client.state.tensors)

    def fit(self, cohort: Cohort, downloads: Sequence[Any]) -> StackedFit:
        """Train from the received weights with the contrastive term."""
        received = [download.tensors for download in downloads]
        model = RecordingBackbone(cohort.build_model(received))
        term = None
        if self.key(cohort.clients[0]) and cohort.config.method_config.mu:
            term = self.contrast(cohort, model)
        losses = cohort.train(model, penalty=term)
        return weights_of(model.backbone, model.backbone.state_dict(), losses)

    def contrast(
        self, cohort: Cohort, model: RecordingBackbone
    ) -> Callable[[], Tensor]:
        """Return μ times the contrastive term; ``model`` holds the received weights."""
        settings = cohort.config.method_config
        rows = cohort.rows if settings.nodes == "train" else cohort.data.all_rows()
        before = RecordingBackbone(cohort.build_model(cohort.stored_models()))
        frozen = [
            F.normalize(rows.pick(m.at_rest(cohort.inputs)), dim=1)
            for m in (model, before)
        ]
        towards = frozen[0] - frozen[1]

        def term() -> Tensor:
            z = F.normalize(rows.pick(model.embedding), dim=1)
            nearer = (z * towards).sum(dim=1)
            return float(settings.mu) * rows.mean(F.softplus(-nearer / settings.tau))

        return term
