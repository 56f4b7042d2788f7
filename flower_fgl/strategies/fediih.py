"""Server half of FedIIH: average each factor's weights by its own similarity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from flower_fgl.algorithms.fediih import FedIIHNet, factor_similarity
from flower_fgl.algorithms.personal_mix import Part, softmax_weights
from flower_fgl.core.config import RunConfig
from flower_fgl.methods.fediih import FedIIHSettings
from flower_fgl.protocols.base import Shapes
from flower_fgl.protocols.fedavg import DescribedWeights
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import build_own
from flower_fgl.strategies.personal_mix import PersonalMix

__all__ = ["FedIIH"]


class FedIIH(PersonalMix):
    """Mix the columns of each factor by the similarity of its summaries.

    Notes
    -----
    1. A factor's block is its part of both weight matrices and of the first bias. The
       last bias is averaged with equal weights.
    2. A similarity below 0 is kept as it is.
    """

    config: RunConfig[FedIIHSettings]

    def build(self, model: str) -> nn.Module:
        """Draw the initial network."""
        return build_own(FedIIHNet, self.config, self.federation, model)

    def descriptor_shapes(self) -> Shapes:
        """Return the shape of the summaries."""
        factors = self.config.method_config.factors
        return {"mean": (factors, self.config.hidden_channels)}

    def similarity(self, uploads: Sequence[DescribedWeights]) -> Tensor:
        """Return one matrix per factor; mean and log-variance are one vector."""
        mean = torch.stack([payload.descriptor["mean"] for payload in uploads])
        return factor_similarity(mean, mean)

    def attention(self, similarity: Tensor, uploads: Sequence[Upload]) -> Tensor:
        """Return the softmax of the similarities times ``scale``."""
        equal = similarity.new_ones(similarity.shape[-1])
        scale = self.config.method_config.scale
        return softmax_weights(similarity, equal, scale=scale)

    def parts(self) -> Mapping[str, Sequence[Part]]:
        """Return the slices of each factor."""
        return factor_parts(
            self.config.method_config.factors, self.config.hidden_channels
        )


def factor_parts(factors: int, width: int) -> dict[str, list[Part]]:
    """Return which slice of each parameter belongs to which factor."""
    axes = {"encoder.weight": 0, "encoder.bias": 0, "classifier.weight": 1}
    return {
        name: [Part(f, axis, f * width, (f + 1) * width) for f in range(factors)]
        for name, axis in axes.items()
    }
