"""DENSE's generator of features, its losses, and the graph of generated nodes.

Zhang et al., "DENSE: Data-Free One-Shot Federated Learning", NeurIPS 2022. The paper
generates images; here the generator makes the features of nodes, and their edges lead to
the nearest neighbours.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms.fedgen import divergence_terms

__all__ = ["FeatureGenerator", "disagreement", "ensemble_logits", "nearest_neighbors"]
__all__ += ["student_loss"]

SLOPE = 0.2
"""Slope of the generator's activation below 0."""
SPREAD = 0.02
"""Standard deviation of the generator's initial weights."""


class FeatureGenerator(nn.Module):
    """Noise becomes features of nodes: three linear layers with BatchNorm between.

    Notes
    -----
    1. Every generated row has the length ``length``. The paper's images have bounded
       values. Without a bound the generator would grow the features of nodes until the
       student's training diverges.
    """

    def __init__(
        self,
        noise_channels: int,
        hidden_channels: int,
        num_features: int,
        length: float = 1.0,
    ) -> None:
        super().__init__()
        self.length = length
        self.layers = nn.Sequential(
            nn.Linear(noise_channels, hidden_channels),
            nn.BatchNorm1d(hidden_channels),
            nn.LeakyReLU(SLOPE),
            nn.Linear(hidden_channels, hidden_channels),
            nn.BatchNorm1d(hidden_channels),
            nn.LeakyReLU(SLOPE),
            nn.Linear(hidden_channels, num_features),
        )

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """Draw all weights anew: N(0, 0.02), BatchNorm's around 1, biases 0."""
        for layer in self.layers:
            if isinstance(layer, nn.Linear | nn.BatchNorm1d):
                mean = 1.0 if isinstance(layer, nn.BatchNorm1d) else 0.0
                layer.weight.normal_(mean, SPREAD, generator=generator)
                layer.bias.zero_()

    def forward(self, noise: Tensor) -> Tensor:
        """Return features (b, d) of noise (b, e)."""
        return self.length * F.normalize(self.layers(noise), dim=1)


@torch.no_grad()
def nearest_neighbors(features: Tensor, k: int) -> Tensor:
    """Connect each row of (n, d) with the ``k`` most similar by cosine, no gradient.

    Returns each edge (2, E) in both directions, once, without self-loops: operators of
    backbones that have them add their own.
    """
    unit = F.normalize(features, dim=1)
    similarity = (unit @ unit.T).fill_diagonal_(-torch.inf)
    size = len(features)
    nearest = similarity.topk(min(k, size - 1), dim=1).indices
    chosen = torch.zeros(size, size, dtype=torch.bool, device=features.device)
    chosen.scatter_(1, nearest, True)
    return (chosen | chosen.T).nonzero().T.contiguous()


def ensemble_logits(logits: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_k a_k z_k of logits (K, b, C) and weights (K,)."""
    return torch.einsum("k,kbc->bc", weights, logits)


def disagreement(ensemble: Tensor, student: Tensor) -> Tensor:
    """Compute KL(D(x) ‖ f_S(x)) of nodes on which both predict another class.

    ``ensemble`` (b, C) are the logits D(x), the weighted mean of the clients', and
    ``student`` (b, C) f_S(x); the mean is over all b nodes.
    """
    divergence = divergence_terms(student, ensemble).sum(dim=1)
    return (divergence * (ensemble.argmax(dim=1) != student.argmax(dim=1))).mean()


def student_loss(student: Tensor, ensemble: Tensor, tau: float) -> Tensor:
    """Compute τ²·KL(softmax(D/τ) ‖ softmax(f_S/τ)) of logits (b, C), mean over nodes."""
    return tau**2 * divergence_terms(student, ensemble, tau=tau).sum(dim=1).mean()
