"""Losses of O-pFGL's pseudo-graph, Eqs. (5) and (10) to (12).

The published code follows Xiao et al., "Simple graph condensation", ECML-PKDD 2024.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flower_fgl.algorithms.opfgl.pairwise import pair_similarity
from flower_fgl.nn.sparse import index_sum

__all__ = ["alignment_loss", "link_weights", "propagated", "smoothness_loss"]


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
    (s, (h + 1)·d) for h = ``depth``, differentiable in both.
    """
    inverse = (adjacency.sum(dim=1) + 1).rsqrt()[:, None]
    hops = [x]
    for _ in range(depth):
        scaled = hops[-1] * inverse
        hops.append((adjacency @ scaled + scaled) * inverse)
    return torch.cat(hops, dim=1)


def alignment_loss(
    x: Tensor, labels: Tensor, mean: Tensor, deviation: Tensor, counts: Tensor
) -> Tensor:
    """Measure the distance of class statistics to their targets, O-pFGL Eq. (11).

    ``Σ_c λ_c [MSE(μ'^c, μ^c) + MSE(std'^c, std^c)]``, ``λ_c = N^c / ΣN``.

    Parameters
    ----------
    x, labels : Tensor of shape (s, D), float32, and (s,), int64
        Propagated features of the pseudo-graph, and Y'.
    mean, deviation : Tensor of shape (C, D), float32
        μ, and the square root of s².
    counts : Tensor of shape (C,), int64
        N.

    Notes
    -----
    1. The paper prints squared differences of variances. Its published code compares
       standard deviations, averaged over dimensions, as here.
    2. A class with one pseudo-node has no standard deviation: that term is omitted.
    """
    classes = len(counts)
    number = torch.bincount(labels, minlength=classes)
    share = counts / counts.sum().clamp(min=1) * (number > 0)
    centre = index_sum(x, labels, classes) / number.clamp(min=1)[:, None]
    loss = (share * (centre - mean).square().mean(dim=1)).sum()
    several = number > 1
    if not bool(several.any()):
        return loss
    squares = index_sum((x - centre[labels]).square(), labels, classes)[several]
    variance = squares / (number[several] - 1)[:, None]
    spread = variance.clamp(min=1e-12).sqrt()  # its gradient at 0 would be infinite
    difference = (spread - deviation[several]).square().mean(dim=1)
    return loss + (share[several] * difference).sum()


def smoothness_loss(x: Tensor, adjacency: Tensor) -> Tensor:
    """Average the similarity of connected nodes, O-pFGL Eq. (12); 0 without edges.

    ``Σ_ij A'_ij κ(x_i, x_j) / Σ_ij A'_ij``, ``κ = mean_dim exp(−(x_i − x_j)² / 2)``, of
    X' (s, d) and A' (s, s), symmetric with a zero diagonal.

    Notes
    -----
    1. The paper prints the squared norm in the exponent, which underflows for hundreds of
       features; its published code takes the mean over dimensions, as here.
    """
    return pair_similarity(x, adjacency)
