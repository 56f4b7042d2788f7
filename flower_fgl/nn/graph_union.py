"""Batches of graphs (disjoint unions), and selection of some of their graphs."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.nn.sparse import narrow_csr

__all__ = ["GraphBatch", "SubBatch", "concatenated_ranges", "select_rows"]


class SubBatch(NamedTuple):
    """Some graphs of a batch, as a batch of their own.

    ``nodes`` (n,) and ``edges`` (e,) are their numbers in the whole batch; ``edge_index``
    (2, e) are renumbered, and ``batch`` (n,) is by position in the selection.
    """

    nodes: Tensor
    edges: Tensor
    edge_index: Tensor
    batch: Tensor


class GraphBatch:
    """Many graphs in one: consecutively numbered nodes, no edges between graphs.

    ``batch`` (N,), int64, non-decreasing, is the graph of each node. ``num_graphs`` G
    counts graphs without nodes too.
    """

    def __init__(
        self, edge_index: Tensor, batch: Tensor, num_graphs: int | None = None
    ) -> None:
        self.edge_index, self.batch = edge_index, batch
        self.num_graphs = _check_batch(batch, num_graphs)

    @classmethod
    def trusted(cls, edge_index: Tensor, batch: Tensor, num_graphs: int) -> GraphBatch:
        """Build from valid values without checks, which would synchronise a GPU."""
        out = object.__new__(cls)
        out.edge_index, out.batch, out.num_graphs = edge_index, batch, num_graphs
        return out

    @cached_property
    def num_nodes(self) -> Tensor:
        """Number of nodes of each graph, of shape (G,), int64."""
        return torch.bincount(self.batch, minlength=self.num_graphs)

    @cached_property
    def _first_node(self) -> Tensor:
        return self.num_nodes.cumsum(0) - self.num_nodes

    @cached_property
    def _edges(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """Edge order by graph (``None`` if sorted); first edge and count per graph."""
        graph = self.batch[self.edge_index[0]]
        count = torch.bincount(graph, minlength=self.num_graphs)
        is_sorted = not bool((graph.diff() < 0).any())
        order = None if is_sorted else torch.argsort(graph, stable=True)
        return order, count.cumsum(0) - count, count

    def select(self, graphs: Tensor) -> SubBatch:
        """Select graphs (g,) in the desired order, in time linear in their own size."""
        sizes = self.num_nodes[graphs]
        nodes = concatenated_ranges(self._first_node[graphs], sizes)
        order, first, count = self._edges
        edges = concatenated_ranges(first[graphs], count[graphs])
        if order is not None:
            edges = order[edges]
        place = torch.arange(len(graphs), device=graphs.device)
        shift = sizes.cumsum(0) - sizes - self._first_node[graphs]
        moved = torch.repeat_interleave(shift, count[graphs])
        return SubBatch(
            nodes,
            edges,
            self.edge_index[:, edges] + moved,
            torch.repeat_interleave(place, sizes),
        )


def _check_batch(batch: Tensor, num_graphs: int | None) -> int:
    """Return the number of graphs, or raise if ``batch`` is invalid."""
    if batch.dim() != 1 or batch.dtype != torch.int64:
        raise DataError(
            "batch must hold the graph number of each node, int64 of shape "
            f"(nodes,), got {batch.dtype} of shape {tuple(batch.shape)}."
        )
    low, high = (int(batch[0]), int(batch[-1])) if batch.numel() else (0, -1)
    count = high + 1 if num_graphs is None else num_graphs
    if low < 0 or high >= count or bool((batch.diff() < 0).any()):
        raise DataError(
            f"batch must be non-decreasing and number the graphs 0 to {count - 1}, got "
            f"{low} first and {high} last."
        )
    return count


def concatenated_ranges(first: Tensor, count: Tensor) -> Tensor:
    """Concatenate ranges of integers, given by ``first`` and ``count`` (g,).

    The result has the type of both, as features of a million molecules have 54 million
    entries.
    """
    ends = count.cumsum(0, dtype=count.dtype)
    shift = torch.repeat_interleave(first - ends + count, count)
    return shift.add_(torch.arange(len(shift), dtype=shift.dtype, device=shift.device))


def select_rows(x: Tensor, node_ids: Tensor) -> Tensor:
    """Select rows (n,) of a feature matrix (N, d), strided or sparse CSR, in its layout."""
    if x.layout != torch.sparse_csr:
        return x.index_select(0, node_ids)  # four times as fast as x[node_ids]
    first = x.crow_indices()[node_ids]
    count = x.crow_indices()[node_ids + 1] - first
    ends = torch.cat([count.new_zeros(1), count.cumsum(0, dtype=count.dtype)])
    entry = concatenated_ranges(first, count)
    # rows of a valid matrix are valid
    parts = (ends, x.col_indices()[entry], x.values()[entry])
    return narrow_csr(*parts, (len(node_ids), x.shape[1]))
