"""Functions of all ordered pairs of pseudo-nodes, computed in cache-sized blocks.

With s nodes and width h, one pass over pairs reads s²h numbers: 250² × 128 = 8 million,
in each of two thousand steps. Autograd would keep a dozen such tensors and read them
from main memory.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flower_fgl.nn.sparse import apply_function, with_slope

__all__ = ["pair_scores", "smoothness_loss"]

BLOCK = 2**17
"""Numbers per block on a CPU: 512 kB of float32, so that three blocks fit a core's
cache."""

GPU_BLOCK = 2**26
"""Numbers per block on another device: 256 MB of float32. Its kernels need large products,
and it has no cache of a block's size."""

EPSILON = 1e-5
"""Added to variances in batch normalisation, PyTorch's default."""


def _blocks(rows: int, row_size: int, device: torch.device) -> Iterator[slice]:
    block = BLOCK if device.type == "cpu" else GPU_BLOCK
    step = max(1, block // max(row_size, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def pair_scores(
    left: Tensor, right: Tensor, weight: Tensor, scale: Tensor, shift: Tensor,
    head: Tensor, *, pool: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Score ordered pairs by the upper layers of the link predictor, O-pFGL Eq. (10).

    ``t_ij = v · ReLU(BatchNorm(W ReLU(l_i + r_j)))``; the batch is all s² pairs. t (s, s)
    is not symmetric, and differentiable once in every tensor. l and r (s, h) are the
    terms of the two nodes in the normalised first layer, W is ``weight`` (h', h), v is
    ``head`` (h',), and ``scale`` and ``shift`` (h',) are those of the batch
    normalisation. ``pool`` keeps the large buffer of s²h' numbers between calls.
    """
    pool = [] if pool is None else pool
    return apply_function(_PairScores, pool, left, right, weight, scale, shift, head)


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
    known = [] if known is None else known
    total, to_x = adjacency.detach().sum(), None
    if not float(total):
        return 0 * (x.sum() + adjacency.sum())
    with torch.no_grad():
        if known and not x.requires_grad:
            (similarity,) = known
        else:
            similarity, to_x = _similarity(x, adjacency, x.requires_grad)
            # each unordered pair occurs twice in the sum
            to_x *= 2 / (x.shape[1] * total)
            known[:] = [similarity]
        value = (adjacency * similarity).sum() / total
        to_weight = (similarity - value) / total
    found = with_slope(value, adjacency, to_weight)
    return found if to_x is None else with_slope(found, x, to_x)


class _PairScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        pool: list[Tensor],
        left: Tensor,
        right: Tensor,
        weight: Tensor,
        scale: Tensor,
        shift: Tensor,
        head: Tensor,
    ) -> Tensor:
        s, width = len(left), len(weight)
        before = _take(pool, left, s * s, width)  # W ReLU(l_i + r_j)
        total = left.new_zeros(width, dtype=torch.float64)
        squares = torch.zeros_like(total)
        inner, outer = _scratch(left, weight)
        for rows, pairs in _pair_blocks(s, max(width, left.shape[1]), left.device):
            lower = _lower(left[rows], right, inner).clamp_(min=0)
            block = torch.mm(lower, weight.T, out=before[pairs])
            total += block.sum(dim=0)
            squares += torch.mul(block, block, out=outer[: len(block)]).sum(dim=0)
        mean = total / (s * s)
        deviation = (squares / (s * s) - mean.square()).clamp(min=0).add(EPSILON).sqrt()
        mean, deviation = mean.to(left.dtype), deviation.to(left.dtype)
        slope = scale / deviation
        offset = shift - slope * mean
        out = left.new_empty(s * s)
        for _, pairs in _pair_blocks(s, max(width, left.shape[1]), left.device):
            block = before[pairs]
            block = torch.addcmul(offset, block, slope, out=outer[: len(block)])
            torch.mv(block.clamp_(min=0), head, out=out[pairs])
        if any(ctx.needs_input_grad):
            ctx.pool, ctx.before = pool, before
            ctx.save_for_backward(
                left, right, weight, scale, head, mean, deviation, offset
            )
        else:
            pool.append(before)
        return out.view(s, s)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (
            left, right, weight, scale, head, mean, deviation, offset
        ) = ctx.saved_tensors  # fmt: skip
        before: Tensor = ctx.before
        s, width = len(left), len(weight)
        grad = grad.reshape(-1)
        slope = scale / deviation
        active, along = torch.zeros_like(head), torch.zeros_like(head)
        inner, outer = _scratch(left, weight)
        below = torch.empty_like(inner)
        for _, pairs in _pair_blocks(s, max(width, left.shape[1]), left.device):
            block = _active(before[pairs], slope, offset, outer)
            active += grad[pairs] @ block
            along += grad[pairs] @ block.mul_(before[pairs])
        # to_shift and to_scale are the sums over pairs of g and g·n, for gradient g at
        # the normalised value n; the gradient at W·lower is
        # slope·(g − mean g − n·mean(g n))
        to_shift = head * active
        to_scale = head * (along - mean * active) / deviation
        to_head = slope * along + offset * active
        tilt = slope * to_scale / deviation / (s * s)
        level = slope * to_shift / (s * s) - tilt * mean
        needs_ends = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        to_left, to_right = torch.zeros_like(left), torch.zeros_like(right)
        to_weight = torch.zeros_like(weight)
        for rows, pairs in _pair_blocks(s, max(width, left.shape[1]), left.device):
            block = _active(before[pairs], slope, offset, outer).mul_(slope * head)
            block.mul_(grad[pairs, None]).addcmul_(before[pairs], -tilt).sub_(level)
            lower = _lower(left[rows], right, inner)
            if needs_ends:
                ends = torch.mm(block, weight, out=below[: len(block)])
                _zero_where_negative(ends, lower)
                ends = ends.view(-1, s, ends.shape[1])
                to_left[rows] = ends.sum(dim=1)
                to_right += ends.sum(dim=0)
            if ctx.needs_input_grad[3]:
                to_weight.addmm_(block.T, lower.clamp_(min=0))
        ctx.pool.append(before)
        return None, to_left, to_right, to_weight, to_scale, to_shift, to_head


def _pair_blocks(
    s: int, width: int, device: torch.device
) -> Iterator[tuple[slice, slice]]:
    """Yield rows i and the positions of their pairs (i, ·) in row-major order."""
    for rows in _blocks(s, s * width, device):
        yield rows, slice(rows.start * s, rows.stop * s)


def _take(pool: list[Tensor], like: Tensor, rows: int, width: int) -> Tensor:
    """Take a buffer from the pool: new memory would cost a page fault per 4 kB."""
    if pool:
        buffer = pool.pop()
        if buffer.shape == (rows, width) and buffer.dtype == like.dtype:
            return buffer
    return like.new_empty((rows, width))


def _scratch(left: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate buffers for one block before and after W."""
    s, sizes = len(left), weight.shape
    rows = next(_blocks(s, s * max(sizes), left.device)).stop
    return left.new_empty((rows * s, sizes[1])), left.new_empty((rows * s, sizes[0]))


def _lower(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Write l_i + r_j for all j, one pair per row."""
    pairs = out[: len(left) * len(right)]
    torch.add(left[:, None], right, out=pairs.view(len(left), *right.shape))
    return pairs


def _active(before: Tensor, slope: Tensor, offset: Tensor, out: Tensor) -> Tensor:
    """Write 1 where the normalised value is positive, else 0."""
    after = torch.addcmul(offset, before, slope, out=out[: len(before)])
    return torch.gt(after, 0, out=after)


def _zero_where_negative(grad: Tensor, value: Tensor) -> None:
    """Apply the derivative of ReLU, in place and in one pass."""
    torch.ops.aten.threshold_backward.grad_input(grad, value, 0, grad_input=grad)


def _similarity(x: Tensor, weight: Tensor, needs_slope: bool) -> tuple[Tensor, Tensor]:
    """Return κ (s, s), and half the derivative of Σ_ij A_ij κ_ij by X' times d, if needed.

    The last is zero otherwise.
    """
    s, width = x.shape
    similarity, to_x = x.new_zeros((s, s)), torch.zeros_like(x)
    for rows in _blocks(s, s * width, x.device):
        later = slice(rows.start, s)  # pairs with j before the block are done
        difference = x[rows, None] - x[later]
        block = (difference.square() / -2).exp_()
        similarity[rows, later] = block.mean(dim=-1)
        if needs_slope:
            # the diagonal block contains both (i, j) and (j, i)
            block.mul_(difference).mul_(weight[rows, later, None])
            to_x[rows] -= block.sum(dim=1)
            to_x[rows.stop :] += block[:, rows.stop - rows.start :].sum(dim=0)
    similarity = similarity.triu(1)
    return similarity + similarity.T, to_x
