"""Edges of several relations, and means and sums of messages along them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from flower_fgl.nn.sparse import SparseOperator, computed_once, index_sum

__all__ = ["RelationPairs", "Relations", "relation_means", "relation_sum"]

FEWEST = 10_000
"""Edges from which a matrix takes means faster than sums of single rows. It takes half the
time and memory with a million edges, and 1 ms to build, which batches of small graphs do in
each step."""


@dataclass(frozen=True, eq=False)
class RelationPairs:
    """Edges grouped by pairs (r, i) of a relation and a node that it reaches.

    The S pairs are sorted by relation.

    Parameters
    ----------
    source : Tensor of shape (M,), int64
        Node from which each message comes.
    pair : Tensor of shape (M,), int64
        Pair of each message, ascending.
    relation, target : Tensor of shape (S,), int64
        Relation and node of each pair.
    count : Tensor of shape (S,), float
        Messages of each pair, at least 1.
    sizes : tuple of int
        Number of pairs of each of the R relations.
    mask : Tensor of shape (M,), float, or None
        Weight in [0, 1] of each message; ``count`` then counts those above 0.
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
    """Kinds of the N nodes of a graph, and its edges with their relations.

    Parameters
    ----------
    node_type : Tensor of shape (N,), int64
        Kind of each node.
    index : Tensor of shape (2, M), int64
        Source and target of each edge.
    relation : Tensor of shape (M,), int64
        Relation of each edge, 0 to R - 1.
    mask : Tensor of shape (M,), float, or None
        Weight in [0, 1] of each edge, by which its messages are multiplied.
    """

    node_type: Tensor
    index: Tensor
    relation: Tensor
    mask: Tensor | None = None

    def to(self, device: torch.device) -> Relations:
        """Return the same edges on a device."""
        return Relations(
            self.node_type.to(device), self.index.to(device), self.relation.to(device)
        )

    def pairs(self, num_relations: int, *, is_back: bool = False) -> RelationPairs:
        """Return the grouped edges, those against their direction if ``is_back``."""
        if self.mask is not None:
            index = self.index.flip(0) if is_back else self.index
            return RelationPairs.of(index, self.relation, num_relations, self.mask)
        found = self._backward if is_back else self._forward
        missing = num_relations - len(found.sizes)
        return replace(found, sizes=found.sizes + (0,) * missing) if missing else found

    @cached_property
    def _forward(self) -> RelationPairs:
        with torch.inference_mode(False), torch.no_grad():  # training reads it, too
            return RelationPairs.of(self.index, self.relation, 0)

    @cached_property
    def _backward(self) -> RelationPairs:
        with torch.inference_mode(False), torch.no_grad():
            return RelationPairs.of(self.index.flip(0), self.relation, 0)


def relation_means(h: Tensor, pairs: RelationPairs) -> Tensor:
    """Return ``(1/|N_r(i)|) Σ_{j∈N_r(i)} h_j`` (S, p) of each pair (r, i); h is (N, p)."""
    if pairs.mask is None and len(pairs.source) >= FEWEST:
        return pairs.means(len(h), h.dtype).matmul(h)
    rows = pairs.weigh(h.index_select(0, pairs.source))
    found = index_sum(rows, pairs.pair, len(pairs.count))
    return found / pairs.count[:, None]


def relation_sum(h: Tensor, pairs: RelationPairs, weights: Iterable[Tensor]) -> Tensor:
    """Return ``Σ_r (1/|N_r(i)|) Σ_{j∈N_r(i)} h_j W_r`` of every node, (N, q).

    ``h`` is (N, p), and ``weights`` are R matrices (p, q), Schlichtkrull et al., ESWC 2018,
    Eq. (2). Relations without edges get no gradient.
    """
    means = torch.split(relation_means(h, pairs), list(pairs.sizes))
    parts = [
        mean @ weight for mean, weight in zip(means, weights, strict=True) if len(mean)
    ]
    if not parts:
        return torch.zeros_like(h)
    return index_sum(torch.cat(parts), pairs.target, len(h))
