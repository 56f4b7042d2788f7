"""FedSST's structure signal, and the weights, epochs and fusion that follow from it.

"FedSST", CVPR 2026, by a detailed note on the paper. The note gives the formulas but not
all constants, see :class:`~flower_fgl.methods.fedsst.FedSSTSettings`.
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.methods.fedsst import FedSSTSettings
from flower_fgl.nn import GIN, GraphInput

__all__ = ["epochs_for", "first_layer", "fuse", "fusion_share", "probe_graph"]
__all__ += ["relative_signals", "shares", "structure_signal"]

NODES = 20
"""n, nodes of the probe."""
DEGREE = 3.0
"""Mean degree of the probe."""
HOMOPHILY = 0.75
"""Expected share of the probe's edges inside a class."""
TINY = 1e-8


def probe_graph(width: int, mu: float, generator: torch.Generator) -> GraphInput:
    """Draw the probe: a contextual block model of two classes of equal size, 20 nodes.

    ``x_i = √(μ/n)·y_i·u + Z_i/√p``, y_i = ±1, u and Z_i standard normal, p = ``width``,
    and ``mu`` the strength of the class in the features. The first half has class 1.
    """
    half = NODES // 2
    inside = DEGREE * HOMOPHILY / (half - 1)
    across = DEGREE * (1 - HOMOPHILY) / half
    label = torch.ones(NODES)
    label[half:] = -1
    chance = torch.where(label[:, None] == label, inside, across)
    upper = (torch.rand(NODES, NODES, generator=generator) < chance).triu(1)
    u = torch.randn(width, generator=generator)
    z = torch.randn(NODES, width, generator=generator)
    x = math.sqrt(mu / NODES) * label[:, None] * u + z / math.sqrt(width)
    return GraphInput(x, (upper | upper.T).nonzero().T.contiguous())


def first_layer(network: GIN, probe: GraphInput) -> Tensor:
    """Return the output (n, p) of the first GIN layer after ReLU, for the probe.

    Notes
    -----
    1. The first linear map of the layer is the client's own input layer, whose width is
       that of its features. The probe, of the hidden width, enters behind it: its sums over
       the neighbours take the place of the mapped ones.
    """
    encoder: list[torch.nn.Module] = list(network.encoder.children())
    mlp = list(encoder[0].nn.children())  # type: ignore[union-attr]
    h = probe.x + probe.propagate(probe.x, "sum")
    for layer in mlp[1:]:
        h = layer(h)
    return h.relu()


def structure_signal(hidden: Tensor) -> Tensor:
    """Compute q = dᵀLd / (dᵀd + 1e-8) of the similarity graph of the rows.

    S = HHᵀ for rows of unit length, d = S·1, L = diag(d) − S. H is ``hidden`` (n, p); a
    row of zeros stays zero. q is 0 if all rows point in one direction.
    """
    unit = F.normalize(hidden, dim=1)
    similarity = unit @ unit.T
    degree = similarity.sum(dim=1)
    rough = degree @ (degree * degree - similarity @ degree)
    return rough / (degree @ degree + TINY)


def relative_signals(signals: Tensor) -> Tensor:
    """Return x_k = (q_k − min q)/(max q − min q + 1e-8), of shape (K,)."""
    low, high = signals.aminmax()
    return (signals - low) / (high - low + TINY)


def shares(signals: Tensor, settings: FedSSTSettings) -> Tensor:
    """Compute the weights w_k of the clients: (K,).

    ``score_k = b + λ_f(1 − e^{−κ x_k}) + λ_m exp(−(x_k − ½)²/(2σ²))``, w_k its share of
    the sum. Scores below the threshold count 0; all weights are equal if no score reaches
    it. ``signals`` (K,) are q_k, and ``settings`` the constants.
    """
    x = relative_signals(signals)
    rising = 1 - (-settings.rise_rate * x).exp()
    middle = (-(x - 0.5).square() / (2 * settings.middle_width**2)).exp()
    score = (
        settings.base + settings.rise_weight * rising + settings.middle_weight * middle
    )
    score = score * (score >= settings.threshold)
    if not score.sum() > 0:
        score = torch.ones_like(score)
    return score / score.sum()


def epochs_for(share: float, base: int, settings: FedSSTSettings) -> int:
    """Return E_k = max(E_min, min(round(E_base(1 + λ_reg w_k)), E_max))."""
    found = round(base * (1 + settings.epoch_rate * share))
    return max(settings.min_epochs, min(found, settings.max_epochs))


def fusion_share(share: float, settings: FedSSTSettings) -> float:
    """Return α_k = α_min + (α_max − α_min)·w_k for w_k = ``share``."""
    return settings.min_fusion + (settings.max_fusion - settings.min_fusion) * share


def fuse(received: Tensor, trained: Tensor, alpha: float) -> Tensor:
    """Return α_k·w + (1 − α_k)·θ_k of two tensors of one shape."""
    return alpha * received + (1 - alpha) * trained
