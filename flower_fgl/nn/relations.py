"""Edges of several relations, and means and sums of messages along them.

The representations of one graph are (N, p), those of K stacked ones (K, n, p), see
:mod:`flower_fgl.nn.stacked`; pairs and edges of the latter name flattened rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flower_fgl.nn.graph_union import concatenated_ranges
from flower_fgl.nn.sparse import SparseOperator, computed_once, index_sum

__all__ = ["RelationPairs", "Relations", "StackedRelations", "relation_means"]
__all__ += ["relation_sum", "sum_at_targets"]

FEWEST = 10_000
"""Edges from which a matrix takes means faster than sums of single rows. It takes half the
time and memory with a million edges, and 1 ms to build, which batches of small graphs do in
each step."""


@dataclass(frozen=True, eq=False)
class RelationPairs:
    """Edges grouped by pairs (r, i) of a relation and a node that it reaches.

    The S pairs are sorted by relation, those of K graphs first by graph. ``source`` and
    ``pair`` (M,), ascending, are those of each message; ``relation`` (k·R + r in graph k)
    and ``target`` (S,) those of each pair, ``count`` (S,), float, its messages. ``sizes``
    are the numbers of pairs of each of the R relations, in each graph. ``mask`` (M,) are
    weights in [0, 1] of the messages; ``count`` then counts those above 0.
    """

    source: Tensor
    pair: Tensor
    relation: Tensor
    target: Tensor
    count: Tensor
    sizes: tuple[int, ...]
    mask: Tensor | None = None
    operators: dict[tuple[int, torch.dtype], SparseOperator] = field(
        default_factory=dict
    )

    @classmethod
    def of(
        cls,
        index: Tensor,
        relation: Tensor,
        num_relations: int,
        mask: Tensor | None = None,
    ) -> RelationPairs:
        """Group edges (2, M) with their relations and weights (M,), in any order."""
        source, target = index
        width = int(target.max()) + 1 if target.numel() else 1
        code = relation * width + target
        order = torch.argsort(code, stable=True)
        distinct, pair, count = torch.unique_consecutive(
            code[order], return_inverse=True, return_counts=True
        )
        found = distinct // width
        sizes = torch.bincount(found, minlength=num_relations).tolist()
        if mask is not None:
            mask = mask[order]
            count = index_sum((mask > 0).long(), pair, len(count)).clamp(min=1)
        return cls(
            source[order],
            pair,
            found,
            distinct % width,
            count.to(torch.get_default_dtype()),
            tuple(sizes),
            mask,
        )

    @classmethod
    def stacked(cls, parts: Sequence[RelationPairs], num_rows: int) -> RelationPairs:
        """Join the pairs of K graphs, of which each gets n rows.

        Each has as many pairs of a relation as the graph with most. Pairs that it lacks
        have mean 0.
        """
        sizes = torch.tensor([part.sizes for part in parts])  # (K, R)
        widest, graphs = sizes.amax(0), torch.arange(len(parts))
        total, number = int(widest.sum()), sizes.shape[1]
        first = graphs[:, None] * total + widest.cumsum(0) - widest
        slot = concatenated_ranges(first.flatten(), sizes.flatten())

        def joined(values: Sequence[Tensor], step: int) -> Tensor:
            """Concatenate numbers, raised by ``step`` from graph to graph."""
            found = [v + step * k for k, v in enumerate(values)]
            return torch.cat(found)

        device = parts[0].source.device
        slot = slot.to(device)
        target = (graphs * num_rows).repeat_interleave(total).to(device)
        target[slot] = joined([part.target for part in parts], num_rows)
        count = parts[0].count.new_ones(len(target))
        count[slot] = torch.cat([part.count for part in parts])
        before = [0, *sizes.sum(1).cumsum(0).tolist()]
        pair = [part.pair + start for part, start in zip(parts, before, strict=False)]
        relation = torch.arange(number).repeat_interleave(widest)
        relation = (graphs[:, None] * number + relation).flatten().to(device)
        source = joined([part.source for part in parts], num_rows)
        all_pairs = slot[torch.cat(pair)]
        return cls(source, all_pairs, relation, target, count, tuple(widest.tolist()))

    def means(self, num_nodes: int, dtype: torch.dtype) -> SparseOperator:
        """Return the matrix (S, N) that takes means over neighbours, computed once."""

        def make() -> SparseOperator:
            sizes = torch.bincount(self.pair, minlength=len(self.count))
            start = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
            value = (1 / self.count).to(dtype)[self.pair]
            shape = (len(self.count), num_nodes)
            return SparseOperator.from_rows(start, self.source, value, shape)

        return computed_once(self.operators, (num_nodes, dtype), make)

    def weigh(self, rows: Tensor) -> Tensor:
        """Multiply messages (M, p) by their weights, if they have any."""
        return rows if self.mask is None else rows * self.mask[:, None]


@dataclass(frozen=True, eq=False)
class Relations:
    """Kinds of the N nodes of a graph, and its M edges with their relations 0 to R - 1.

    ``index`` (2, M) are source and target of each edge; ``mask`` (M,) are weights in [0,
    1], by which the messages are multiplied.
    """

    node_type: Tensor
    index: Tensor
    relation: Tensor
    mask: Tensor | None = None
    groups: dict[bool, RelationPairs] = field(default_factory=dict, init=False)

    def to(self, device: torch.device) -> Relations:
        """Return the same edges on a device."""
        return Relations(
            self.node_type.to(device), self.index.to(device), self.relation.to(device)
        )

    @property
    def num_pairs(self) -> int:
        """Number of pairs of a relation and a node that it reaches, in the larger way."""
        return max(len(self._grouped(is_back).count) for is_back in (False, True))

    @property
    def held(self) -> tuple[int, ...]:
        """Relations that have edges."""
        return tuple(r for r, size in enumerate(self._grouped().sizes) if size)

    def rows_of(self, per_kind: Tensor) -> Tensor:
        """Return the vector of each node's kind, (N, p), from those of all kinds (A, p)."""
        return per_kind.index_select(0, self.node_type)

    def pairs(self, num_relations: int, *, is_back: bool = False) -> RelationPairs:
        """Return the grouped edges, those against their direction if ``is_back``."""
        if self.mask is not None:
            index = self.index.flip(0) if is_back else self.index
            return RelationPairs.of(index, self.relation, num_relations, self.mask)
        found = self._grouped(is_back)
        missing = num_relations - len(found.sizes)
        return replace(found, sizes=found.sizes + (0,) * missing) if missing else found

    def _grouped(self, is_back: bool = False) -> RelationPairs:
        """Return the grouped edges of the relations that have some, computed once."""

        def compute() -> RelationPairs:
            index = self.index.flip(0) if is_back else self.index
            return RelationPairs.of(index, self.relation, 0)

        return computed_once(self.groups, is_back, compute)


class StackedRelations(Relations):
    """Kinds and relations of K graphs, of which each gets n rows.

    ``node_type`` is (K·n,), 0 in rows without a node, and ``index`` names these rows.
    """

    def __init__(self, parts: Sequence[Relations], num_rows: int) -> None:
        kinds = [one.node_type for one in parts]
        padded = kinds[0].new_zeros(len(parts), num_rows)
        for row, kind in zip(padded, kinds, strict=True):
            row[: len(kind)] = kind
        index = [one.index + num_rows * k for k, one in enumerate(parts)]
        relation = torch.cat([one.relation for one in parts])
        super().__init__(padded.flatten(), torch.cat(index, dim=1), relation)
        vars(self).update(parts=parts, num_rows=num_rows, found={})

    parts: Sequence[Relations]
    num_rows: int
    found: dict[tuple[int, bool], RelationPairs]

    def rows_of(self, per_kind: Tensor) -> Tensor:
        """Return the vector of each node's kind, (K, n, p), from those of each graph."""
        graphs, kinds, width = per_kind.shape  # (K, A, p)
        first = kinds * torch.arange(graphs, device=per_kind.device)
        place = self.node_type + first.repeat_interleave(self.num_rows)
        return per_kind.flatten(0, 1).index_select(0, place).view(graphs, -1, width)

    def pairs(self, num_relations: int, *, is_back: bool = False) -> RelationPairs:
        """Return the grouped edges, computed once."""

        def compute() -> RelationPairs:
            parts = [one.pairs(num_relations, is_back=is_back) for one in self.parts]
            return RelationPairs.stacked(parts, self.num_rows)

        return computed_once(self.found, (num_relations, is_back), compute)


def relation_means(h: Tensor, pairs: RelationPairs) -> Tensor:
    """Return ``(1/|N_r(i)|) Σ_{j∈N_r(i)} h_j`` (S, p) of each pair (r, i); h is (N, p).

    Of K graphs they are (K, S/K, p).
    """
    rows = h.flatten(0, -2)
    if pairs.mask is None and len(pairs.source) >= FEWEST:
        found = pairs.means(len(rows), h.dtype).matmul(rows)
    else:
        messages = pairs.weigh(rows.index_select(0, pairs.source))
        found = index_sum(messages, pairs.pair, len(pairs.count))
        found = found / pairs.count[:, None]
    return found.view(*h.shape[:-2], -1, h.shape[-1])


def sum_at_targets(found: Tensor, target: Tensor, like: Tensor) -> Tensor:
    """Sum rows (..., M, q) at their targets (M,); the result has the rows of ``like``."""
    rows = found.flatten(0, -2)
    total = index_sum(rows, target, like.shape[:-1].numel())
    return total.view(*like.shape[:-1], -1)


def relation_sum(h: Tensor, pairs: RelationPairs, weights: Iterable[Tensor]) -> Tensor:
    """Return ``Σ_r (1/|N_r(i)|) Σ_{j∈N_r(i)} h_j W_r`` of every node, (N, q).

    ``weights`` are R matrices (p, q), Schlichtkrull et al., ESWC 2018, Eq. (2); of K graphs
    (K, p, q). Relations without edges get no gradient.
    """
    means = torch.split(relation_means(h, pairs), list(pairs.sizes), dim=-2)
    parts = [
        mean @ weight
        for mean, weight in zip(means, weights, strict=True)
        if mean.shape[-2]
    ]
    if not parts:
        return torch.zeros_like(h)
    return sum_at_targets(torch.cat(parts, dim=-2), pairs.target, h)
