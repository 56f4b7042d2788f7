"""Neighbours at each hop, for FedPG's prototypes: listed, and selected."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from scipy import sparse
from torch import Tensor

from flower_fgl.algorithms.prototypes import two_steps
from flower_fgl.algorithms.prototypes.two_steps import (
    Rows,
    TwoStepWalks,
    boolean,
    chunks,
    count_walks,
    two_step_rows,
)
from flower_fgl.nn.sparse import SparseOperator, computed_once, memo_bytes, narrow_csr

__all__ = ["MOST_BYTES", "Pairs", "annotate", "draw_two_steps", "pairs_of"]
__all__ += ["ring_pairs", "select_pairs"]

MOST_BYTES = 1 << 27
"""Bytes in which a client stores pairs of hop 2 (8 each), and as many in which it stores
numbers of walks (2 each)."""
MOST_WALKS = 4
"""Walks of two steps per node of the graph up to which a node draws walks. With more,
most walks of the node end at few nodes again and again."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Centres v and their neighbours u at one hop, (E,), sorted by centre.

    ``unlisted`` (n,) are centres whose pairs are left out, because they are too many.
    Those that :func:`select_pairs` needs are drawn by random walks.
    """

    centre: Tensor
    neighbour: Tensor
    unlisted: Tensor | None = None
    _made: dict[str, Any] = field(default_factory=dict, repr=False)

    def start(self, num_nodes: int) -> Tensor:
        """Return the first pair of each node, of shape (N + 1,), int64; cached."""

        def compute() -> Tensor:
            degree = torch.bincount(self.centre, minlength=num_nodes)
            return F.pad(degree.cumsum(0), (1, 0))

        found: Tensor = computed_once(self._made, "start", compute)
        return found

    def reverse(self) -> tuple[Self, Tensor]:
        """Return the pairs sorted by neighbour, sides swapped; cached.

        Also return the present position of each of them, of shape (E,), int64.
        """

        def compute() -> tuple[Self, Tensor]:
            order = torch.argsort(self.neighbour, stable=True)
            return type(self)(self.neighbour[order], self.centre[order]), order

        found: tuple[Self, Tensor] = computed_once(self._made, "reverse", compute)
        return found

    def mean(self, shape: tuple[int, int]) -> SparseOperator:
        """Return the matrix that averages over each centre's neighbours; cached."""

        def compute() -> SparseOperator:
            start = self.start(shape[0])
            share = (1 / start.diff()).index_select(0, self.centre)
            swapped, order = self.reverse()
            return SparseOperator.from_sorted(
                (start, self.neighbour, share),
                (swapped.start(shape[1]), swapped.neighbour, share[order]),
                shape,
            )

        found: SparseOperator = computed_once(self._made, "mean", compute)
        return found

    def adjacency(self, num_nodes: int) -> sparse.csr_matrix:
        """Return the pairs as a matrix of ones, (N, N)."""
        column = self.neighbour.cpu().numpy()
        start = self.start(num_nodes).cpu().numpy()
        ones = np.ones(len(column), dtype=np.float32)
        shape = (num_nodes, num_nodes)
        return boolean(sparse.csr_matrix((ones, column, start), shape=shape))

    def walks(self, nodes: Tensor, num_nodes: int) -> Tensor:
        """Return the result of :func:`count_walks`; cached for the last nodes."""
        nodes_of, table = self._made.get("walks", (None, None))
        if nodes_of is None or not torch.equal(nodes_of, nodes):
            table = count_walks(self.adjacency(num_nodes), nodes)
            self._made["walks"] = nodes, table
        found: Tensor = table
        return found

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
        return memo_bytes([self.centre, self.neighbour, self.unlisted, self._made])


def pairs_of(
    matrix: sparse.csr_matrix, device: torch.device, nodes: Rows | None = None
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

    From ``logits`` (N, C) of all local nodes, and training nodes ``index`` and their
    classes ``labels`` (n,). Returns the class of each node (N,), -1 where the softmax is
    below ``min_confidence``.
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
    generator: torch.Generator | Sequence[torch.Generator],
    mode: str = "ring",
) -> list[Pairs]:
    """Select the pairs for prototypes, N_c^h(v) of FedPG Sec. III-A.

    Every set of ``limit`` neighbours is equally likely. ``hops`` begin with hop 0.
    ``annotation`` (N,) has the class of each node, -1 for none; all centres of the
    result have a class, and with ``same_class`` their neighbours have it, too. At most
    ``limit`` neighbours per node and hop are drawn, on the CPU; K generators draw for K
    clients of N / K nodes each, whose hops have no ``unlisted`` centres. ``mode`` is
    that of :func:`ring_pairs`, for ``unlisted`` centres.
    """
    centres = _true_places(annotation >= 0)
    # numbers of one or two bytes: comparing them takes a fraction of the time
    few = len(annotation) == 0 or int(annotation.max()) < 128
    classes = annotation.to(torch.int8 if few else torch.int16)
    selected = [
        pick(pairs, classes, same_class, limit, generator) for pairs in hops[1:]
    ]
    if len(hops) > 2 and hops[2].unlisted is not None:
        assert isinstance(generator, torch.Generator)
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
    generator: torch.Generator | Sequence[torch.Generator],
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
    if isinstance(generator, torch.Generator):
        numbers = torch.randint(1 << 31, (limit, len(drawn)), generator=generator)
    else:
        client = drawn.cpu() * len(generator) // size
        counts = torch.bincount(client, minlength=len(generator)).tolist()
        parts = [
            torch.randint(1 << 31, (limit, count), generator=one)
            for count, one in zip(counts, generator, strict=True)
        ]
        numbers = torch.cat(parts, dim=1)
    _draw(neighbour, start[drawn], degree[drawn], numbers)
    count = degree.clamp(max=limit)
    begin = F.pad(count.cumsum(0), (1, 0))
    place = _repeat((start - begin)[:-1], count)
    place += torch.arange(len(place), device=place.device)
    nodes = torch.arange(size, device=place.device)
    # int64 indices: torch gathers by them twice as fast as by int32
    found = neighbour.index_select(0, place).long()
    return Pairs(_repeat(nodes, count), found, None, {"start": begin})


def _draw(neighbour: Tensor, start: Tensor, degree: Tensor, numbers: Tensor) -> None:
    """Move random neighbours to the start of each list, by Fisher-Yates.

    ``numbers`` (limit, lists) are uniform below 2³¹.
    """
    shape = numbers.shape
    step = torch.arange(len(numbers), device=start.device)[:, None]
    draw = numbers.to(start.device)
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
    """Draw up to ``limit`` neighbours at distance two of each of ``nodes`` with a class.

    ``adjacency`` are each node and its neighbours, sorted by both; undirected, without
    loops. Other arguments are those of :func:`select_pairs`. Where a node's walks do not
    suffice, its neighbours are listed and drawn from. Every set of ``limit`` neighbours
    is equally likely either way. Memory is that of one block of walks.
    """
    size = len(classes)
    counted = None
    if 2 * len(nodes) * size <= MOST_BYTES:
        counted = nodes, adjacency.walks(nodes, size)
    start, neighbour = adjacency.start(size), adjacency.neighbour.long()
    walks = TwoStepWalks(start, neighbour, classes, mode, counted)
    rows = nodes[classes[nodes] >= 0]
    parts = []
    rows = rows[walks.number(rows) > 0]
    is_drawn = torch.zeros(size, dtype=torch.bool, device=rows.device)
    few = rows[walks.number(rows) <= MOST_WALKS * size]
    step = max(1, two_steps.BLOCK // (two_steps.DRAWS * limit))
    for block in torch.split(few, step):
        centre, neighbour = walks.draw(block, same_class, limit, generator)
        is_drawn[centre] = True
        parts.append(Pairs(centre.repeat_interleave(limit), neighbour.flatten()))
    listed = rows[~is_drawn[rows]]
    matrix = adjacency.adjacency(size) if counted is None else None
    for part in two_steps.chunks(walks.number(listed)):
        some = listed[part].cpu().numpy()
        if matrix is None:
            near = walks.counted_rows(listed[part])
        else:
            near = two_step_rows(matrix, some, mode)
        found = pairs_of(near, rows.device, some)
        parts.append(pick(found, classes, same_class, limit, generator))
    centre = torch.cat([part.centre for part in parts])
    order = torch.argsort(centre, stable=True)
    neighbour = torch.cat([part.neighbour.long() for part in parts])
    return Pairs(centre[order], neighbour[order])


def ring_pairs(
    edge_index: Tensor,
    num_nodes: int,
    hops: int,
    *,
    mode: str = "ring",
    most_pairs: int = MOST_BYTES // 8,
) -> list[Pairs]:
    """Find the nodes at each distance of each node, FedPG Sec. III-A: L + 1 sets of pairs.

    Hop 0 pairs each node with itself; ``hops`` is L. Beyond the diameter of the graph a
    hop has no pairs. ``edge_index`` (2, E) has the undirected edges in both directions.
    ``mode`` takes nodes at distance exactly h (``ring``), or 1 to h (``within``). Of
    hop 2, if that is the last, at most ``most_pairs`` are stored: the nodes with the
    fewest walks of two steps are listed; the others are ``unlisted``.

    Notes
    -----
    1. The paper does not say which of the two; its "h-hop neighbours" are read as exactly
       h (``ring``).
    2. The nodes first reached by h + 1 steps are the product of those reached by h and
       the adjacency matrix, minus all reached before. Sparse products replace a loop over
       nodes; memory is that of the largest ring.
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
    parts = [pairs_of(sparse.csr_matrix((0, size)), device)]
    for block in chunks(torch.from_numpy(walks[nodes])):
        rows = nodes[block]
        parts.append(pairs_of(two_step_rows(adjacency, rows, mode), device, rows))
    unlisted = torch.from_numpy(np.flatnonzero(~is_listed)).to(device)
    return Pairs(
        torch.cat([part.centre for part in parts]),
        torch.cat([part.neighbour for part in parts]),
        unlisted if len(unlisted) else None,
    )
