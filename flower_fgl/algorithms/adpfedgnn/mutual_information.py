"""Mutual information of the two branches by CLUB, Cheng et al., ICML 2020."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["MIEstimator", "club_bound", "residual_loss"]


class MIEstimator(nn.Module):
    """Networks f_μ and f_σ that predict local features of width H from global features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = max(1, width // 2)
        self.mean = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)
        )
        self.log_variance = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.Tanh()
        )

    def forward(self, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Predict μ and log σ² of the local features, both (B, H), ADPFedGNN Eq. (7).

        From h^g (B, H), unit length; log σ² is within [−1, 1].
        """
        return self.mean(shared), self.log_variance(shared)


def club_bound(
    mean: Tensor, log_variance: Tensor, local: Tensor, *, norm: str = "mean"
) -> Tensor:
    """Bound the mutual information of global and local features, ADPFedGNN Eq. (6).

    ``mean`` and ``log_variance`` (B, H) are μ and log σ² of each node, and ``local`` (B,
    H) is h^l, unit length. ``norm`` is CLUB's estimate (``mean``), or the sums as printed
    (``literal``). The bound is at least 0.

    Notes
    -----
    1. The paper prints a sum over the terms of other nodes. This is B − 1 times too large
       for a bound, and its scale depends on the batch. CLUB takes the mean over all
       nodes, a factor ½, and the mean over the batch.
    2. The estimate has no lower bound, so it would reward anti-correlated features
       without limit. Therefore the result is clamped and features have unit length.
    3. The mean over all nodes is μ² − 2μ E[h] + E[h²], without a matrix (B, B).
    """
    precision = (-log_variance).exp()
    own = (mean - local).square()
    others = mean.square() - 2 * mean * local.mean(0) + local.square().mean(0)
    if norm == "literal":
        # the sum over all nodes includes each node's own term, which Eq. (6) excludes
        return ((len(local) * others - 2 * own) * precision).sum().clamp(min=0)
    return (0.5 * (others - own) * precision).sum(dim=1).mean().clamp(min=0)


def residual_loss(mean: Tensor, log_variance: Tensor, local: Tensor) -> Tensor:
    """Return twice the negative log-likelihood of local features, ADPFedGNN Eq. (8).

    Up to a constant; to be minimised. Arguments as in :func:`club_bound`, h^l detached.

    Notes
    -----
    1. The paper prints it without log σ² and with the sign of a likelihood. Minimising
       that increases the error, and maximising it sends σ² to infinity.
    """
    squares = (mean - local).square() * (-log_variance).exp()
    return (squares + log_variance).sum(dim=1).mean()
