"""Two-step neighbours of nodes that have too many to store, for FedPG's prototypes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from flower_fgl.algorithms.prototypes.hop_neighbors import (
    Pairs,
    boolean,
    pairs_of,
    pick,
    two_step_rows,
)
from flower_fgl.nn.graph_union import concatenated_ranges

__all__ = ["draw_two_steps"]

DRAWS = 3
"""Walks per required neighbour, before a node's neighbours are listed."""
MOST_WALKS = 4
"""Walks of two steps per node of the graph up to which a node draws walks. With more,
most walks of the node end at few nodes again and again."""
BLOCK = 1 << 22
"""Walks or candidates in memory at once: some arrays of 32 MiB."""


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
    walks = _Walks(adjacency, classes, mode)
    rows = nodes[classes[nodes] >= 0]
    parts = []
    size = len(classes)
    is_drawn = torch.zeros(size, dtype=torch.bool, device=rows.device)
    few = rows[walks.number(rows) <= MOST_WALKS * size]
    for block in torch.split(few, max(1, BLOCK // (DRAWS * limit))):
        centre, neighbour = walks.draw(block, same_class, limit, generator)
        is_drawn[centre] = True
        parts.append(Pairs(centre.repeat_interleave(limit), neighbour.flatten()))
    listed = rows[~is_drawn[rows]]
    for part in _chunks(walks.number(listed)):
        found = _listed(adjacency, listed[part], size, mode)
        parts.append(pick(found, classes, same_class, limit, generator))
    centre = torch.cat([part.centre for part in parts])
    order = torch.argsort(centre, stable=True)
    neighbour = torch.cat([part.neighbour.long() for part in parts])
    return Pairs(centre[order], neighbour[order])


class _Walks:
    """Walks of two steps on an undirected graph."""

    def __init__(self, adjacency: Pairs, classes: Tensor, mode: str) -> None:
        self.size = len(classes)
        self.classes, self.mode = classes, mode
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
        is_near = self._contains(start, end)
        kept = end != start
        if self.mode == "ring":
            kept &= ~is_near
        if same_class:
            kept &= self.classes[end] == self.classes[start]
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
    device = nodes.device
    column = adjacency.neighbour.cpu().numpy()
    matrix = sparse.csr_matrix(
        (
            np.ones(len(column), dtype=np.float32),
            column,
            adjacency.start(size).cpu().numpy(),
        ),
        shape=(size, size),
    )
    found = two_step_rows(boolean(matrix), nodes.cpu().numpy(), mode)
    return pairs_of(found, device, nodes.cpu().numpy())
