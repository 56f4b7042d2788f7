"""Server half of FedAux: average the clients whose directions are alike."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flower_fgl.algorithms.fedaux import DIRECTION, FedAuxNet
from flower_fgl.algorithms.personal_mix import cosine_similarity, softmax_weights
from flower_fgl.core.config import RunConfig
from flower_fgl.methods.fedaux import FedAuxSettings
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import build_own
from flower_fgl.strategies.personal_mix import PersonalMix

__all__ = ["FedAux"]


class FedAux(PersonalMix):
    """Mix all weights, directions included, by the cosine of the directions.

    Notes
    -----
    1. The text of the paper recommends α = 1. The default is 10, as in its appendix, its
       tables and the published code.
    """

    config: RunConfig[FedAuxSettings]
    up = Weights

    def build(self, model: str) -> nn.Module:
        """Draw the initial network; its direction is standard normal."""
        return build_own(FedAuxNet, self.config, self.federation, model)

    def similarity(self, uploads: Sequence[Weights]) -> Tensor:
        """Return the cosines of the directions."""
        rows = [payload.tensors[DIRECTION] for payload in uploads]
        self.log(direction_norm=float(torch.stack(rows).norm(dim=1).mean()))
        return cosine_similarity(torch.stack(rows))

    def attention(self, similarity: Tensor, uploads: Sequence[Upload]) -> Tensor:
        """Return the softmax of α times the cosines."""
        equal = similarity.new_ones(len(similarity))
        scale = self.config.method_config.alpha
        return softmax_weights(similarity, equal, scale=scale)
