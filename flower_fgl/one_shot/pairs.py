"""Functions of all ordered pairs of pseudo-nodes, in blocks that stay in the cache.

With s nodes and width h a pass over pairs reads s²h numbers: 250² × 128 = 8 million, two
thousand times. Autograd would keep a dozen such tensors and read them from memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["pair_scores", "pair_similarity"]

BLOCK = 2**18
"""Numbers handled at once: 1 MB of float32, the size of a core's second-level cache."""

EPSILON = 1e-5
"""Added to variances in batch normalisation, PyTorch's default."""


def _blocks(rows: int, row_size: int) -> Iterator[slice]:
    step = max(1, BLOCK // max(row_size, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def pair_scores(
    left: Tensor, right: Tensor, weight: Tensor, scale: Tensor, shift: Tensor,
    head: Tensor,
) -> Tensor:  # fmt: skip
    """Score ordered pairs by the upper layers of the link predictor, O-pFGL Eq. (10).

    ``t_ij = v · ReLU(BatchNorm(W ReLU(l_i + r_j)))``; the batch is all s² pairs.

    Parameters
    ----------
    left, right : Tensor of shape (s, h), float
        l and r: what either end adds to the normalised first layer.
    weight : Tensor of shape (h', h), float
        W.
    scale, shift : Tensor of shape (h',), float
        Of the batch normalisation.
    head : Tensor of shape (h',), float
        v.

    Returns
    -------
    Tensor of shape (s, s), float
        t, not symmetric; differentiable in every argument.
    """
    out: Tensor = _PairScores.apply(left, right, weight, scale, shift, head)  # type: ignore[no-untyped-call]
    return out


def pair_similarity(x: Tensor, weight: Tensor) -> Tensor:
    """Average the similarity of connected nodes, O-pFGL Eq. (12).

    ``Σ_ij A_ij κ(x_i, x_j) / Σ_ij A_ij``, ``κ = mean_dim exp(−(x_i − x_j)² / 2)``.

    Parameters
    ----------
    x : Tensor of shape (s, d), float
        Features.
    weight : Tensor of shape (s, s), float, non-negative, symmetric, zero diagonal
        A.

    Returns
    -------
    Tensor of shape ()
        0 without edges; differentiable in both.
    """
    out: Tensor = _PairSimilarity.apply(x, weight)  # type: ignore[no-untyped-call]
    return out


class _PairScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        left: Tensor,
        right: Tensor,
        weight: Tensor,
        scale: Tensor,
        shift: Tensor,
        head: Tensor,
    ) -> Tensor:
        s, width = len(left), len(weight)
        before = left.new_empty((s * s, width))  # W ReLU(l_i + r_j)
        total = left.new_zeros(width, dtype=torch.float64)
        squares = torch.zeros_like(total)
        for rows in _blocks(s, s * max(width, left.shape[1])):
            lower = (left[rows, None] + right).clamp_(min=0).flatten(0, 1)
            block = before[rows.start * s : rows.stop * s]
            torch.mm(lower, weight.T, out=block)
            total += block.sum(dim=0)
            squares += torch.linalg.vector_norm(block, dim=0).double().square()
        mean = total / (s * s)
        variance = (squares / (s * s) - mean.square()).clamp(min=0)
        deviation = (variance + EPSILON).sqrt().to(left.dtype)
        mean = mean.to(left.dtype)
        slope = scale / deviation
        offset = shift - slope * mean
        after = torch.empty_like(before)
        out = left.new_empty(s * s)
        for rows in _blocks(s, s * width):
            pairs = slice(rows.start * s, rows.stop * s)
            block = torch.addcmul(offset, before[pairs], slope, out=after[pairs])
            torch.mv(block.clamp_(min=0), head, out=out[pairs])
        ctx.save_for_backward(
            left, right, weight, scale, head, before, after, mean, deviation
        )
        return out.view(s, s)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (
            left, right, weight, scale, head, before, after, mean, deviation
        ) = ctx.saved_tensors  # fmt: skip
        s, width = len(left), len(weight)
        grad = grad.reshape(-1)
        to_head, active, along = (left.new_zeros(width) for _ in range(3))
        for rows in _blocks(s, s * width):
            pairs = slice(rows.start * s, rows.stop * s)
            g, block = grad[pairs], after[pairs]
            to_head += g @ block
            block = block.sign()
            active += g @ block
            along += g @ block.mul_(before[pairs])
        # sums over pairs of the gradient at the normalised value n and of its product
        # with n; the gradient at W·lower is slope·(g_n − mean g_n − n mean(g_n n))
        to_shift = head * active
        to_scale = head * (along - mean * active) / deviation
        slope = scale / deviation
        tilt = slope * to_scale / deviation / (s * s)
        level = slope * to_shift / (s * s) - tilt * mean
        need_pairs = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        to_left, to_right = torch.zeros_like(left), torch.zeros_like(right)
        to_weight = torch.zeros_like(weight)
        for rows in _blocks(s, s * max(width, left.shape[1])):
            pairs = slice(rows.start * s, rows.stop * s)
            block = after[pairs].sign().mul_(slope * head)
            block.mul_(grad[pairs, None]).addcmul_(before[pairs], -tilt).sub_(level)
            lower = (left[rows, None] + right).flatten(0, 1)
            if need_pairs:
                below = torch.ops.aten.threshold_backward(block @ weight, lower, 0)
                below = below.view(-1, s, below.shape[-1])
                to_left[rows] = below.sum(dim=1)
                to_right += below.sum(dim=0)
            if ctx.needs_input_grad[2]:
                to_weight.addmm_(block.T, lower.clamp_(min=0))
        return to_left, to_right, to_weight, to_scale, to_shift, to_head


class _PairSimilarity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        s, width = x.shape
        total = weight.sum()
        if not float(total):
            ctx.is_empty = True
            ctx.save_for_backward(x, weight)
            return x.new_zeros(())
        ctx.is_empty = False
        similarity = x.new_zeros((s, s))
        to_x = torch.zeros_like(x)
        for rows in _blocks(s, s * width):
            later = slice(
                rows.start, s
            )  # pairs (i, j) with j before the block are done
            difference = x[rows, None] - x[later]
            block = (difference.square() / -2).exp_()
            similarity[rows, later] = block.mean(dim=-1)
            if ctx.needs_input_grad[0]:
                # the block's own square holds both (i, j) and (j, i)
                block.mul_(difference).mul_(weight[rows, later, None])
                to_x[rows] -= block.sum(dim=1)
                to_x[rows.stop :] += block[:, rows.stop - rows.start :].sum(dim=0)
        similarity = similarity.triu(1)
        similarity += similarity.T.clone()
        value = (weight * similarity).sum() / total
        # each unordered pair stands twice in the sum
        to_x *= 2 / (width * total)
        ctx.save_for_backward(to_x, (similarity - value) / total)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        to_x, to_weight = ctx.saved_tensors
        if ctx.is_empty:
            return torch.zeros_like(to_x), torch.zeros_like(to_weight)
        return grad * to_x, grad * to_weight
