"""Attention over neighbours, FedPG Eq. (2): additive, or by an MLP."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms.prototypes.hop_neighbors import Pairs
from flower_fgl.nn.sparse import apply_function, index_sum

__all__ = ["AdditiveScorer", "NeighbourScorer", "Scorer", "UnitRows"]
__all__ += ["deviations_from_uniform", "segment_softmax"]

NEGATIVE_SLOPE = 0.2
MOST_SCORE = 30.0
"""Largest score for which a softmax needs no maximum: e^30 and e^−30 are far from the
limits of float32."""
TINY = 1e-12


class UnitRows:
    """The rows of a matrix (N, p), normalised to unit length in its products.

    The matrices of K clients, (K, n, p), are multiplied each with its own factor: all
    shapes then have the first dimension K.

    Equal to products with ``torch.nn.functional.normalize(rows)``. That takes several
    matrices of the size of x for the gradient; here the lengths scale the other factor.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        length = torch.linalg.vector_norm(rows.detach(), dim=-1)
        self.scale = length.clamp_(min=TINY).reciprocal_()  # (N,)

    def normalised(self) -> Tensor:
        """Return the unit rows, (N, p)."""
        return F.normalize(self.rows, dim=-1)

    def sum(self, table: Tensor) -> Tensor:
        """Sum the unit rows with weights (m, N): (m, p)."""
        return apply_function(_UnitSum, table, self.rows, self.scale)

    def project(self, weight: Tensor) -> Tensor:
        """Multiply each unit row and vectors (m, p): (m, N)."""
        return apply_function(_UnitProjection, weight, self.rows, self.scale)


class _UnitSum(torch.autograd.Function):
    """``T y``, y the unit rows; with g the gradient for y, x has (g − y (y · g)) / ‖x‖."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
        scaled = table * scale[..., None, :]
        ctx.save_for_backward(scaled, rows, scale)
        return scaled @ rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled, rows, scale = ctx.saved_tensors
        to_table = (grad @ rows.mT).mul_(scale[..., None, :])
        along = (scaled * to_table).sum(-2).mul_(scale)  # (y · g) / ‖x‖²
        to_rows = (scaled.mT @ grad).addcmul_(rows, along[..., None], value=-1)
        return to_table, to_rows, None


class _UnitProjection(torch.autograd.Function):
    """``W yᵀ``, y the unit rows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
        out = (weight @ rows.mT).mul_(scale[..., None, :])
        ctx.save_for_backward(weight, rows, scale, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, rows, scale, out = ctx.saved_tensors
        scaled = grad * scale[..., None, :]
        along = (scaled * out).sum(-2).mul_(scale)
        to_rows = (scaled.mT @ weight).addcmul_(rows, along[..., None], value=-1)
        return scaled @ rows, to_rows, None


def segment_softmax(scores: Tensor, segment: Tensor, num_segments: int) -> Tensor:
    """Normalise scores (E,) within groups, ``e^{s_i} / Σ_{j in group of i} e^{s_j}``.

    ``segment`` (E,) is the group of each score; some may be empty.
    """
    top = scores.new_full((num_segments,), -torch.inf)
    top = top.scatter_reduce(0, segment.long(), scores.detach(), "amax")
    weight = (scores - top.index_select(0, segment)).exp()
    total = index_sum(weight, segment, num_segments)
    return weight / total.index_select(0, segment)


class Scorer(nn.Module):
    """Base of the attentions a_k of FedPG Eq. (2★).

    No weight decay: the gradient of the attention is small, and decay would keep all
    weights equal (5e-8 from uniform after 30 rounds).
    """

    @property
    def undecayed(self) -> list[nn.Parameter]:
        """Parameters without weight decay: all."""
        return list(self.parameters())

    def forward(self, embedding: UnitRows, around: Pairs, num_hops: int) -> Tensor:
        """Weight the neighbours of each node at each hop: (E,).

        ``embedding`` (N, p) is f, and ``around`` are the E pairs of all L = ``num_hops``
        hops. Centre v at the h-th hop has the number (h − 1) N + v. The weights of a
        centre's pairs sum to 1. For K clients N counts the rows of all, K · n.
        """
        raise NotImplementedError


class AdditiveScorer(Scorer):
    """Attention by a sum of scores, for embeddings of a ``width`` p.

    ``w_vu ∝ exp(LeakyReLU(s₁·f(x_u) + s₂·f(x_v) + s₃·mean of f over v's neighbours))``.

    Notes
    -----
    1. Eq. (2) prints e^δ(E) with activation δ and E an MLP of all neighbours, which is
       the attention of GAMLP, δ(s·[x ‖ E]). The MLP's width would depend on the node:
       here one linear layer reads the neighbour, the centre and the neighbours' mean.
    2. δ is applied to the score, as printed; in :class:`NeighbourScorer` it is
       applied inside the MLP.
    3. All scores start at 0: all neighbours have equal initial weights.
    4. A score is a sum of three numbers per node. A pair therefore costs a few
       operations, and not p.
    5. ``weight`` (3, p) has the shape (K, 3, p) for K clients.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, width))

    def forward(self, embedding: UnitRows, around: Pairs, num_hops: int) -> Tensor:
        """Weight the neighbours of each node, see :meth:`Scorer.forward`."""
        parts = embedding.project(self.weight).unbind(-2)
        neighbour, centre, context = (part.flatten() for part in parts)  # (N,) each
        of_centre = centre.repeat(num_hops)
        return apply_function(_AdditiveSoftmax, neighbour, of_centre, context, around)


class _AdditiveSoftmax(torch.autograd.Function):
    """``softmax_u LeakyReLU(a_u + b_v + mean_u' c_u')`` for each pair (v, u)."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor, pairs: Pairs) -> Tensor:
        centre, shape = pairs.centre, (len(b), len(a))
        number = pairs.start(len(b)).diff().clamp_(min=1)
        ones = a.new_ones(len(centre))
        shift = b + torch.mv(pairs.matrix(ones, shape), c) / number
        scores = a.index_select(0, pairs.neighbour)
        scores += shift.index_select(0, centre)
        scores = F.leaky_relu_(scores, NEGATIVE_SLOPE)
        if bool(a.abs().max() + shift.abs().max() <= MOST_SCORE):
            weight = scores.exp()
            total = torch.mv(pairs.matrix(weight, shape), torch.ones_like(a))
            weight *= total.reciprocal_().index_select(0, centre)
        else:
            weight = segment_softmax(scores, centre, len(b))
        ctx.save_for_backward(weight, scores, number)
        ctx.pairs, ctx.shape = pairs, shape
        return weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, scores, number = ctx.saved_tensors
        pairs, shape = ctx.pairs, ctx.shape
        zero = weight.new_zeros(shape[1])
        ones = torch.ones_like(zero)
        inner = weight * grad
        mean = torch.mv(pairs.matrix(inner, shape), ones)  # Σ w g
        inner.addcmul_(weight, mean.index_select(0, pairs.centre), value=-1)
        inner = torch.ops.aten.leaky_relu_backward(
            inner, scores, NEGATIVE_SLOPE, self_is_result=True
        )
        to_centre = torch.mv(pairs.matrix(inner, shape), ones)
        spread = (to_centre / number).index_select(0, pairs.centre)
        return (
            zero.scatter_add(0, pairs.neighbour, inner),
            to_centre,
            zero.scatter_add(0, pairs.neighbour, spread),
            None,
        )


def deviations_from_uniform(
    weights: Tensor, pairs: Pairs, client: Tensor, num_clients: int
) -> Tensor:
    """Measure how far the attention of each client is from equal weights: (K,).

    The mean of ``|w_vu · n_v − 1|`` over the pairs of centres with n_v > 1 neighbours, for
    weights w_vu (E,) of pairs of some ``client`` (E,); 0 without such pairs.
    """
    count = torch.bincount(pairs.centre).index_select(0, pairs.centre)
    # with one neighbour the weight is 1, and adds nothing
    apart = (weights * count - 1).abs_()
    number = index_sum((count > 1).to(apart.dtype), client, num_clients)
    return index_sum(apart, client, num_clients) / number.clamp(min=1)


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
