"""Attention over neighbours by an MLP, a variant of FedPG Eq. (2)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms.prototypes.attention import (
    NEGATIVE_SLOPE,
    Scorer,
    UnitRows,
    segment_softmax,
)
from flower_fgl.algorithms.prototypes.hop_neighbors import Pairs
from flower_fgl.nn.sparse import apply_function, index_sum

__all__ = ["NeighbourScorer"]

BLOCK = 4096
"""Pairs computed at once: 1 MiB at width 64, which stays in a core's cache."""


class NeighbourScorer(Scorer):
    """Attention by an MLP of neighbour, centre and the neighbours' mean.

    ``w_vu ∝ exp(MLP([f(x_u) ‖ f(x_v) ‖ mean of f over v's neighbours]))`` for embeddings
    of a ``width`` p.

    Notes
    -----
    1. The paper feeds all neighbours into one MLP, whose width would depend on the node.
       Here the mean replaces them.
    2. The first layer is applied once per node and summed per pair, which is equivalent.
       The last layer starts at 0: all neighbours have equal initial weights.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(3 * width, width)
        self.out = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, embedding: UnitRows, around: Pairs, num_hops: int) -> Tensor:
        """Weight the neighbours of each node, see :meth:`Scorer.forward`."""
        f = embedding.normalised()
        size = num_hops * len(f)
        mean = around.mean((size, len(f))).matmul(f)
        return segment_softmax(self.scores(f, mean, around), around.centre, size)

    def scores(self, embedding: Tensor, mean: Tensor, around: Pairs) -> Tensor:
        """Score each pair of ``around``: (E,).

        ``embedding`` is f (N, p), ``mean`` (L · N, p) the mean of f over each node's
        neighbours at each hop.
        """
        neighbour, centre, context = self.hidden.weight.chunk(3, dim=1)
        of_centre = F.linear(embedding, centre, self.hidden.bias)
        of_centre = of_centre.repeat(len(mean) // len(embedding), 1)
        of_centre = of_centre + F.linear(mean, context)
        of_neighbour = F.linear(embedding, neighbour)
        weight = self.out.weight[0]
        return apply_function(_PairScore, of_neighbour, of_centre, weight, around)


class _PairScore(torch.autograd.Function):
    """Compute ``w · LeakyReLU(a_u + b_v)`` for each pair (v, u), block by block."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(a, b, weight)
        ctx.pairs = pairs
        scores = a.new_empty(len(pairs.centre))
        both, rows = torch.cat([b, a]), _rows(pairs, len(b))
        for place, _ in _blocks(pairs, len(b)):
            hidden = F.embedding_bag(rows[place], both, mode="sum")
            torch.mv(F.leaky_relu_(hidden, NEGATIVE_SLOPE), weight, out=scores[place])
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Recomputing the sums a_u + b_v costs less than memory for all pairs. With D_v
        # the sum of a node's gradients where a_u + b_v is positive, and G_v the sum of
        # all, the gradient for b_v is w · (0.2 G_v + 0.8 D_v); likewise for a_u.
        a, b, weight = ctx.saved_tensors
        swapped, order = ctx.pairs.reverse()
        to_b = _slopes(grad, b, a, ctx.pairs)
        to_a = _slopes(grad.index_select(0, order), a, b, swapped)
        to_weight = (a * to_a).sum(0) + (b * to_b).sum(0)
        return to_a * weight, to_b * weight, to_weight, None


def _blocks(pairs: Pairs, num_nodes: int) -> Iterator[tuple[slice, slice]]:
    """Split pairs into blocks of whole centres; yield positions and centres of each."""
    start = pairs.start(num_nodes)
    size = len(pairs.centre)
    edges = torch.arange(0, size, BLOCK, device=start.device)
    nodes = torch.searchsorted(start, edges, right=True) - 1
    # a centre with more than BLOCK pairs gets its own block
    found = nodes.unique()  # type: ignore[no-untyped-call]
    nodes = torch.cat([found, found.new_tensor([num_nodes])])
    places = start[nodes].tolist()
    for node, place in zip(pairwise(nodes.tolist()), pairwise(places), strict=True):
        if place[0] < place[1]:
            yield slice(*place), slice(*node)


def _rows(pairs: Pairs, num_nodes: int) -> Tensor:
    """Return the two rows of ``[own; other]`` that each pair adds, (E, 2)."""
    return torch.stack([pairs.centre, pairs.neighbour + num_nodes], dim=1)


def _slopes(grad: Tensor, own: Tensor, other: Tensor, pairs: Pairs) -> Tensor:
    """Sum gradient times the slope of LeakyReLU over each centre's pairs, (N, p)."""
    size = len(own)
    start = pairs.start(size)
    out = torch.zeros_like(own)
    both, rows = torch.cat([own, other]), _rows(pairs, size)
    for place, nodes in _blocks(pairs, size):
        is_up = F.embedding_bag(rows[place], both, mode="sum").gt_(0)
        local = torch.arange(len(is_up), device=start.device)
        out[nodes] = F.embedding_bag(
            local,
            is_up,
            start[nodes] - place.start,
            mode="sum",
            per_sample_weights=grad[place],
        )
    total = index_sum(grad, pairs.centre, size)
    return out.mul_(1 - NEGATIVE_SLOPE) + NEGATIVE_SLOPE * total[:, None]
