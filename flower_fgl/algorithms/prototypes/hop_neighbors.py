"""Neighbours of each node at each hop, for FedPG's prototypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from flower_fgl.nn.graph_union import concatenated_ranges
from flower_fgl.nn.sparse import SparseOperator, narrow_csr

__all__ = ["Pairs", "annotate", "draw_two_steps", "ring_pairs", "select_pairs"]

DRAWS = 3
"""Walks per required neighbour, before a node's neighbours are listed."""
MOST_WALKS = 4
"""Walks of two steps per node of the graph up to which a node draws walks. With more,
most walks of the node end at few nodes again and again."""
BLOCK = 1 << 22
"""Walks or candidates in memory at once: some arrays of 32 MiB."""

MOST_PAIRS = 1 << 24
"""Pairs of hop 2 that a client stores: 8 bytes each, 128 MiB."""
ROW_BLOCK = 1 << 21
"""Walks of two steps that are combined at once: about 100 MiB of sparse matrices."""
SPARSE_SHARE = 8
"""Nodes per neighbour at distance two from which these are sorted; below, it is faster to
look through all nodes."""
MOST_COUNTS = 1 << 26
"""Numbers of walks that a client stores: 2 bytes each, 128 MiB."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Centres and their neighbours at one hop.

    Parameters
    ----------
    centre, neighbour : Tensor of shape (E,), int32 or int64
        v and u of each pair, sorted by centre.
    unlisted : Tensor of shape (n,), int64, optional
        Centres whose pairs are left out, because they are too many. Those that
        :func:`select_pairs` needs are drawn by random walks.
    """

    centre: Tensor
    neighbour: Tensor
    unlisted: Tensor | None = None
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

    def mean(self, shape: tuple[int, int]) -> SparseOperator:
        """Return the matrix that averages over each centre's neighbours; cached."""
        if "mean" not in self._made:
            start = self.start(shape[0])
            share = (1 / start.diff()).index_select(0, self.centre)
            swapped, order = self.reverse()
            self._made["mean"] = SparseOperator.from_sorted(
                (start, self.neighbour, share),
                (swapped.start(shape[1]), swapped.neighbour, share[order]),
                shape,
            )
        found: SparseOperator = self._made["mean"]
        return found

    def walks(self, nodes: Tensor, num_nodes: int) -> Tensor:
        """Return the result of :func:`count_walks`; cached for the last nodes."""
        if "walks" in self._made and torch.equal(self._made["walks"][0], nodes):
            found: Tensor = self._made["walks"][1]
            return found
        table = count_walks(self, nodes, num_nodes)
        self._made["walks"] = nodes, table
        return table

    def matrix(self, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return the pairs' numbers (E,) as a matrix of centres and neighbours, CSR.

        Its product with a vector of ones takes half the time of ``segment_reduce``.
        """
        if "index" not in self._made:
            start = self.start(shape[0]).to(torch.int32)
            self._made["index"] = start, self.neighbour.to(torch.int32)
        start, column = self._made["index"]
        return narrow_csr(start, column, values, shape)

    @property
    def num_bytes(self) -> int:
        """Memory in bytes, including cached tensors."""
        total = self.centre.nbytes + self.neighbour.nbytes
        if self.unlisted is not None:
            total += self.unlisted.nbytes
        if "index" in self._made:
            total += sum(tensor.nbytes for tensor in self._made["index"])
        if "mean" in self._made:
            total += 2 * 8 * len(self.centre)  # 8 bytes per entry and direction
        if "start" in self._made:
            total += int(self._made["start"].nbytes)
        if "reverse" in self._made:
            swapped, order = self._made["reverse"]
            total += swapped.num_bytes + order.nbytes
        if "walks" in self._made:
            total += sum(tensor.nbytes for tensor in self._made["walks"])
        return total


def ring_pairs(
    edge_index: Tensor,
    num_nodes: int,
    hops: int,
    *,
    mode: str = "ring",
    most_pairs: int = MOST_PAIRS,
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
    most_pairs : int
        Pairs of hop 2 to store if ``hops`` is 2. The nodes with the fewest walks of two
        steps are listed; the others are ``unlisted``.

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
    3. A hub makes hop 2 quadratic in its degree: the 8,000 leaves of a star have 64
       million pairs. With more than two hops all pairs are stored all the same.
    """
    source, target = edge_index.cpu().numpy()
    ones = np.ones(len(source), dtype=np.float32)
    shape = (num_nodes, num_nodes)
    adjacency = sparse.csr_matrix((ones, (source, target)), shape=shape)
    identity = sparse.identity(num_nodes, dtype=np.float32, format="csr")
    frontier, reached = identity, identity
    device = edge_index.device
    out = [pairs_of(identity, device)]
    for hop in range(1, hops + 1):
        if hop == hops == 2:
            return [*out, _bounded_two_steps(frontier, mode, most_pairs, device)]
        step = boolean(frontier @ adjacency)
        frontier = boolean(step - step.multiply(reached))
        reached = boolean(reached + frontier)
        kept = frontier if mode == "ring" else boolean(reached - identity)
        out.append(pairs_of(kept, device))
    return out


def _bounded_two_steps(
    adjacency: sparse.csr_matrix, mode: str, most_pairs: int, device: torch.device
) -> Pairs:
    """List hop 2 of the nodes with the fewest pairs, block by block."""
    size = adjacency.shape[0]
    degree = np.diff(adjacency.indptr).astype(np.float64)
    walks = adjacency @ degree
    # bounds of the pairs, since all pairs are not counted before they are listed
    bound = np.minimum(walks + degree, size)
    order = np.argsort(bound, kind="stable")
    is_listed = np.zeros(size, dtype=bool)
    is_listed[order[np.cumsum(bound[order]) <= most_pairs]] = True
    nodes = np.flatnonzero(is_listed)
    block = (np.cumsum(walks[nodes]) // ROW_BLOCK).astype(np.int64)
    ends = np.flatnonzero(np.diff(block, append=-1)) + 1
    parts = [pairs_of(sparse.csr_matrix((0, size)), device)]
    for start, end in zip([0, *ends], ends, strict=False):
        rows = nodes[start:end]
        parts.append(pairs_of(two_step_rows(adjacency, rows, mode), device, rows))
    unlisted = torch.from_numpy(np.flatnonzero(~is_listed)).to(device)
    return Pairs(
        torch.cat([part.centre for part in parts]),
        torch.cat([part.neighbour for part in parts]),
        unlisted if len(unlisted) else None,
    )


def two_step_rows(
    adjacency: sparse.csr_matrix, nodes: np.ndarray[Any, Any], mode: str
) -> sparse.csr_matrix:
    """Find the nodes at distance two of some nodes.

    Parameters
    ----------
    adjacency : csr_matrix of shape (N, N)
        Ones for the edges, without loops.
    nodes : array of shape (n,), int64
        The nodes.
    mode : {"ring", "within"}
        Distance exactly 2, or 1 and 2.

    Returns
    -------
    csr_matrix of shape (n, N)
        Ones.
    """
    near = adjacency[nodes]
    step = near @ adjacency
    if step.nnz * SPARSE_SHARE > step.shape[0] * step.shape[1]:
        mask = step.toarray() > 0
        mask[np.repeat(np.arange(len(nodes)), np.diff(near.indptr)), near.indices] = (
            mode == "within"
        )
        mask[np.arange(len(nodes)), nodes] = False
        return _rows_of(mask)
    here = (np.ones(len(nodes), dtype=np.float32), (np.arange(len(nodes)), nodes))
    reached = boolean(near + sparse.csr_matrix(here, shape=near.shape))
    step = boolean(step)
    ring = boolean(step - step.multiply(reached))
    return ring if mode == "ring" else boolean(ring + near)


def boolean(matrix: sparse.csr_matrix) -> sparse.csr_matrix:
    """Set all non-zero entries to 1 and drop the zeros, columns sorted."""
    matrix = matrix.tocsr()
    matrix.eliminate_zeros()
    matrix.sort_indices()
    matrix.data[:] = 1
    return matrix


def _rows_of(mask: np.ndarray[Any, Any]) -> sparse.csr_matrix:
    """Return the true entries of a mask as a sparse matrix of ones."""
    count = np.count_nonzero(mask, axis=1)
    first = np.arange(len(mask)) * mask.shape[1]
    column = np.flatnonzero(mask) - np.repeat(first, count)
    start = np.concatenate([[0], np.cumsum(count)])
    ones = np.ones(len(column), dtype=np.float32)
    return sparse.csr_matrix((ones, column, start), shape=mask.shape)


def pairs_of(
    matrix: sparse.csr_matrix,
    device: torch.device,
    nodes: np.ndarray[Any, Any] | None = None,
) -> Pairs:
    """Return the entries of a matrix as pairs; ``nodes`` are its rows, by default all."""
    if nodes is None:
        nodes = np.arange(matrix.shape[0])
    rows = np.repeat(nodes.astype(np.int32), np.diff(matrix.indptr))
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
    mode: str = "ring",
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
    mode : {"ring", "within"}
        As in :func:`ring_pairs`; used for ``unlisted`` centres.

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
        pick(pairs, classes, same_class, limit, generator) for pairs in hops[1:]
    ]
    if len(hops) > 2 and hops[2].unlisted is not None:
        drawn = draw_two_steps(
            hops[1],
            hops[2].unlisted,
            classes,
            same_class=same_class,
            limit=limit,
            mode=mode,
            generator=generator,
        )
        selected[1] = _merged(selected[1], drawn)
    return [Pairs(centres, centres), *selected]


def _merged(a: Pairs, b: Pairs) -> Pairs:
    """Join the pairs of different centres."""
    centre = torch.cat([a.centre, b.centre])
    order = torch.argsort(centre, stable=True)
    return Pairs(centre[order], torch.cat([a.neighbour, b.neighbour])[order])


def pick(
    pairs: Pairs,
    classes: Tensor,
    same_class: bool,
    limit: int,
    generator: torch.Generator,
) -> Pairs:
    """Keep the pairs of annotated centres, and draw ``limit`` of those with more."""
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


def draw_two_steps(
    adjacency: Pairs,
    nodes: Tensor,
    classes: Tensor,
    *,
    same_class: bool,
    limit: int,
    mode: str,
    generator: torch.Generator,
) -> Pairs:
    """Draw neighbours at distance two by random walks with rejection.

    Parameters
    ----------
    adjacency : Pairs
        Each node and its neighbours, sorted by both; undirected, without loops.
    nodes : Tensor of shape (n,), int64
        The centres.
    classes : Tensor of shape (N,), integer
        Class of each node, -1 for none.
    same_class : bool
        Whether a neighbour must have its centre's class.
    limit : int
        Maximum number of neighbours per centre.
    mode : {"ring", "within"}
        Nodes at distance exactly 2, or at distance 1 or 2.
    generator : torch.Generator
        Draws on the CPU.

    Returns
    -------
    Pairs
        Up to ``limit`` pairs for each centre with a class, sorted by centre.

    Notes
    -----
    1. All walks of two steps from a node are equally likely. A walk to a node that m
       walks reach is accepted with probability 1/m, so every neighbour is equally
       likely; repeated neighbours are skipped. Memory is that of one block of walks.
    2. Where a node's walks do not suffice, its neighbours are listed and drawn from.
       Every set of ``limit`` neighbours is equally likely either way.
    """
    size = len(classes)
    counts = None
    if len(nodes) * size <= MOST_COUNTS:
        counts = _WalkCounts(adjacency, nodes, size)
    walks = _Walks(adjacency, classes, mode, counts)
    rows = nodes[classes[nodes] >= 0]
    parts = []
    rows = rows[walks.number(rows) > 0]
    is_drawn = torch.zeros(size, dtype=torch.bool, device=rows.device)
    few = rows[walks.number(rows) <= MOST_WALKS * size]
    for block in torch.split(few, max(1, BLOCK // (DRAWS * limit))):
        centre, neighbour = walks.draw(block, same_class, limit, generator)
        is_drawn[centre] = True
        parts.append(Pairs(centre.repeat_interleave(limit), neighbour.flatten()))
    listed = rows[~is_drawn[rows]]
    for part in _chunks(walks.number(listed)):
        if counts is None:
            found = _listed(adjacency, listed[part], size, mode)
        else:
            found = counts.listed(listed[part], mode)
        parts.append(pick(found, classes, same_class, limit, generator))
    centre = torch.cat([part.centre for part in parts])
    order = torch.argsort(centre, stable=True)
    neighbour = torch.cat([part.neighbour.long() for part in parts])
    return Pairs(centre[order], neighbour[order])


class _WalkCounts:
    """Numbers of walks of two steps from some nodes to all others, kept for all rounds.

    An entry is the number n of walks, ``~n`` if the nodes also have an edge, and 0 for
    the node itself.
    """

    def __init__(self, adjacency: Pairs, nodes: Tensor, size: int) -> None:
        self.size = size
        self.table = adjacency.walks(nodes, size)
        self.row = torch.zeros(size, dtype=torch.int64, device=nodes.device)
        self.row[nodes] = torch.arange(len(nodes), device=nodes.device)

    def between(self, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of walks between nodes, and whether they have an edge."""
        place = self.row[start].mul_(self.size).add_(end)
        found = self.table.view(-1)[place]
        is_near = found < 0
        return torch.where(is_near, ~found, found).long(), is_near

    def listed(self, nodes: Tensor, mode: str) -> Pairs:
        """List all neighbours of some nodes at distance two."""
        rows = self.table.index_select(0, self.row[nodes])
        mask = (rows > 0 if mode == "ring" else rows != 0).cpu().numpy()
        return pairs_of(_rows_of(mask), nodes.device, nodes.cpu().numpy())


def count_walks(adjacency: Pairs, nodes: Tensor, size: int) -> Tensor:
    """Count the walks of two steps from some nodes to all nodes.

    Parameters
    ----------
    adjacency : Pairs
        Each node and its neighbours, sorted by both; undirected, without loops.
    nodes : Tensor of shape (n,), int64
        The nodes.
    size : int
        Number of all nodes N.

    Returns
    -------
    Tensor of shape (n, N), int16 or int32
        Number m of walks; ``~m`` where the two nodes have an edge, and 0 for a node itself.
    """
    matrix = _matrix_of(adjacency, size)
    most = int(np.diff(matrix.indptr).max(initial=0))
    kind = np.int16 if most < np.iinfo(np.int16).max else np.int32
    table = np.empty((len(nodes), size), dtype=kind)
    places = nodes.cpu().numpy()
    step = max(1, BLOCK // max(1, size))
    for begin in range(0, len(places), step):
        rows = places[begin : begin + step]
        near = matrix[rows]
        made = (near @ matrix).toarray().astype(kind)
        owner = np.repeat(np.arange(len(rows)), np.diff(near.indptr))
        made[owner, near.indices] = ~made[owner, near.indices]
        made[np.arange(len(rows)), rows] = 0
        table[begin : begin + step] = made
    return torch.from_numpy(table).to(nodes.device)


class _Walks:
    """Walks of two steps on an undirected graph."""

    def __init__(
        self,
        adjacency: Pairs,
        classes: Tensor,
        mode: str,
        counts: _WalkCounts | None = None,
    ) -> None:
        self.size = len(classes)
        self.classes, self.mode, self.counts = classes, mode, counts
        self.neighbour = adjacency.neighbour.long()
        self.start = adjacency.start(self.size)
        self.degree = self.start.diff()
        # walks before each pair; sorted code of each pair
        steps = self.degree[self.neighbour].cumsum(0)
        self.before = torch.cat([steps.new_zeros(1), steps])
        self.codes = adjacency.centre.long() * self.size + self.neighbour

    def number(self, nodes: Tensor) -> Tensor:
        """Return the number of walks from each node; within, those of one step too."""
        first, last = self.start[nodes], self.start[nodes + 1]
        two = self.before[last] - self.before[first]
        return two + (last - first) if self.mode == "within" else two

    def draw(
        self, nodes: Tensor, same_class: bool, limit: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the nodes (m,) whose walks found ``limit`` neighbours, and these."""
        draws = DRAWS * limit
        shape, device = (2, len(nodes), draws), nodes.device
        chance = torch.randint(1 << 31, shape, generator=generator).to(device)
        place = (chance[0] * self.number(nodes)[:, None]).bitwise_right_shift_(31)
        start = nodes[:, None].expand(-1, draws)
        end = self._ends(start, place)
        kept = end != start
        if self.counts is None:
            is_near = self._contains(start, end)
        else:
            times, is_near = self.counts.between(start, end)
        if self.mode == "ring":
            kept &= ~is_near
        if same_class:
            kept &= self.classes[end] == self.classes[start]
        if self.counts is None:
            times = torch.ones_like(end)
            times[kept] = self._common(start[kept], end[kept])
        if self.mode == "within":
            times += is_near.long() * kept
        kept &= chance[1] * times < 1 << 31
        rank = torch.arange(draws, device=device)
        code = torch.where(kept, end * draws + rank, -1).sort(dim=1).values
        value = code.div(draws, rounding_mode="floor")
        order = code.remainder(draws)
        order[value < 0] = draws
        order[:, 1:][value[:, 1:] == value[:, :-1]] = draws
        order = order.sort(dim=1).values[:, :limit]  # the first walks to each neighbour
        enough = order[:, -1] < draws
        return nodes[enough], end[enough].gather(1, order[enough])

    def _ends(self, start: Tensor, place: Tensor) -> Tensor:
        """Return the end of each node's walk with a number."""
        first, last = self.start[start], self.start[start + 1]
        walk = self.before[first] + place
        is_one = walk >= self.before[last]  # walks of one step come last
        walk = torch.where(is_one, self.before[first], walk)
        pair = torch.searchsorted(self.before, walk, right=True) - 1
        middle = self.start[self.neighbour[pair]] + walk - self.before[pair]
        near = first + place - (self.before[last] - self.before[first])
        return self.neighbour[torch.where(is_one, near, middle)]

    def _contains(self, centre: Tensor, neighbour: Tensor) -> Tensor:
        """Return whether two nodes have an edge."""
        code = centre * self.size + neighbour
        place = torch.searchsorted(self.codes, code).clamp_(max=len(self.codes) - 1)
        return self.codes[place] == code

    def _common(self, a: Tensor, b: Tensor) -> Tensor:
        """Count the common neighbours of two nodes."""
        is_less = self.degree[a] <= self.degree[b]
        few, many = torch.where(is_less, a, b), torch.where(is_less, b, a)
        out = torch.zeros_like(a)
        for part in _chunks(self.degree[few]):
            count = self.degree[few[part]]
            place = concatenated_ranges(self.start[few[part]], count)
            owner = torch.repeat_interleave(count)
            hit = self._contains(many[part][owner], self.neighbour[place])
            out[part] = torch.bincount(owner[hit], minlength=len(count))
        return out


def _chunks(sizes: Tensor) -> Iterator[slice]:
    """Split entries into slices whose sizes add up to about ``BLOCK``."""
    total = sizes.cumsum(0)
    start = 0
    while start < len(sizes):
        done = int(total[start - 1]) if start else 0
        end = max(start + 1, int(torch.searchsorted(total, done + BLOCK, right=True)))
        yield slice(start, end)
        start = end


def _listed(adjacency: Pairs, nodes: Tensor, size: int, mode: str) -> Pairs:
    """List all neighbours of some nodes at distance two."""
    rows = nodes.cpu().numpy()
    found = two_step_rows(_matrix_of(adjacency, size), rows, mode)
    return pairs_of(found, nodes.device, rows)


def _matrix_of(adjacency: Pairs, size: int) -> sparse.csr_matrix:
    """Return the pairs as a matrix of ones, (N, N)."""
    column = adjacency.neighbour.cpu().numpy()
    start = adjacency.start(size).cpu().numpy()
    ones = np.ones(len(column), dtype=np.float32)
    return boolean(sparse.csr_matrix((ones, column, start), shape=(size, size)))
