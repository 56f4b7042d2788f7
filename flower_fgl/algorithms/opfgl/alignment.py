"""Distance of a pseudo-graph's class statistics to their targets: O-pFGL Eq. (11)."""

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.nn.sparse import index_sum, with_slope

__all__ = ["ClassTargets", "alignment_loss"]

FLAT = 1e-12
"""Least variance of a class's pseudo-nodes in the loss."""


class ClassTargets(NamedTuple):
    """Targets of the statistics of a pseudo-graph's classes, constant.

    ``mean`` and ``deviation`` (C, D) are μ and the square root of s², ``labels`` (s,) are
    Y'. ``mixing`` (C, s) averages the pseudo-nodes of each class; ``None`` if each has one.
    ``share`` (C, 1) is λ / D, 0 for a class without any. ``several`` (C, 1) is
    1 / (n − 1) for a class with n > 1 of them, else 0; ``None`` if there is no such class.
    """

    mean: Tensor
    deviation: Tensor
    labels: Tensor
    mixing: Tensor | None
    share: Tensor
    several: Tensor | None

    @classmethod
    def of(
        cls, labels: Tensor, mean: Tensor, deviation: Tensor, counts: Tensor
    ) -> Self:
        """Prepare targets from Y' (s,), μ, √s² (C, D) and N, ``counts`` (C,)."""
        number = torch.bincount(labels, minlength=len(counts))
        share = counts / counts.sum().clamp(min=1) * (number > 0)
        is_one_each = torch.equal(number, torch.ones_like(number))
        mixing = F.one_hot(labels, len(counts)).T / number.clamp(min=1)[:, None]
        several = number > 1
        freedom = several / (number - 1).clamp(min=1)
        return cls(
            mean,
            deviation,
            labels,
            None if is_one_each else mixing.to(mean),
            share.to(mean)[:, None] / mean.shape[1],
            freedom.to(mean)[:, None] if bool(several.any()) else None,
        )

    def distance(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of :func:`alignment_loss`, and half its derivative by ``x``."""
        centre = x if self.mixing is None else self.mixing @ x
        difference = centre - self.mean
        slope = difference * self.share  # half of the derivative by the means
        loss = (difference * slope).sum()
        to_x = slope if self.mixing is None else self.mixing.T @ slope
        if self.several is not None:
            # their sum over a class is 0: the means have no further derivative
            deviation = x - centre.index_select(0, self.labels)
            squares = index_sum(deviation.square(), self.labels, len(centre))
            variance = squares * self.several
            spread = variance.clamp(min=FLAT).sqrt()
            difference = spread - self.deviation
            beyond = difference * self.share * (self.several > 0)
            loss = loss + (difference * beyond).sum()
            # the derivative of a root at 0 would be infinite
            beyond = beyond * (variance > FLAT) / spread * self.several
            to_x += deviation * beyond.index_select(0, self.labels)
        return loss, to_x


def alignment_loss(x: Tensor, targets: ClassTargets) -> Tensor:
    """Measure the distance of class statistics to their targets, O-pFGL Eq. (11).

    ``Σ_c λ_c [MSE(μ'^c, μ^c) + MSE(std'^c, std^c)]``, ``λ_c = N^c / ΣN``, of propagated
    features (s, D) of the pseudo-graph; differentiable once.

    Notes
    -----
    1. The paper prints squared differences of variances. Its published code compares
       standard deviations, averaged over dimensions, as here.
    2. A class with one pseudo-node has no standard deviation: that term is omitted.
    """
    loss, to_x = targets.distance(x.detach())
    return with_slope(loss, x, 2 * to_x)
