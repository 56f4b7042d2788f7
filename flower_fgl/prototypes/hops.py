"""A client's prototypes, FedPG Eqs. (1), (2) and (6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.nn import SparseOperator
from flower_fgl.prototypes.rings import Pairs

__all__ = [
    "HopAverage",
    "NeighbourScorer",
    "add_noise",
    "class_means",
    "node_distance",
    "prototype_distance",
    "segment_softmax",
]

NEGATIVE_SLOPE = 0.2
TINY = 1e-12


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


class HopAverage:
    """Multi-hop prototypes of one set of pairs, FedPG Eq. (2★).

    ``P_{c,h} = (1/|V|) Σ_{v∈V} Σ_{u∈N_c^h(v)} w_vu f(x_u)``, V the nodes of class c
    that have a neighbour at hop h.

    Parameters
    ----------
    hops : sequence of Pairs
        Hop 0 first, as :func:`~flower_fgl.prototypes.rings.select_pairs` gives them.
    annotation : Tensor of shape (N,), int64
        Class of each node, -1 for none; centres have one.
    num_classes : int
        Number of classes C.

    Notes
    -----
    1. The paper divides by the number of neighbours as well as by the softmax; only the
       softmax is kept, so that hop 0 is the class mean of Eq. (1).
    2. ``counts`` holds |V|, of shape (C, L + 1), int64; 0 marks a missing prototype.
    """

    def __init__(
        self, hops: Sequence[Pairs], annotation: Tensor, num_classes: int
    ) -> None:
        self.hops = hops
        self.num_classes = num_classes
        self._degree = []
        self._place = []
        self._mean: dict[int, SparseOperator] = {}
        counts = []
        size = len(annotation)
        for pairs in hops:
            degree = torch.bincount(pairs.centre, minlength=size)
            classes = annotation[pairs.centre]
            counts.append(torch.bincount(annotation[degree > 0], minlength=num_classes))
            self._degree.append(degree)
            # where the pair's weight goes in a table (classes, nodes), laid out flat
            self._place.append(classes * size + pairs.neighbour)
        self.counts = torch.stack(counts, dim=1)

    def weights(
        self, embedding: Tensor, hop: int, scorer: NeighbourScorer | None
    ) -> Tensor:
        """Return w_vu of each pair of a hop, of shape (E,); uniform without scorer."""
        pairs = self.hops[hop]
        if scorer is None or hop == 0:
            share: Tensor = 1 / self._degree[hop][pairs.centre]
            return share
        mean = self._mean_operator(hop).matmul(embedding)
        scores = scorer(embedding, mean, pairs)
        return segment_softmax(scores, pairs.centre, len(embedding))

    def _mean_operator(self, hop: int) -> SparseOperator:
        """Return the matrix (N, N) that averages over each node's neighbours."""
        if hop not in self._mean:
            pairs, degree = self.hops[hop], self._degree[hop]
            self._mean[hop] = SparseOperator.from_entries(
                pairs.centre,
                pairs.neighbour,
                1 / degree[pairs.centre],
                (len(degree), len(degree)),
            )
        return self._mean[hop]

    def __call__(
        self, embedding: Tensor, scorer: NeighbourScorer | None = None
    ) -> Tensor:
        """Average embeddings, Eq. (2★).

        Parameters
        ----------
        embedding : Tensor of shape (N, p), float32
            f(x), unit length along ``p``.
        scorer : NeighbourScorer, optional
            Without it all neighbours of a node weigh alike.

        Returns
        -------
        Tensor of shape (C, L + 1, p), float32
            Zero where ``counts == 0``.
        """
        size = len(embedding)
        out = []
        for hop, place in enumerate(self._place):
            weight = self.weights(embedding, hop, scorer)
            flat = embedding.new_zeros(self.num_classes * size)
            table = flat.index_add(0, place, weight).view(self.num_classes, size)
            centres = self.counts[:, hop, None].clamp(min=1)
            out.append(table @ embedding / centres)
        return torch.stack(out, dim=1)


def class_means(embedding: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Average embeddings by class, FedProto Eq. (3) and FedPG Eq. (1).

    Parameters
    ----------
    embedding : Tensor of shape (n, p), float32
        f(x) of the labelled nodes.
    labels : Tensor of shape (n,), int64
        Their classes.
    num_classes : int
        Number of classes C.

    Returns
    -------
    Tensor of shape (C, p), float32
        Zero for a class without nodes.
    """
    count = torch.bincount(labels, minlength=num_classes).clamp(min=1)
    total = embedding.new_zeros(num_classes, embedding.shape[1])
    return total.index_add(0, labels, embedding) / count[:, None]


def prototype_distance(
    local: Tensor, target: Tensor, present: Tensor, *, is_mean: bool
) -> Tensor:
    """Add up the distances of prototypes to their targets, FedPG Eq. (6★).

    ``L_proto = Σ_{c,h} ‖P_{c,h} − Ṗ_{c,h}‖₂``.

    Parameters
    ----------
    local : Tensor of shape (C, H, p), float32
        P of the current weights, with gradient.
    target : Tensor of shape (C, H, p), float32
        Ṗ, a constant.
    present : Tensor of shape (C, H), bool
        Where both exist.
    is_mean : bool
        Whether to divide by the number of terms.

    Returns
    -------
    Tensor of shape ()
        0 if none is present.
    """
    sq_norm = (local - target)[present].square().sum(dim=-1)
    total = (sq_norm + TINY).sqrt().sum()
    return total / max(1, int(present.sum())) if is_mean else total


def node_distance(
    embedding: Tensor,
    target: Tensor,
    present: Tensor,
    hops: Sequence[Pairs],
    annotation: Tensor,
) -> Tensor:
    """Average the squared distances of neighbours to targets, FedPG's published code.

    Parameters
    ----------
    embedding : Tensor of shape (N, p), float32
        f(x), with gradient.
    target : Tensor of shape (C, H, p), float32
        Ṗ, a constant.
    present : Tensor of shape (C, H), bool
        Targets that exist.
    hops : sequence of Pairs, length H
        The neighbours of each hop.
    annotation : Tensor of shape (N,), int64
        Class of each node; centres have one.

    Returns
    -------
    Tensor of shape ()
        Sum over hops of the mean over pairs and dimensions.

    Notes
    -----
    1. The published code picks neighbours by 0/1 masks used as row numbers; the
       neighbours themselves are taken here.
    """
    total = embedding.new_zeros(())
    for hop, pairs in enumerate(hops):
        classes = annotation[pairs.centre]
        keep = present[classes, hop]
        if bool(keep.any()):
            goal = target[classes[keep], hop]
            total = total + F.mse_loss(embedding[pairs.neighbour[keep]], goal)
    return total


def add_noise(
    prototypes: Tensor, *, share: float, generator: torch.Generator
) -> Tensor:
    """Add Gaussian noise to a random part of each prototype, FedPG Sec. IV-G.

    Parameters
    ----------
    prototypes : Tensor of shape (C, H, p), float32
        To be uploaded.
    share : float in [0, 1]
        Part of the dimensions, rounded to the nearest number of them.
    generator : torch.Generator
        Draws dimensions and noise, on the CPU.

    Returns
    -------
    Tensor of shape (C, H, p), float32

    Notes
    -----
    1. The paper gives no scale: σ is the standard deviation of the prototype's entries.
    """
    count = round(share * prototypes.shape[-1])
    if not count:
        return prototypes
    device = prototypes.device
    draw = torch.rand(prototypes.shape, generator=generator)
    order = draw.argsort(dim=-1).argsort(dim=-1)
    noise = torch.randn(prototypes.shape, generator=generator).to(device)
    sigma = prototypes.std(dim=-1, keepdim=True, correction=0)
    return prototypes + noise * sigma * (order < count).to(device)
