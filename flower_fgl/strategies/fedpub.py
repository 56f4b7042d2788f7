"""Server half of FED-PUB: a separate weighted average for each client.

=====================  ==================================================
symbol                 argument or attribute
=====================  ==================================================
o_i                    ``embeddings[i]``
S                      ``cosines(...)``
a_ij                   ``client_attention(...)[i, j]``
w_i                    ``PersonalMix.personal[i]``
τ                      ``fed-pub.tau``
=====================  ==================================================
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.model_spec import read_model
from flower_fgl.methods.fedpub import FedPubSettings
from flower_fgl.protocols.base import Shapes
from flower_fgl.protocols.weights import EmbeddedWeights
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import common_model
from flower_fgl.strategies.personal_mix import PersonalMix

__all__ = ["FedPub", "client_attention", "cosines"]


def cosines(embeddings: Tensor) -> Tensor:
    """Compute S_ij = cos(o_i, o_j) of embeddings (K, p), 0 for a zero row, Baek et al."""
    unit = F.normalize(embeddings, dim=1)
    return unit @ unit.T


def client_attention(similarity: Tensor, *, tau: float) -> Tensor:
    """Compute a_ij = e^{τ·S_ij} / Σ_l e^{τ·S_il} from S (K, K), Baek et al., Eq. (4).

    τ = 0 gives the plain mean; with large values each client keeps its own weights.
    """
    return (tau * similarity).softmax(dim=1)


class FedPub(PersonalMix):
    """Average weights of clients whose models give similar outputs on a random graph.

    Notes
    -----
    1. In the paper the server keeps the random graph. Here each client draws it from the
       run's seed, which saves sending the 4·500·d bytes of the graph.
    """

    config: RunConfig[FedPubSettings]
    up = EmbeddedWeights

    def prepare(self) -> None:
        """Build the initial model."""
        super().prepare()
        named = read_model(common_model(self.config, self.federation)).hidden_channels
        self.width = named or self.config.hidden_channels

    def upload_spec(self, partition_id: int) -> tuple[Shapes, tuple[int]]:  # type: ignore[override]
        """Return the shapes of the weights and of the embedding."""
        return self.shapes, (self.width,)

    def similarity(self, uploads: Sequence[EmbeddedWeights]) -> Tensor:
        """Return the cosines of the proxy embeddings, float32."""
        return cosines(torch.stack([payload.embedding for payload in uploads]))

    def attention(self, similarity: Tensor, uploads: Sequence[Upload]) -> Tensor:
        """Return the softmax of τ times the cosines, float32."""
        return client_attention(similarity, tau=self.config.method_config.tau)
