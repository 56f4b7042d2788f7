"""Directed edges along which messages pass, their features, and sums over them."""

from __future__ import annotations

from functools import cached_property
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flower_fgl.nn.graph_union import GraphBatch
from flower_fgl.nn.sparse import index_sum

__all__ = ["Direction", "Messages", "edge_messages"]

Direction = Literal["both", "separate", "forward"]
"""Both ways with the same weights, both ways with weights of their own, or as listed."""

MOST_NUMBERS = 2**27
"""Numbers of one sum over messages that are in memory at once (512 MiB)."""


class Ways(NamedTuple):
    """Messages for which a layer has one set of weights, and those of a second one."""

    first: Messages
    second: Messages | None = None

    def select(self, union: GraphBatch, graphs: Tensor) -> Ways:
        """Return the edges of some graphs (g,) of a batch, as :meth:`GraphBatch.select`."""
        second = None if self.second is None else self.second.select(union, graphs)
        return Ways(self.first.select(union, graphs), second)


class Messages:
    """Edges from source to target with features, sorted by target.

    ``index`` (2, M), int64, are source and target of each edge, in any order. Two nodes
    may have several edges, and a node edges to itself. ``x`` (M, a) are the features of
    the edges; a may be 0.
    """

    def __init__(self, index: Tensor, x: Tensor) -> None:
        width = int(index.max()) + 1 if index.numel() else 0
        code = index[1] * width + index[0]
        if not bool((code.diff() < 0).any()):
            self.index, self.x = index, x
        else:
            order = torch.argsort(code, stable=True)
            self.index, self.x = index[:, order], x[order]

    @classmethod
    def _sorted(cls, index: Tensor, x: Tensor) -> Messages:
        """Build from edges that are sorted already."""
        out = object.__new__(cls)
        out.index, out.x = index, x
        return out

    def to(self, device: torch.device) -> Messages:
        """Return the edges on a device."""
        return Messages._sorted(self.index.to(device), self.x.to(device))

    def ways(self, direction: Direction) -> Ways:
        """Return the edges along which a layer passes messages."""
        if direction == "separate":
            return Ways(self, self._backward)
        return Ways(self._both if direction == "both" else self)

    @cached_property
    def _backward(self) -> Messages:
        """Each edge from its target to its source."""
        return Messages(self.index.flip(0), self.x)

    @cached_property
    def _both(self) -> Messages:
        """Each edge in both directions; pairs listed in both with equal features once.

        Of m edges one way and n back, all with the same features, each direction gets
        max(m, n): an owner that lists both directions means one edge.
        """
        source, target = self.index
        low, high = torch.minimum(source, target), torch.maximum(source, target)
        codes = _hash_rows(torch.stack([low, high], dim=1), self.x)
        distinct, group = torch.unique(codes, return_inverse=True)
        is_up = source <= target
        up = torch.bincount(group[is_up], minlength=len(distinct))
        down = torch.bincount(group[~is_up], minlength=len(distinct))
        member = torch.empty(len(distinct), dtype=torch.int64, device=group.device)
        member[group] = torch.arange(len(group), device=group.device)
        kept = torch.repeat_interleave(member, torch.maximum(up, down))
        ends, x = torch.stack([low[kept], high[kept]]), self.x[kept]
        other = ends[0] != ends[1]  # an edge to itself has one direction
        return Messages(
            torch.cat([ends, ends[:, other].flip(0)], dim=1), torch.cat([x, x[other]])
        )

    def select(self, union: GraphBatch, graphs: Tensor) -> Messages:
        """Return the edges of some graphs (g,) of a batch, as :meth:`GraphBatch.select`."""
        if self._union is None:
            self._union = GraphBatch.trusted(self.index, union.batch, union.num_graphs)
        part = self._union.select(graphs)
        return Messages._sorted(part.edge_index, self.x[part.edges])

    _union: GraphBatch | None = None


def _hash_rows(ends: Tensor, x: Tensor) -> Tensor:
    """Return a number (M,), int64, for each pair of nodes (M, 2) and its features (M, a).

    Sorting rows takes ten times as long. Two edges between the same nodes with other
    features get one number with a probability of 2^-63.
    """
    width = torch.int64 if x.element_size() == 8 else torch.int32
    bits = (x + 0.0).contiguous().view(width).long()  # -0.0 becomes 0.0
    rows = torch.cat([ends, bits], dim=1)
    drawn = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (rows.shape[1],), generator=drawn) * 2 + 1
    return (rows * factors.to(rows.device)).sum(dim=1)


def edge_messages(h: Tensor, edges: Messages, layer: nn.Linear) -> Tensor:
    """Compute ``Σ_{(j→i)} ReLU(h_j + W_e x + b_e)``, the sum in PyG's ``GINEConv``.

    ``h`` is (N, p), as is the result, and ``layer`` maps the features of edges (M, a) to
    (M, p). More than 2^27 numbers are computed in parts, again for the gradient of each
    part.
    """
    most = max(1, MOST_NUMBERS // h.shape[1])
    number = edges.index.shape[1]
    if number <= most:
        return _sum_part(h, edges.index, edges.x, layer.weight, layer.bias)
    out = torch.zeros_like(h)
    for start in range(0, number, most):
        part = slice(start, start + most)
        arguments = (h, edges.index[:, part], edges.x[part], layer.weight, layer.bias)
        out = out + checkpoint(_sum_part, *arguments, use_reentrant=False)
    return out


def _sum_part(
    h: Tensor, index: Tensor, x: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Sum the messages of some edges at their targets."""
    source, target = index
    messages = (h.index_select(0, source) + F.linear(x, weight, bias)).relu()
    return index_sum(messages, target, len(h))
