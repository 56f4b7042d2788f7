"""A client's multi-hop prototypes and their losses, FedPG Eqs. (1), (2) and (6)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.prototypes.attention import NeighbourScorer, segment_softmax
from flower_fgl.algorithms.prototypes.hop_neighbors import Pairs
from flower_fgl.nn import SparseOperator

__all__ = [
    "HopAverage",
    "add_noise",
    "class_means",
    "largest_shares",
    "node_distance",
    "prototype_distance",
]

TINY = 1e-12


class HopAverage:
    """Multi-hop prototypes of one set of pairs, FedPG Eq. (2★).

    ``P_{c,h} = (1/|V|) Σ_{v∈V} Σ_{u∈N_c^h(v)} w_vu f(x_u)``, V the nodes of class c
    that have a neighbour at hop h.

    Parameters
    ----------
    hops : sequence of Pairs
        Hop 0 first, from
        :func:`~flower_fgl.algorithms.prototypes.hop_neighbors.select_pairs`.
    annotation : Tensor of shape (N,), int64
        Class of each node, -1 for none; every centre has a class.
    num_classes : int
        Number of classes C.

    Notes
    -----
    1. The paper divides by the number of neighbours as well as by the softmax. Here
       only the softmax is kept, so that hop 0 is the class mean of Eq. (1).
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
            degree = pairs.start(size).diff()
            classes = annotation.index_select(0, pairs.centre)
            counts.append(torch.bincount(annotation[degree > 0], minlength=num_classes))
            self._degree.append(degree)
            # position of the pair's weight in a flattened table (classes, nodes)
            self._place.append(classes * size + pairs.neighbour)
        self.counts = torch.stack(counts, dim=1)

    @property
    def num_bytes(self) -> int:
        """Memory in bytes; a matrix takes 8 bytes per entry and direction."""
        tensors = sum(t.nbytes for t in (*self._degree, *self._place, self.counts))
        matrices = sum(2 * 8 * len(self.hops[hop].centre) for hop in self._mean)
        return tensors + matrices + sum(pairs.num_bytes for pairs in self.hops)

    def weights(
        self, embedding: Tensor, hop: int, scorer: NeighbourScorer | None
    ) -> Tensor:
        """Return w_vu of each pair of a hop, of shape (E,); uniform without scorer."""
        pairs = self.hops[hop]
        if scorer is None or hop == 0:
            share: Tensor = (1 / self._degree[hop]).index_select(0, pairs.centre)
            return share
        mean = self._mean_operator(hop).matmul(embedding)
        scores = scorer(embedding, mean, pairs)
        return segment_softmax(scores, pairs.centre, len(embedding))

    def _mean_operator(self, hop: int) -> SparseOperator:
        """Return the matrix (N, N) that averages over each node's neighbours."""
        if hop not in self._mean:
            pairs, size = self.hops[hop], len(self._degree[hop])
            share = (1 / self._degree[hop]).index_select(0, pairs.centre)
            swapped, order = pairs.reverse()
            self._mean[hop] = SparseOperator.from_sorted(
                (pairs.start(size), pairs.neighbour, share),
                (swapped.start(size), swapped.neighbour, share[order]),
                (size, size),
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
            By default all neighbours of a node have equal weights.

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


@torch.no_grad()
def largest_shares(
    average: HopAverage,
    embedding: Tensor,
    annotation: Tensor,
    scorer: NeighbourScorer | None = None,
) -> Tensor:
    """Return the largest weight of a single node in each prototype of Eq. (2★).

    A prototype of many centres may still be the embedding of one hub: in a star of five
    leaves the hub has the weight 5/6.

    Parameters
    ----------
    average : HopAverage
        The prototypes of C classes and H hops.
    embedding : Tensor of shape (N, p), float32
        f(x).
    annotation : Tensor of shape (N,), int64
        Class of each node, as given to ``average``.
    scorer : NeighbourScorer, optional
        By default all neighbours of a node have equal weights.

    Returns
    -------
    Tensor of shape (C, H), float32
        In [0, 1], 0 for a missing prototype. A value of at most 1/m means that at least
        m distinct nodes stand behind the prototype, none of them with a larger weight.
    """
    size, classes = len(embedding), average.num_classes
    shares = torch.zeros_like(average.counts, dtype=torch.float32)
    for hop, pairs in enumerate(average.hops):
        weight = average.weights(embedding, hop, scorer)
        place = annotation[pairs.centre] * size + pairs.neighbour
        table = embedding.new_zeros(classes * size).index_add(0, place, weight)
        centres = average.counts[:, hop].clamp(min=1)
        if size:
            shares[:, hop] = table.view(classes, size).amax(dim=1) / centres
    return shares


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
    """Sum the distances of prototypes to their targets, FedPG Eq. (6★).

    ``L_proto = Σ_{c,h} ‖P_{c,h} − Ṗ_{c,h}‖₂``.

    Parameters
    ----------
    local, target : Tensor of shape (C, H, p), float32
        P of the current weights, with gradient, and the constant Ṗ.
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
    target, present : Tensor of shape (C, H, p) and (C, H)
        Ṗ, a constant, and which targets exist.
    hops : sequence of Pairs, length H
        The neighbours of each hop.
    annotation : Tensor of shape (N,), int64
        Class of each node; every centre has a class.

    Returns
    -------
    Tensor of shape ()
        Sum over hops of the mean over pairs and dimensions.

    Notes
    -----
    1. The published code selects neighbours by 0/1 masks that it uses as row numbers.
       Here the neighbours themselves are selected.
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
        Prototypes to upload.
    share : float in [0, 1]
        Share of the dimensions with noise, rounded to the nearest whole number of
        dimensions.
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
