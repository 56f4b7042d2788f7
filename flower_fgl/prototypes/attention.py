"""The attention over neighbours in FedPG Eq. (2)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.prototypes.rings import Pairs

__all__ = ["NeighbourScorer", "segment_softmax"]

NEGATIVE_SLOPE = 0.2


def segment_softmax(scores: Tensor, segment: Tensor, num_segments: int) -> Tensor:
    """Normalise scores within groups, ``e^{s_i} / Σ_{j in group of i} e^{s_j}``.

    Parameters
    ----------
    scores : Tensor of shape (E,), float
        s.
    segment : Tensor of shape (E,), int64, in [0, num_segments)
        Group of each score.
    num_segments : int
        Number of groups; some may be empty.

    Returns
    -------
    Tensor of shape (E,)
        Sums to 1 over each group.
    """
    top = scores.new_full((num_segments,), -torch.inf)
    top = top.scatter_reduce(0, segment, scores.detach(), "amax")
    weight = (scores - top[segment]).exp()
    total = weight.new_zeros(num_segments).index_add(0, segment, weight)
    return weight / total[segment]


class NeighbourScorer(nn.Module):
    """The attention a_k of FedPG Eq. (2★).

    Scores neighbour u of centre v by an MLP of
    ``[f(x_u) ‖ f(x_v) ‖ mean of f over the neighbours of v]``.

    Parameters
    ----------
    width : int
        Embedding width p.

    Notes
    -----
    1. The paper feeds all neighbours into one MLP, whose width would depend on the
       node; the mean takes their place.
    2. The first layer is applied to each node once and summed per pair, which is the
       same. The last layer starts at 0: all neighbours weigh alike.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(3 * width, width)
        self.out = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, embedding: Tensor, mean: Tensor, pairs: Pairs) -> Tensor:
        """Score each pair.

        Parameters
        ----------
        embedding : Tensor of shape (N, p), float32
            f.
        mean : Tensor of shape (N, p), float32
            Mean of f over each node's neighbours.
        pairs : Pairs
            E pairs.

        Returns
        -------
        Tensor of shape (E,)
        """
        neighbour, centre, context = self.hidden.weight.chunk(3, dim=1)
        of_centre = F.linear(embedding, centre, self.hidden.bias)
        of_centre = of_centre + F.linear(mean, context)
        of_neighbour = F.linear(embedding, neighbour)
        scores: Tensor = _PairScore.apply(  # type: ignore[no-untyped-call]
            of_neighbour, of_centre, self.out.weight[0], pairs
        )
        return scores


class _PairScore(torch.autograd.Function):
    """``w · LeakyReLU(a_u + b_v)`` for each pair (v, u).

    torch's backward of a gather adds rows one by one; products with 0/1 matrices that
    pick each node's pairs do the same several times faster.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
        hidden = a.index_select(0, pairs.neighbour)
        hidden += b.index_select(0, pairs.centre)
        F.leaky_relu_(hidden, NEGATIVE_SLOPE)
        ctx.save_for_backward(hidden, weight)
        ctx.pairs, ctx.size = pairs, len(a)
        return hidden @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        to_weight = grad @ hidden
        to_hidden = torch.ops.aten.leaky_relu_backward(
            grad[:, None] * weight, hidden, NEGATIVE_SLOPE, True
        )
        by_neighbour, by_centre = ctx.pairs.incidence(ctx.size)
        return by_neighbour @ to_hidden, by_centre @ to_hidden, to_weight, None
