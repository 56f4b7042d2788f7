"""A client's multi-hop prototypes and their losses, FedPG Eqs. (1), (2) and (6)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.prototypes.attention import Scorer, UnitRows
from flower_fgl.algorithms.prototypes.hop_neighbors import Pairs
from flower_fgl.core.seeds import hidden_normal, hidden_uniform
from flower_fgl.nn import SparseOperator
from flower_fgl.nn.sparse import index_sum, memo_bytes

__all__ = ["HopAverage", "add_noise", "class_means", "node_distance"]
__all__ += ["prototype_distance"]

TINY = 1e-12
MOST_DENSE_ROWS = 64
"""Rows of the table of equal weights, C · (L + 1), up to which a dense product is faster
than a sparse one."""


class HopAverage:
    """Multi-hop prototypes of one set of pairs, FedPG Eq. (2★).

    ``P_{c,h} = (1/|V|) Σ_{v∈V} Σ_{u∈N_c^h(v)} w_vu f(x_u)``, V the nodes of class c
    that have a neighbour at hop h. ``hops`` are those of
    :func:`~flower_fgl.algorithms.prototypes.hop_neighbors.select_pairs`, hop 0 first.
    ``annotation`` (N,) or (K, n) has the class of each node, -1 for none; every centre
    has a class. For K clients, whose pairs are numbered by rows of the flattened (K ·
    n), all results have one more dimension K, and so have the embeddings (K, n, p).

    Notes
    -----
    1. The paper divides by the number of neighbours as well as by the softmax. Here only
       the softmax is kept, so that hop 0 is the class mean of Eq. (1).
    2. ``counts`` holds |V|, of shape (C, L + 1), int64; 0 marks a missing prototype.
    3. All weights of a class and hop form a row over the nodes: prototypes are the
       product of this table and the embeddings. Without attention it is constant.
    """

    def __init__(
        self, hops: Sequence[Pairs], annotation: Tensor, num_classes: int
    ) -> None:
        self.hops = hops
        self._uniform: Tensor | SparseOperator | None = None
        counts, places, centres = [], [], []
        self._width = width = annotation.shape[-1]
        flat = annotation.flatten()
        size, rows = len(flat), num_classes * len(hops)
        self._num_clients = size // width if width else 1
        # the class of a node among those of all clients
        cells = flat
        if annotation.dim() > 1:
            nodes = torch.arange(size, device=flat.device)
            cells = flat + num_classes * self.clients_of(nodes)
        for hop, pairs in enumerate(hops):
            degree = pairs.start(size).diff()
            counts.append(
                torch.bincount(
                    cells[degree > 0], minlength=self._num_clients * num_classes
                )
            )
            # position of the pair's weight in a flattened table (K, classes, hops, n)
            place = (cells.index_select(0, pairs.centre) * len(hops) + hop) * width
            place += pairs.neighbour
            if annotation.dim() > 1:
                place -= width * self.clients_of(pairs.centre)
            places.append(place)
            centres.append(pairs.centre + (hop - 1) * size)
        shape = (*annotation.shape[:-1], num_classes, len(hops))
        self.counts = torch.stack(counts, dim=1).view(shape)
        # each node at hop 0 has weight 1
        table = torch.zeros(rows * size, device=annotation.device)
        self._own = table.index_fill_(0, places[0], 1.0)
        nothing = places[0][:0]
        self._place = torch.cat([nothing, *places[1:]])
        self.around = Pairs(
            torch.cat([nothing, *centres[1:]]),
            torch.cat([nothing, *(pairs.neighbour for pairs in hops[1:])]),
        )

    def clients_of(self, nodes: Tensor) -> Tensor:
        """Return the client of each node, or of each centre in ``around``: 0 to K − 1."""
        if self._num_clients == 1:
            return torch.zeros_like(nodes)
        return nodes // self._width % self._num_clients

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        own = (self._own, self._place, self.counts, self._uniform)
        return memo_bytes([*own, self.around, *self.hops])

    def weights(self, embedding: UnitRows, scorer: Scorer | None) -> Tensor:
        """Return w_vu of each pair of ``around``, the pairs beyond hop 0, (E,)."""
        around, size = self.around, embedding.scale.numel()
        num_hops = len(self.hops) - 1
        if scorer is None or not len(around.centre):
            share = 1 / around.start(num_hops * size).diff()
            return share.index_select(0, around.centre)
        found: Tensor = scorer(embedding, around, num_hops)
        return found

    def _table(self, weights: Tensor) -> Tensor:
        """Return the weight of each node in each prototype, (C · (L + 1), N)."""
        table = self._own.to(weights.dtype).index_add(0, self._place, weights)
        centres = self.counts.flatten(-2)[..., None].clamp(min=1)
        return table.view(*centres.shape[:-1], self._width) / centres

    @torch.no_grad()
    def largest_shares(self, weights: Tensor) -> Tensor:
        """Return the largest weight of a node in each prototype, (C, L + 1), in [0, 1].

        A prototype of many centres may still be the embedding of one hub: in a star of
        five leaves the hub has the weight 5/6. A value of at most 1/m means that at least m
        distinct nodes stand behind the prototype, none of them with a larger weight; 0 is a
        missing prototype. ``weights`` is the result of :meth:`weights`.
        """
        table = self._table(weights)
        if not table.shape[-1]:
            return table.new_zeros(self.counts.shape)
        return table.amax(dim=-1).view(self.counts.shape)

    def combine(self, embedding: UnitRows, weights: Tensor) -> Tensor:
        """Average embeddings with the result of :meth:`weights`, see :meth:`__call__`."""
        made = embedding.sum(self._table(weights))
        return made.view(*self.counts.shape, -1)

    def __call__(self, embedding: Tensor, scorer: Scorer | None = None) -> Tensor:
        """Average f (N, p), Eq. (2★): (C, L + 1, p), zero where ``counts == 0``.

        The rows of f are normalised. Without ``scorer`` all neighbours of a node have
        equal weights.
        """
        unit = UnitRows(embedding)
        if scorer is not None:
            return self.combine(unit, self.weights(unit, scorer))
        if self._uniform is None:
            table = self._table(self.weights(unit, None))
            self._uniform = table
            if table.dim() == 2 and len(table) > MOST_DENSE_ROWS:
                self._uniform = SparseOperator(table.to_sparse_csr())
        if isinstance(self._uniform, Tensor):
            made = unit.sum(self._uniform)
        else:
            made = self._uniform.matmul(unit.normalised())
        return made.view(*self.counts.shape, -1)


def class_means(embedding: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Average embeddings (n, p) by their labels (n,), FedProto Eq. (3) and FedPG Eq. (1).

    The means (C, p) are zero for a class without nodes.
    """
    count = torch.bincount(labels, minlength=num_classes).clamp(min=1)
    return index_sum(embedding, labels, num_classes) / count[:, None]


def prototype_distance(
    local: Tensor, target: Tensor, present: Tensor, *, is_mean: bool
) -> Tensor:
    """Sum the distances of prototypes to their targets, FedPG Eq. (6★); 0 without any.

    ``L_proto = Σ_{c,h} ‖P_{c,h} − Ṗ_{c,h}‖₂``. ``local`` is P (C, H, p) of the current
    weights, with gradient, ``target`` the constant Ṗ, and ``present`` (C, H) is true
    where both exist. If it ``is_mean``, the sum is divided by the number of terms. For K
    clients all have one more dimension K, and the result is (K,).
    """
    sq_norm = (local - target).square().sum(dim=-1)
    total = (present * (sq_norm + TINY).sqrt()).sum((-2, -1))
    return total / present.sum((-2, -1)).clamp(min=1) if is_mean else total


def node_distance(
    embedding: Tensor,
    target: Tensor,
    present: Tensor,
    hops: Sequence[Pairs],
    annotation: Tensor,
) -> Tensor:
    """Average the squared distances of neighbours to targets, FedPG's published code.

    The sum over hops of the mean over pairs and dimensions. ``embedding`` (N, p) is
    f(x), with gradient; its rows are scaled to length 1. ``target`` (C, H, p) is Ṗ, a
    constant, and ``present`` (C, H) says which exist. The ``hops`` are H sets of
    neighbours, and ``annotation`` (N,) has the class of each node; every centre has
    one. For K clients all arguments have one more dimension K, pairs are numbered by
    rows of the flattened (K · n), and the result is (K,).

    Notes
    -----
    1. The published code selects neighbours by 0/1 masks that it uses as row numbers.
       Here the neighbours themselves are selected.
    """
    width, flat = embedding.shape[-2], annotation.flatten()
    unit = F.normalize(embedding.flatten(0, -2), dim=1)
    total = unit.new_zeros(unit.shape[0] // width if width else 1)
    target = target.flatten(0, -3)  # (K · C, H, p)
    present = present.flatten(0, -2)
    classes_per_client = len(target) // len(total)
    for hop, pairs in enumerate(hops):
        client = pairs.centre // width if len(total) > 1 else 0 * pairs.centre
        cells = flat[pairs.centre] + client * classes_per_client
        keep = present[cells, hop]
        cells, client = cells[keep], client[keep]
        apart = F.mse_loss(
            unit[pairs.neighbour[keep]], target[cells, hop], reduction="none"
        ).mean(dim=1)
        number = torch.bincount(client, minlength=len(total)).clamp(min=1)
        total = total + index_sum(apart, client, len(total)) / number
    return total.view(embedding.shape[:-2])


def add_noise(
    prototypes: Tensor, *, share: float, generator: torch.Generator | None = None
) -> Tensor:
    """Add Gaussian noise to a random part of each prototype (..., p), FedPG Sec. IV-G.

    ``share`` of the dimensions get noise, rounded to a whole number of them.
    ``generator`` draws dimensions and noise in tests; by default the operating system.

    Notes
    -----
    1. The paper gives no scale: σ is the standard deviation of the prototype's entries.
    """
    count = round(share * prototypes.shape[-1])
    if not count:
        return prototypes
    device = prototypes.device
    draw = hidden_uniform(prototypes.shape, generator=generator)
    order = draw.argsort(dim=-1).argsort(dim=-1)
    noise = hidden_normal(prototypes.shape, generator=generator).to(device)
    sigma = prototypes.std(dim=-1, keepdim=True, correction=0)
    return prototypes + noise * sigma * (order < count).to(device)
