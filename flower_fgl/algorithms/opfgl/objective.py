"""Losses of O-pFGL's pseudo-graph, Eqs. (5) and (10) to (12).

The published code follows Xiao et al., "Simple graph condensation", ECML-PKDD 2024.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.opfgl.pairwise import pair_similarity
from flower_fgl.nn.sparse import apply_function, index_sum

__all__ = [
    "ClassTargets",
    "alignment_loss",
    "link_weights",
    "propagated",
    "smoothness_loss",
]

FLAT = 1e-12
"""Least variance of a class's pseudo-nodes in the loss."""


def link_weights(
    scores: Tensor, *, threshold: float = 0.01, is_hard: bool = False
) -> Tensor:
    """Turn scores into an adjacency matrix (s, s), O-pFGL Eq. (10).

    ``A_ij = σ(z_ij)`` where it is at least δ = ``threshold`` and i ≠ j, else 0; z are
    ``scores`` (s, s), symmetric. If it ``is_hard``, kept edges have weight 1, with the
    gradient of σ(z).

    Notes
    -----
    1. Eq. (10) prints the indicator, which has no gradient. By default the weight itself
       is kept, as in the published code.
    """
    weight = torch.sigmoid(scores)
    weight = (weight + weight.T) / 2  # a vectorised σ may differ in the last bit
    kept = (weight.detach() >= threshold).to(weight.dtype).fill_diagonal_(0)
    weight = weight * kept
    return weight + (kept - weight).detach() if is_hard else weight


def propagated(x: Tensor, adjacency: Tensor, depth: int) -> Tensor:
    """Concatenate propagated features of a dense weighted graph, O-pFGL Eq. (5).

    From X' (s, d) and A' (s, s), symmetric and not negative, normalised here as A' + I:
    (s, (h + 1)·d) for h = ``depth``, differentiable once in both.
    """
    return apply_function(_Propagation, x, adjacency, depth)


class _Propagation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, adjacency: Tensor, depth: int) -> Tensor:
        inverse = (adjacency.sum(dim=1) + 1).rsqrt()
        normalised = adjacency * inverse * inverse[:, None]
        normalised.diagonal().add_(inverse.square())
        out = x.new_empty((len(x), (depth + 1) * x.shape[1]))
        hops = out.view(len(x), depth + 1, -1).unbind(1)
        hops[0].copy_(x)
        for before, after in pairwise(hops):
            torch.mm(normalised, before, out=after)
        ctx.save_for_backward(out, normalised, inverse)
        ctx.depth = depth
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, normalised, inverse = ctx.saved_tensors
        hops, grads = (t.view(len(t), ctx.depth + 1, -1).unbind(1) for t in (out, grad))
        to_hop, to_adjacency = grads[-1], None
        to_normalised = torch.zeros_like(normalised)
        for h in range(ctx.depth, 0, -1):
            if ctx.needs_input_grad[1]:
                to_normalised.addmm_(to_hop, hops[h - 1].T)
            to_hop = torch.addmm(grads[h - 1], normalised, to_hop)  # symmetric
        if ctx.needs_input_grad[1]:
            # Ã_ij = r_i r_j (A + I)_ij with r = (row sum of A + I)^(−1/2)
            both = to_normalised * normalised
            of_degree = (both.sum(dim=0) + both.sum(dim=1)) * inverse.square() / -2
            to_adjacency = to_normalised * inverse * inverse[:, None]
            to_adjacency += of_degree[:, None]
        return to_hop, to_adjacency, None


class ClassTargets(NamedTuple):
    """Targets of the statistics of a pseudo-graph's classes, constant.

    ``mean`` and ``deviation`` (C, D) are μ and the square root of s², ``labels`` (s,) are
    Y'. ``mixing`` (C, s) averages the pseudo-nodes of each class, and ``share`` (C,) is λ,
    0 for a class without any. ``several`` (C, 1) is 1 / (n − 1) for a class with n > 1 of
    them, else 0; ``None`` if there is no such class.
    """

    mean: Tensor
    deviation: Tensor
    labels: Tensor
    mixing: Tensor
    share: Tensor
    several: Tensor | None

    @classmethod
    def of(
        cls, labels: Tensor, mean: Tensor, deviation: Tensor, counts: Tensor
    ) -> ClassTargets:
        """Prepare targets from Y' (s,), μ, √s² (C, D) and N, ``counts`` (C,)."""
        number = torch.bincount(labels, minlength=len(counts))
        share = counts / counts.sum().clamp(min=1) * (number > 0)
        mixing = F.one_hot(labels, len(counts)).T / number.clamp(min=1)[:, None]
        several = number > 1
        freedom = several / (number - 1).clamp(min=1)
        return cls(
            mean,
            deviation,
            labels,
            mixing.to(mean),
            share.to(mean),
            freedom.to(mean)[:, None] if bool(several.any()) else None,
        )


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
    return apply_function(_Alignment, x, targets)


class _Alignment(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, targets: ClassTargets) -> Tensor:
        factor = (targets.share / x.shape[1])[:, None]
        centre = targets.mixing @ x
        difference = centre - targets.mean
        slope = difference * factor  # half of the derivative by the means
        loss = (difference * slope).sum()
        to_x = targets.mixing.T @ slope
        if targets.several is not None:
            # their sum over a class is 0: the means have no further derivative
            deviation = x - centre.index_select(0, targets.labels)
            squares = index_sum(deviation.square(), targets.labels, len(centre))
            variance = squares * targets.several
            spread = variance.clamp(min=FLAT).sqrt()
            difference = spread - targets.deviation
            beyond = difference * factor * (targets.several > 0)
            loss = loss + (difference * beyond).sum()
            # the derivative of a root at 0 would be infinite
            beyond = beyond * (variance > FLAT) / spread * targets.several
            to_x += deviation * beyond.index_select(0, targets.labels)
        ctx.save_for_backward(to_x)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return 2 * grad * ctx.saved_tensors[0], None


def smoothness_loss(
    x: Tensor, adjacency: Tensor, known: list[Tensor] | None = None
) -> Tensor:
    """Average the similarity of connected nodes, O-pFGL Eq. (12); 0 without edges.

    ``Σ_ij A'_ij κ(x_i, x_j) / Σ_ij A'_ij``, ``κ = mean_dim exp(−(x_i − x_j)² / 2)``, of
    X' (s, d) and A' (s, s), symmetric with a zero diagonal. ``known`` keeps κ of an X'
    without gradient between calls; empty it when X' changes.

    Notes
    -----
    1. The paper prints the squared norm in the exponent, which underflows for hundreds of
       features; its published code takes the mean over dimensions, as here.
    """
    return pair_similarity(x, adjacency, known)
