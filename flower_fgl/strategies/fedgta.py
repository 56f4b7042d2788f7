"""Server half of FedGTA: average the clients whose label moments are alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flower_fgl.algorithms.personal_mix import cosine_similarity, threshold_weights
from flower_fgl.core.config import RunConfig
from flower_fgl.methods.fedgta import FedGTASettings
from flower_fgl.protocols.base import Shapes
from flower_fgl.protocols.weights import MomentWeights
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.personal_mix import PersonalMix

__all__ = ["FedGTA"]


class FedGTA(PersonalMix):
    """Average each client with its partners, weighted by their confidence.

    Notes
    -----
    1. Two clients are partners if the cosine of their moments is at least ε; the
       published code asks for more than ε.
    2. A client without edges has confidence 0: it keeps its own model, and its partners
       do not count it.
    3. A confidence below 0 counts as 0. Clients report it, so a client can raise its own
       weight.
    """

    config: RunConfig[FedGTASettings]
    up = MomentWeights

    def descriptor_shapes(self) -> Shapes:
        """Return the shapes of moments and confidence."""
        settings = self.config.method_config
        rows = settings.orders * (2 if settings.moments == "hybrid" else 1)
        return {"moments": (rows, self.federation.num_classes), "confidence": (1,)}

    def similarity(self, uploads: Sequence[MomentWeights]) -> Tensor:
        """Return the cosines of the moments."""
        rows = [payload.descriptor["moments"].flatten() for payload in uploads]
        return cosine_similarity(torch.stack(rows))

    def attention(self, similarity: Tensor, uploads: Sequence[Upload]) -> Tensor:
        """Return the confidence of the partners, in shares."""
        found = [upload.payload.descriptor["confidence"] for upload in uploads]
        confidence = torch.cat(found).double().clamp(min=0)
        # without partners a client keeps its own model
        similarity = similarity.where(confidence[:, None] > 0, -torch.inf)
        return threshold_weights(
            similarity, confidence, least=self.config.method_config.threshold
        )
