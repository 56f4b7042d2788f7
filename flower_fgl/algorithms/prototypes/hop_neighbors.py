"""Neighbours of each node at each hop, for FedPG's prototypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from flower_fgl.nn.sparse import SparseOperator

__all__ = ["Pairs", "annotate", "ring_pairs", "select_pairs"]


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

    def mean(self, num_nodes: int) -> SparseOperator:
        """Return the matrix (N, N) that averages over each node's neighbours; cached."""
        if "mean" not in self._made:
            start = self.start(num_nodes)
            share = (1 / start.diff()).index_select(0, self.centre)
            swapped, order = self.reverse()
            self._made["mean"] = SparseOperator.from_sorted(
                (start, self.neighbour, share),
                (swapped.start(num_nodes), swapped.neighbour, share[order]),
                (num_nodes, num_nodes),
            )
        found: SparseOperator = self._made["mean"]
        return found

    @property
    def num_bytes(self) -> int:
        """Memory in bytes, including cached tensors."""
        total = self.centre.nbytes + self.neighbour.nbytes
        if "mean" in self._made:
            total += 2 * 8 * len(self.centre)  # 8 bytes per entry and direction
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
    1. Every set of ``limit`` neighbours is equally likely.
    """
    centres = _true_places(annotation >= 0)
    # numbers of one or two bytes: comparing them takes a fraction of the time
    few = len(annotation) == 0 or int(annotation.max()) < 128
    classes = annotation.to(torch.int8 if few else torch.int16)
    selected = [
        _select(pairs, classes, same_class, limit, generator) for pairs in hops[1:]
    ]
    return [Pairs(centres, centres), *selected]


def _select(
    pairs: Pairs,
    classes: Tensor,
    same_class: bool,
    limit: int,
    generator: torch.Generator,
) -> Pairs:
    size = len(classes)
    start = pairs.start(size)
    of_centre = _repeat(classes, start.diff())
    keep = of_centre >= 0
    if same_class:
        keep &= classes.index_select(0, pairs.neighbour) == of_centre
    places = _true_places(keep)
    neighbour = pairs.neighbour.index_select(0, places)
    start = torch.searchsorted(places, start)
    degree = start.diff()
    drawn = _true_places(degree > limit)
    _draw(neighbour, start[drawn], degree[drawn], limit, generator)
    count = degree.clamp(max=limit)
    begin = count.cumsum(0) - count
    place = _repeat(start[:-1] - begin, count)
    place += torch.arange(len(place), device=place.device)
    nodes = torch.arange(size, device=place.device)
    # int64 indices: torch gathers by them twice as fast as by int32
    return Pairs(_repeat(nodes, count), neighbour.index_select(0, place).long())


def _draw(
    neighbour: Tensor,
    start: Tensor,
    degree: Tensor,
    limit: int,
    generator: torch.Generator,
) -> None:
    """Move ``limit`` random neighbours to the start of each list, Fisher-Yates."""
    shape, step = (limit, len(start)), torch.arange(limit, device=start.device)[:, None]
    draw = torch.randint(1 << 31, shape, generator=generator).to(start.device)
    draw *= degree - step
    first = start + step  # (limit, lists)
    other = first + draw.bitwise_right_shift_(31)  # uniform up to degree / 2³¹
    drawn = neighbour.new_empty(shape)
    for out, here, there in zip(drawn, first, other, strict=True):
        torch.index_select(neighbour, 0, there, out=out)
        neighbour.index_copy_(0, there, neighbour.index_select(0, here))
    neighbour.index_copy_(0, first.view(-1), drawn.view(-1))


def _repeat(values: Tensor, counts: Tensor) -> Tensor:
    """Repeat each value; on a CPU numpy takes a tenth of torch's time."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))
    return values.repeat_interleave(counts)


def _true_places(mask: Tensor) -> Tensor:
    """Return where a mask is true; on a CPU numpy takes a fifth of torch's time."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().squeeze(1)
