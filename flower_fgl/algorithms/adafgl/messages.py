"""AdaFGL's signed messages between all pairs of a client's nodes.

===========  ==========================================================
symbol       here
===========  ==========================================================
B            ``alike``, constant pairs of nodes with alike predictions
c(E)         cosine of the rows of ``unit``
R            β B + (1 − β) c(E), 0 on the diagonal
E            ``e``, logits of the message head
===========  ==========================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

__all__ = ["signed_messages", "signed_products"]

BLOCK = 1 << 18
"""Pairs of nodes in memory at once: 256 Ki × 4 bytes fit into a core's cache."""
TINY = 1e-12


def signed_messages(alike: Tensor, e: Tensor, slope: Tensor, *, beta: float) -> Tensor:
    """Compute ½ (softmax(PReLU(S) E) − softmax(PReLU(−S) E) + E): logits (N, C).

    S has the entries of :func:`signed_products`. With its positive part S⁺ and its
    negative part S⁻, PReLU(S) E = S⁺E + a S⁻E and PReLU(−S) E = −S⁻E − a S⁺E.

    Parameters
    ----------
    alike : Tensor of shape (N, N), bool or float
        B, symmetric and with a diagonal of 0. Float is faster.
    e, slope : Tensor of shape (N, C) and (1,), float
        E, and slope a of PReLU below 0.
    beta : float in [0, 1]
    """
    unit = F.normalize(e.softmax(dim=1), dim=1)
    positive, negative = signed_products(unit, e, alike, beta=beta)
    towards = (positive + slope * negative).softmax(dim=1)
    away = (-negative - slope * positive).softmax(dim=1)
    return (towards - away + e) / 2


def signed_products(
    unit: Tensor, e: Tensor, alike: Tensor, *, beta: float
) -> tuple[Tensor, Tensor]:
    """Multiply both parts of the signed relations S of all pairs with E: S⁺E and S⁻E.

    Entries of R above their mean m become (R − m)/(M − m), M the largest entry; the
    others become −(m − R)/m. The diagonal becomes 1. The rows of ``unit`` (N, C) have
    unit length and entries of at least 0. It and E have a gradient; others: see
    :func:`signed_messages`.

    Notes
    -----
    1. The published codes give −R/m to entries below the mean: the least alike pair gets
       0 and pairs just below the mean −1. Here it is the other way round.
    2. R and its gradient are computed in blocks: time N²C, memory of one block.
    3. Of several largest entries one has the gradient of M.
    """
    sums = unit.sum(dim=0)
    cosines = sums @ sums - (unit * unit).sum()  # without the diagonal
    mean = (beta * alike.sum(dtype=e.dtype) + (1 - beta) * cosines) / len(unit) ** 2
    above, below, largest = _Sums.apply(unit, e, mean, alike, beta)  # type: ignore[no-untyped-call]
    positive = above / (largest - mean).clamp(min=TINY) + e
    return positive, below / mean.clamp(min=TINY)


class _Sums(torch.autograd.Function):
    """max(R − m, 0) E and min(R − m, 0) E without their diagonals, and max R.

    Matrices with few columns stand transposed: products with them are several times faster.
    """

    @staticmethod
    def forward(
        ctx: Any, unit: Tensor, e: Tensor, mean: Tensor, alike: Tensor, beta: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = e.T.contiguous()
        above, below = torch.empty_like(wide), torch.empty_like(wide)
        largest, place = unit.new_zeros(()), 0
        for rows in _blocks(len(unit)):
            relation = _relation(unit, alike, beta, rows)
            peak = relation.max()
            if peak > largest:  # argmax takes long
                largest, place = peak, int(relation.argmax()) + rows.start * len(unit)
            relation = _clear_diagonal(relation.sub_(mean), rows)
            above[:, rows] = wide @ relation.clamp(min=0).T
            below[:, rows] = wide @ relation.clamp_(max=0).T
        ctx.save_for_backward(unit, e, mean, alike)
        ctx.beta, ctx.place = beta, divmod(place, len(unit))
        return above.T.contiguous(), below.T.contiguous(), largest

    @staticmethod
    def backward(
        ctx: Any, *outputs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        of_above, of_below, of_largest = outputs
        unit, e, mean, alike = ctx.saved_tensors
        wide, wide_above, wide_below = (
            matrix.T.contiguous() for matrix in (unit, of_above, of_below)
        )
        difference = of_above - of_below
        of_wide, of_e = torch.zeros_like(wide), torch.zeros_like(wide_above)
        of_mean = torch.zeros_like(mean)
        for rows in _blocks(len(unit)):
            relation = _relation(unit, alike, ctx.beta, rows).sub_(mean)
            relation = _clear_diagonal(relation, rows)
            is_above = torch.gt(relation, 0, out=torch.empty_like(relation))
            slope = of_below[rows] @ e.T  # torch.where takes far longer
            slope.addcmul_(difference[rows] @ e.T, is_above)
            slope = _clear_diagonal(slope, rows)
            of_mean -= slope.sum()
            of_wide[:, rows] += wide @ slope.T
            of_wide += wide[:, rows] @ slope
            of_e += wide_above[:, rows] @ relation.clamp(min=0)
            of_e += wide_below[:, rows] @ relation.clamp_(max=0)
        of_unit, of_e = of_wide.T.contiguous(), of_e.T.contiguous()
        row, column = ctx.place
        if row != column:
            of_unit[row] += of_largest * unit[column]
            of_unit[column] += of_largest * unit[row]
        return of_unit * (1 - ctx.beta), of_e, of_mean, None, None


def _blocks(number: int) -> Iterator[slice]:
    """Yield the rows of each block."""
    step = max(1, BLOCK // max(1, number))
    for start in range(0, number, step):
        yield slice(start, min(start + step, number))


def _relation(unit: Tensor, alike: Tensor, beta: float, rows: slice) -> Tensor:
    """Return some rows of R."""
    out = (unit[rows] * (1 - beta)) @ unit.T
    if beta:
        out.add_(alike[rows], alpha=beta)
    return _clear_diagonal(out, rows)


def _clear_diagonal(matrix: Tensor, rows: slice) -> Tensor:
    """Set the entries of nodes with themselves to 0, in place."""
    matrix[:, rows].fill_diagonal_(0.0)
    return matrix
