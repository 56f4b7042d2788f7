"""FedIIH's network of latent factors, and the similarity of two clients' factors.

Yu et al., "FedIIH", AAAI 2025, as its published code computes it.
"""

import math
from typing import Unpack

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms.own_network import NetworkSizes
from flower_fgl.methods.fediih import FedIIHSettings
from flower_fgl.nn import Backbone, GraphInput
from flower_fgl.nn.sparse import EdgePattern

__all__ = ["FedIIHNet", "factor_similarity", "jensen_shannon", "route"]


def route(x: Tensor, pattern: EdgePattern, *, iterations: int) -> Tensor:
    """Route neighbours to factors; a layer without parameters: (N, F, p).

    Repeats R = ``iterations`` times ``q_k = softmax_k ⟨x_s^k, u_t^k⟩`` for every edge s →
    t, and ``u_t^k ← normalise(x_t^k + Σ_s q_k x_s^k)``, from u = x. Each factor of ``x``
    (N, F, p) is scaled to unit length first; ``pattern`` (N, N) has the edges at (t, s).
    An iteration takes F·(E + N·p) numbers of memory.
    """
    own = F.normalize(x, dim=2).transpose(0, 1).contiguous()  # (F, N, p)
    u = own
    for _ in range(iterations):
        pairs = list(zip(u, own, strict=True))
        share = torch.stack([pattern.dot(t, s) for t, s in pairs]).softmax(dim=0)
        sums = [pattern.matmul(q, s) for q, s in zip(share, own, strict=True)]
        u = F.normalize(own + torch.stack(sums), dim=2)
    return u.transpose(0, 1)


def jensen_shannon(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Compute ½ KL(a‖m) + ½ KL(b‖m) of all pairs of K diagonal Gaussians: (K, K).

    ``mean`` and ``log_variance`` (K, p) are float64; the value is the sum over the p
    dimensions. m is the Gaussian with the mean of the two means and of the two variances.
    m is no mixture, so that the value is not bounded by log 2.
    """
    variance = log_variance.exp()
    pooled = (variance[:, None] + variance[None]) / 2  # (K, K, p)
    offset = (mean[:, None] - mean[None]).square() / 4

    def divergence(own: Tensor) -> Tensor:
        ratio = (own + offset) / pooled
        return 0.5 * (pooled.log() - own.log() + ratio - 1).sum(dim=-1)

    to_own = divergence(variance[:, None])
    return (to_own + to_own.T) / 2  # m is that of the pair in both orders


def factor_similarity(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Compute S = 1 − JS / log 2 of each factor: (F, K, K), float64; the diagonal is 1.

    ``mean`` and ``log_variance`` (K, F, p) are the clients' summaries. S can be below 0,
    see :func:`jensen_shannon`.
    """
    found = [
        1 - jensen_shannon(m, v) / math.log(2)
        for m, v in zip(
            mean.double().unbind(1), log_variance.double().unbind(1), strict=True
        )
    ]
    return torch.stack(found)


class FedIIHNet(Backbone):
    """Linear map to F factors of width p, routing layers, linear classifier.

    With L = ``num_layers`` there are max(1, L − 2) routing layers, and 2 more (1 for L ≤
    2) for the summary. ``iterations`` is R; ``dropout`` is the rate after the first map
    and after each routing layer.
    """

    stacks = True

    def __init__(self, settings: FedIIHSettings, **sizes: Unpack[NetworkSizes]) -> None:
        nn.Module.__init__(self)
        self.readout, self.dropout = False, sizes["dropout"]
        self.factors, self.iterations = settings.factors, settings.iterations
        depth = sizes["num_layers"]
        self.num_routes = max(1, depth - 2)
        self.num_summary_routes = 2 if depth > 2 else 1
        self.hidden_channels = wide = settings.factors * sizes["width"]
        self.encoder: nn.Linear = nn.Linear(sizes["num_features"], wide)
        self.classifier: nn.Linear = nn.Linear(wide, sizes["num_outputs"])

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Return the factors of every node, of shape (N, F·p)."""
        first = graph.linear(None, self.encoder.weight, self.encoder.bias)
        h = self._dropout(F.leaky_relu(first))
        for _ in range(self.num_routes):
            h = self._dropout(F.leaky_relu(self._route(h, graph)))
        return h

    def _route(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Run a routing layer on (N, F·p), or on stacked clients (K, n, F·p)."""
        x = h.reshape(-1, self.factors, h.shape[-1] // self.factors)
        pattern = graph.topology.pattern()
        return route(x, pattern, iterations=self.iterations).reshape(h.shape)

    def summary(
        self, h: Tensor, graph: GraphInput, real: Tensor | None = None
    ) -> Tensor:
        """Return the mean (F, p) over the nodes after further routing layers.

        That of stacked clients is (K, F, p), over the rows (K, n) that are ``real``.
        """
        for _ in range(self.num_summary_routes):
            h = self._route(h, graph)
        if real is None:
            mean = h.mean(dim=0)
        else:
            mean = (h * real[..., None]).sum(dim=-2) / real.sum(dim=-1, keepdim=True)
        return mean.view(*mean.shape[:-1], self.factors, -1)
