"""Nodes at distance two: listed by sparse products, or drawn by random walks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from flower_fgl.nn.graph_union import concatenated_ranges

__all__ = ["Rows", "TwoStepWalks", "boolean", "chunks", "count_walks", "two_step_rows"]

Rows = np.ndarray[Any, Any]

DRAWS = 3
"""Walks per required neighbour, before a node's neighbours are listed."""
BLOCK = 1 << 22
"""Walks in memory at once: some arrays of 32 MiB."""


def boolean(matrix: sparse.csr_matrix) -> sparse.csr_matrix:
    """Set all non-zero entries to 1 and drop the zeros, columns sorted."""
    matrix = matrix.tocsr()
    matrix.eliminate_zeros()
    matrix.sort_indices()
    matrix.data[:] = 1
    return matrix


def two_step_rows(
    adjacency: sparse.csr_matrix, nodes: Rows, mode: str
) -> sparse.csr_matrix:
    """Find the nodes at distance two of n nodes, those at distance one too if ``within``.

    ``adjacency`` (N, N) has ones for the edges and no loops; so has the result (n, N).
    """
    near = adjacency[nodes]
    here = (np.ones(len(nodes), dtype=np.float32), (np.arange(len(nodes)), nodes))
    reached = boolean(near + sparse.csr_matrix(here, shape=near.shape))
    step = boolean(near @ adjacency)
    ring = boolean(step - step.multiply(reached))
    return ring if mode == "ring" else boolean(ring + near)


def chunks(sizes: Tensor) -> Iterator[slice]:
    """Split entries into slices whose sizes add up to about ``BLOCK``."""
    total = sizes.cumsum(0)
    start = 0
    while start < len(sizes):
        done = int(total[start - 1]) if start else 0
        end = max(start + 1, int(torch.searchsorted(total, done + BLOCK, right=True)))
        yield slice(start, end)
        start = end


def count_walks(adjacency: sparse.csr_matrix, nodes: Tensor) -> Tensor:
    """Count the walks of two steps from n nodes to all nodes: (n, N), int16 or int32.

    The entry is the number m of walks; ``~m`` where the two nodes have an edge, and 0 for
    a node itself.
    """
    size = adjacency.shape[0]
    most = int(np.diff(adjacency.indptr).max(initial=0))
    kind = np.int16 if most < np.iinfo(np.int16).max else np.int32
    table = np.empty((len(nodes), size), dtype=kind)
    places = nodes.cpu().numpy()
    step = max(1, BLOCK // max(1, size))
    for begin in range(0, len(places), step):
        rows = places[begin : begin + step]
        near = adjacency[rows]
        made = (near @ adjacency).toarray().astype(kind)
        owner = np.repeat(np.arange(len(rows)), np.diff(near.indptr))
        made[owner, near.indices] = ~made[owner, near.indices]
        made[np.arange(len(rows)), rows] = 0
        table[begin : begin + step] = made
    return torch.from_numpy(table).to(nodes.device)


class TwoStepWalks:
    """Walks of two steps on an undirected graph without loops.

    The neighbours of node v are the entries of ``neighbour`` (E,) from ``start[v]`` to
    ``start[v + 1]``, sorted; ``classes`` (N,) are -1 for none. With the mode ``ring``
    walks end at distance exactly 2, with ``within`` at distance 1 or 2. ``counted`` are
    nodes (n,) and the result of :func:`count_walks` for them, which saves counting.
    """

    def __init__(
        self,
        start: Tensor,
        neighbour: Tensor,
        classes: Tensor,
        mode: str,
        counted: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.size = len(classes)
        self.classes, self.mode = classes, mode
        self.start, self.neighbour = start, neighbour
        self.degree = start.diff()
        # walks before each pair; sorted code of each pair
        steps = self.degree[neighbour].cumsum(0)
        self.before = torch.cat([steps.new_zeros(1), steps])
        nodes = torch.arange(self.size, device=start.device)
        self.codes = nodes.repeat_interleave(self.degree) * self.size + neighbour
        self.table: Tensor | None = None
        if counted is not None:
            of_node, self.table = counted
            self.row = torch.zeros_like(nodes)
            self.row[of_node] = torch.arange(len(of_node), device=start.device)

    def number(self, nodes: Tensor) -> Tensor:
        """Return the number of walks from each node; within, those of one step too."""
        first, last = self.start[nodes], self.start[nodes + 1]
        two = self.before[last] - self.before[first]
        return two + (last - first) if self.mode == "within" else two

    def counted_rows(self, nodes: Tensor) -> sparse.csr_matrix:
        """Return :func:`two_step_rows` of n nodes, by the kept numbers of walks."""
        assert self.table is not None
        found = self.table.index_select(0, self.row[nodes])
        mask = (found > 0 if self.mode == "ring" else found != 0).cpu().numpy()
        # twice as fast as scipy's conversion
        start = np.concatenate([[0], np.count_nonzero(mask, axis=1).cumsum()])
        first = np.repeat(np.arange(len(mask)) * self.size, np.diff(start))
        column = np.flatnonzero(mask) - first
        ones = np.ones(len(column), dtype=np.float32)
        return sparse.csr_matrix((ones, column, start), shape=mask.shape)

    def draw(
        self, nodes: Tensor, same_class: bool, limit: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw ``limit`` neighbours of each node by walks with rejection.

        Returns the nodes (m,) whose walks found as many, and these neighbours (m, limit).
        All walks from a node are equally likely. A walk to a node that m walks reach is
        accepted with probability 1/m, so every neighbour is equally likely; repeated
        neighbours are skipped.
        """
        draws = DRAWS * limit
        shape, device = (2, len(nodes), draws), nodes.device
        chance = torch.randint(1 << 31, shape, generator=generator).to(device)
        place = (chance[0] * self.number(nodes)[:, None]).bitwise_right_shift_(31)
        start = nodes[:, None].expand(-1, draws)
        end = self._ends(start, place)
        kept = end != start
        if self.table is None:
            is_near = self._contains(start, end)
        else:
            found = self.table.view(-1)[self.row[start].mul_(self.size).add_(end)]
            is_near = found < 0
            times = torch.where(is_near, ~found, found).long()
        if self.mode == "ring":
            kept &= ~is_near
        if same_class:
            kept &= self.classes[end] == self.classes[start]
        if self.table is None:
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
        for part in chunks(self.degree[few]):
            count = self.degree[few[part]]
            place = concatenated_ranges(self.start[few[part]], count)
            owner = torch.repeat_interleave(count)
            hit = self._contains(many[part][owner], self.neighbour[place])
            out[part] = torch.bincount(owner[hit], minlength=len(count))
        return out
