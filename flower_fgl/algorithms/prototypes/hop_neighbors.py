"""Neighbours of each node at each hop, for FedPG's prototypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

__all__ = ["Pairs", "annotate", "ring_pairs", "select_pairs"]

DRAWS = 3
"""Draws with replacement per required neighbour, before listing all neighbours."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Centres and their neighbours at one hop.

    Parameters
    ----------
    centre, neighbour : Tensor of shape (E,), int32 or int64
        v and u of each pair, sorted by centre.
    """

    centre: Tensor
    neighbour: Tensor
    _made: dict[str, Any] = field(default_factory=dict, repr=False)

    def start(self, num_nodes: int) -> Tensor:
        """Return the first pair of each node, of shape (N + 1,), int64; cached."""
        if "start" not in self._made:
            start = torch.zeros(
                num_nodes + 1, dtype=torch.int64, device=self.centre.device
            )
            degree = torch.bincount(self.centre, minlength=num_nodes)
            torch.cumsum(degree, 0, out=start[1:])
            self._made["start"] = start
        found: Tensor = self._made["start"]
        return found

    def reverse(self) -> tuple[Pairs, Tensor]:
        """Return the pairs with their sides swapped; cached.

        Returns
        -------
        Pairs
            Sorted by the present ``neighbour``.
        Tensor of shape (E,), int64
            Present position of each swapped pair.
        """
        if "reverse" not in self._made:
            order = torch.argsort(self.neighbour, stable=True)
            swapped = Pairs(self.neighbour[order], self.centre[order])
            self._made["reverse"] = swapped, order
        found: tuple[Pairs, Tensor] = self._made["reverse"]
        return found

    @property
    def num_bytes(self) -> int:
        """Memory in bytes, including cached tensors."""
        total = self.centre.nbytes + self.neighbour.nbytes
        if "start" in self._made:
            total += int(self._made["start"].nbytes)
        if "reverse" in self._made:
            swapped, order = self._made["reverse"]
            total += swapped.num_bytes + order.nbytes
        return total


def ring_pairs(
    edge_index: Tensor, num_nodes: int, hops: int, *, mode: str = "ring"
) -> list[Pairs]:
    """Find the nodes at each distance of each node, FedPG Sec. III-A.

    Parameters
    ----------
    edge_index : Tensor of shape (2, E), int64
        Undirected edges in both directions.
    num_nodes : int
        Number of nodes N.
    hops : int, at least 0
        L, the largest distance.
    mode : {"ring", "within"}
        Nodes at distance exactly h, or at distance 1 to h.

    Returns
    -------
    list of Pairs
        Length L + 1; hop 0 pairs each node with itself. Beyond the diameter of the
        graph a hop has no pairs.

    Notes
    -----
    1. The paper does not say which of the two; its "h-hop neighbours" are read as
       exactly h (``ring``).
    2. The nodes first reached by h + 1 steps are the product of those reached by h and
       the adjacency matrix, minus all reached before. Sparse products replace a loop
       over nodes; memory is that of the largest ring.
    """
    source, target = edge_index.cpu().numpy()
    ones = np.ones(len(source), dtype=np.float32)
    shape = (num_nodes, num_nodes)
    adjacency = sparse.csr_matrix((ones, (source, target)), shape=shape)
    identity = sparse.identity(num_nodes, dtype=np.float32, format="csr")
    frontier, reached = identity, identity
    out = [_pairs(identity, edge_index.device)]
    for _ in range(hops):
        step = _boolean(frontier @ adjacency)
        frontier = _boolean(step - step.multiply(reached))
        reached = _boolean(reached + frontier)
        kept = frontier if mode == "ring" else _boolean(reached - identity)
        out.append(_pairs(kept, edge_index.device))
    return out


def _boolean(matrix: sparse.csr_matrix) -> sparse.csr_matrix:
    """Set all non-zero entries to 1 and drop the zeros, columns sorted."""
    matrix = matrix.tocsr()
    matrix.eliminate_zeros()
    matrix.sort_indices()
    matrix.data[:] = 1
    return matrix


def _pairs(matrix: sparse.csr_matrix, device: torch.device) -> Pairs:
    rows = np.repeat(np.arange(matrix.shape[0], dtype=np.int32), np.diff(matrix.indptr))
    columns = matrix.indices.astype(np.int32)
    return Pairs(
        torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)
    )


def annotate(
    logits: Tensor, index: Tensor, labels: Tensor, *, min_confidence: float
) -> Tensor:
    """Annotate nodes by prediction, training nodes by their label, FedPG Algorithm 1.

    Parameters
    ----------
    logits : Tensor of shape (N, C), float32
        Predictions for all local nodes.
    index, labels : Tensor of shape (n,), int64
        Training nodes and their classes.
    min_confidence : float in [0, 1]
        Softmax probability below which a node gets no class.

    Returns
    -------
    Tensor of shape (N,), int64
        Class of each node, -1 for none.
    """
    confidence, classes = logits.softmax(dim=1).max(dim=1)
    annotation = torch.where(confidence >= min_confidence, classes, -1)
    annotation[index] = labels
    return annotation


def select_pairs(
    hops: Sequence[Pairs],
    annotation: Tensor,
    *,
    same_class: bool,
    limit: int,
    generator: torch.Generator,
) -> list[Pairs]:
    """Select the pairs for prototypes, N_c^h(v) of FedPG Sec. III-A.

    Parameters
    ----------
    hops : sequence of Pairs
        Hop 0 first.
    annotation : Tensor of shape (N,), int64
        Class of each node, -1 for none.
    same_class : bool
        Whether a neighbour must have its centre's class.
    limit : int
        Maximum number of neighbours per node and hop.
    generator : torch.Generator
        Draws the neighbours, on the CPU.

    Returns
    -------
    list of Pairs
        All centres are annotated.

    Notes
    -----
    1. Nodes with many neighbours draw with replacement. Repeated neighbours and those
       of another class are skipped until there are ``limit``. If a node's draws do not
       suffice, all its neighbours are listed and ``limit`` of them are drawn again.
       Either way every set of ``limit`` neighbours is equally likely.
    """
    return [_select(p, annotation, same_class, limit, generator) for p in hops]


def _select(
    pairs: Pairs,
    annotation: Tensor,
    same_class: bool,
    limit: int,
    generator: torch.Generator,
) -> Pairs:
    size = len(annotation)
    start = pairs.start(size)
    degree = start.diff()
    listed = annotation >= 0
    crowded = (listed & (degree > DRAWS * limit)).nonzero().squeeze(1)
    found, drawn = _draw(pairs, annotation, crowded, same_class, limit, generator)
    listed[found] = False
    kept = _listed(pairs, start, listed.nonzero().squeeze(1))
    if same_class:
        same = annotation[kept.centre] == annotation[kept.neighbour]
    else:
        same = annotation[kept.centre] >= 0
    kept = Pairs(kept.centre[same], kept.neighbour[same])
    kept = _subsample(kept, size, limit, generator)
    # write listed and drawn neighbours to their positions, which avoids a sort
    count = kept.start(size).diff()
    rank = torch.arange(len(kept.centre), device=start.device)
    rank -= kept.start(size)[kept.centre]
    count[found] = limit
    end = count.cumsum(0)
    neighbour = kept.neighbour.new_empty(int(end[-1]) if size else 0)
    begin = end - count
    neighbour[begin[kept.centre] + rank] = kept.neighbour
    ranks = torch.arange(limit, device=start.device)
    neighbour[begin[found][:, None] + ranks] = drawn
    nodes = torch.arange(size, dtype=neighbour.dtype, device=start.device)
    return Pairs(nodes.repeat_interleave(count), neighbour)


def _draw(
    pairs: Pairs,
    annotation: Tensor,
    nodes: Tensor,
    same_class: bool,
    limit: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Draw neighbours with replacement; return nodes that have ``limit``, and these."""
    draws = DRAWS * limit
    start = pairs.start(len(annotation))
    place = torch.rand(len(nodes), draws, generator=generator, dtype=torch.float64)
    place = place.to(start.device) * start.diff()[nodes][:, None]
    found = pairs.neighbour[place.long() + start[nodes][:, None]]
    code = found.long() * draws + torch.arange(draws, device=start.device)
    if same_class:
        code[annotation[found] != annotation[nodes][:, None]] = -1
    code = _sort_rows(code)  # by neighbour, then by draw
    value = code.div(draws, rounding_mode="floor")
    order = code.remainder(draws)
    order[value < 0] = draws
    order[:, 1:][value[:, 1:] == value[:, :-1]] = draws
    order = _sort_rows(order)[:, :limit]  # the first draws of each neighbour
    enough = order[:, -1] < draws
    return nodes[enough], found[enough].gather(1, order[enough])


def _sort_rows(matrix: Tensor) -> Tensor:
    """Sort each row; on a CPU numpy sorts integers many times faster than torch."""
    if matrix.device.type == "cpu":
        return torch.from_numpy(np.sort(matrix.numpy(), axis=1))
    return matrix.sort(dim=1).values


def _listed(pairs: Pairs, start: Tensor, nodes: Tensor) -> Pairs:
    """Return the pairs of some centres."""
    count = start.diff()[nodes]
    shift = start[nodes] - (count.cumsum(0) - count)
    place = torch.repeat_interleave(shift, count)
    place += torch.arange(len(place), device=start.device)
    return Pairs(pairs.centre[place], pairs.neighbour[place])


def _subsample(
    pairs: Pairs, num_nodes: int, limit: int, generator: torch.Generator
) -> Pairs:
    """Draw ``limit`` neighbours uniformly for every node that has more."""
    degree = torch.bincount(pairs.centre, minlength=num_nodes)
    crowded = (degree > limit)[pairs.centre]
    if not bool(crowded.any()):
        return pairs
    places = crowded.nonzero().squeeze(1)
    draw = torch.rand(len(places), generator=generator, dtype=torch.float64)
    draw = draw.to(places.device)
    many = torch.where(degree > limit, degree, 0)
    # sorting by centre plus a number below 1 shuffles within each centre
    places = places[torch.argsort(pairs.centre[places] + draw)]
    start = many.cumsum(0) - many
    rank = torch.arange(len(places), device=places.device)
    rank -= start[pairs.centre[places]]
    keep = ~crowded
    keep[places[rank < limit]] = True
    return Pairs(pairs.centre[keep], pairs.neighbour[keep])
