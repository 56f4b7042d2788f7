"""Edges of a graph: propagation operators, and directed edges along which messages pass."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flower_fgl.nn.graph_union import GraphBatch
from flower_fgl.nn.sparse import (
    EdgeOperator,
    EdgePattern,
    Operator,
    SparseOperator,
    computed_once,
    index_sum,
)

__all__ = ["Direction", "Messages", "OperatorKind", "Topology", "edge_messages"]
__all__ += ["graph_filter"]


OperatorKind = Literal["normalised", "mean", "sum"]
"""D^-1/2 (A + I) D^-1/2 of GCN, D^-1 A of GraphSAGE, A of GIN."""


class Topology:
    """The edges of a graph and the propagation operators built from them.

    ``edge_index`` (2, E), int64, are sources and targets, each undirected edge in both
    directions, and ``edge_weight`` (E,) their weights or ``None``. If these require grad,
    operators, which are of ``dtype``, are differentiable in them and are not cached. If
    weights in [0, 1] are a mask (``is_mask``), ``mean`` divides by the number of those
    above 0, not by their sum.
    """

    def __init__(
        self,
        edge_index: Tensor,
        edge_weight: Tensor | None,
        num_nodes: int,
        dtype: torch.dtype,
        *,
        is_mask: bool = False,
    ) -> None:
        self.edge_index, self.edge_weight = edge_index, edge_weight
        self.is_mask = is_mask
        self.num_nodes, self.dtype = num_nodes, dtype
        self._operators: dict[OperatorKind, Operator] = {}
        self._kept: dict[str, Any] = {}

    @property
    def is_constant(self) -> bool:
        """Whether no gradient flows to the edge weights."""
        return self.edge_weight is None or not self.edge_weight.requires_grad

    def operator(self, kind: OperatorKind) -> Operator:
        """Return a propagation operator (N, N), computed once if it is constant.

        ``normalised`` adds a self-loop of weight 1 where a node has none. ``mean`` and
        ``sum`` add none, and an isolated node gets 0.
        """
        if not self.is_constant:
            row, column, value = self._entries(kind)
            return EdgeOperator(row, column, value, self.num_nodes)
        size = (self.num_nodes, self.num_nodes)
        return computed_once(
            self._operators,
            kind,
            lambda: SparseOperator.from_entries(*self._entries(kind), size),
        )

    def _entries(self, kind: OperatorKind) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows (targets), columns (sources) and values of an operator."""
        edges, weight = self.edge_index, self.edge_weight
        if kind == "normalised":
            edges, value = gcn_norm(edges, weight, self.num_nodes, self.dtype)
            return edges[1], edges[0], value
        if weight is None:
            weight = torch.ones(edges.shape[1], dtype=self.dtype, device=edges.device)
        if kind == "mean":
            counted = (weight > 0).to(self.dtype) if self.is_mask else weight
            total = index_sum(counted, edges[1], self.num_nodes)
            total = torch.where(total == 0, 1, total)
            weight = weight / total.index_select(0, edges[1])
        return edges[1], edges[0], weight

    def pattern(self) -> EdgePattern:
        """Return the positions (target, source) of all edges, sorted once."""

        def compute() -> EdgePattern:
            source, target = self.edge_index
            return EdgePattern(target, source, (self.num_nodes, self.num_nodes))

        made: EdgePattern = computed_once(self._kept, "pattern", compute)
        return made

    def attention_edges(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the edges for attention: those without self-loops, then one loop per node.

        Source, target and weight (E',), 1 for the self-loops, or ``None`` without weights.
        """
        if not self.is_constant:
            return self._attention_edges()
        found: tuple[Tensor, Tensor, Tensor | None] = computed_once(
            self._kept, "attention", self._attention_edges
        )
        return found

    def _attention_edges(self) -> tuple[Tensor, Tensor, Tensor | None]:
        source, target = self.edge_index
        others = source != target
        loops = torch.arange(self.num_nodes, device=source.device)
        weight = self.edge_weight
        if weight is not None:
            weight = torch.cat([weight[others], weight.new_ones(self.num_nodes)])
        source = torch.cat([source[others], loops])
        return source, torch.cat([target[others], loops]), weight


def gcn_norm(
    edge_index: Tensor, weight: Tensor | None, num_nodes: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return self-looped edges and ``D^-1/2 (A + I) D^-1/2``, Kipf & Welling, ICLR 2017.

    A self-loop of weight 1 is added where a node has none; of several, the last counts. The
    edges (2, E') are those without self-loops, then one loop per node; the values are
    (E',).
    """
    others = edge_index[0] != edge_index[1]
    loops = torch.arange(num_nodes, device=edge_index.device)
    edges = torch.cat([edge_index[:, others], loops.expand(2, -1)], dim=1)
    if weight is None:
        weight = torch.ones(edges.shape[1], dtype=dtype, device=edges.device)
    else:
        own = weight.new_ones(num_nodes)
        own[edge_index[0][~others]] = weight[~others]
        weight = torch.cat([weight[others], own])
    source, target = edges
    degree = weight.new_zeros(num_nodes).scatter_add_(0, target, weight)
    scale = degree.pow_(-0.5)
    scale.masked_fill_(scale == math.inf, 0)
    return edges, scale[source] * weight * scale[target]


def graph_filter(
    operator: Operator,
    h: Tensor,
    coefficients: tuple[float, ...],
    bias: Tensor | None = None,
) -> Tensor:
    """Apply a polynomial of an operator by Horner's rule: ``Σ_k c_k S^k h + b``, (N, p).

    The last of the ``coefficients`` c_0, …, c_K is not 0. They take K products.
    """
    *lower, highest = coefficients
    out = h if highest == 1 else highest * h
    for number, coefficient in enumerate(reversed(lower), start=1):
        out = operator.matmul(out, bias if number == len(lower) else None)
        if coefficient:
            out = out + (h if coefficient == 1 else coefficient * h)
    return out if lower or bias is None else out + bias


Direction = Literal["both", "separate", "forward"]
"""Both ways with the same weights, both ways with weights of their own, or as listed."""

MOST_NUMBERS = 2**27
"""Numbers of one sum over messages that are in memory at once (512 MiB)."""
HASHED_AT_ONCE = 2**22
"""Features of edges that are hashed at once (32 MiB)."""


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

    mask: Tensor | None = None
    """Weight in [0, 1] of each message, of shape (M,), by which it is multiplied."""

    def masked(self, mask: Tensor) -> Messages:
        """Return the same edges with a weight of each one, which may require grad."""
        out = Messages._sorted(self.index, self.x)
        out.mask = mask
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
        is_single = not bool((self.index.diff() == 0).all(dim=0).any())
        if is_single and torch.equal(
            up, down
        ):  # all are listed in both, as in molecules
            return self
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

    Sorting rows takes ten times as long. Two other edges get one number with probability
    2^-63.
    """
    drawn, columns = torch.Generator().manual_seed(0), 2 + x.shape[1]
    factors = torch.randint(-(2**62), 2**62, (columns,), generator=drawn) * 2 + 1
    factors = factors.to(x.device)
    width = torch.int64 if x.element_size() == 8 else torch.int32
    out = ends.new_empty(len(ends))
    most = max(1, HASHED_AT_ONCE // columns)
    for start in range(0, len(ends), most):
        part = slice(start, start + most)
        bits = (x[part] + 0.0).contiguous().view(width).long()  # -0.0 becomes 0.0
        rows = torch.cat([ends[part], bits], dim=1)
        out[part] = (rows * factors).sum(dim=1)
    return out


def edge_messages(h: Tensor, edges: Messages, layer: nn.Linear) -> Tensor:
    """Compute ``Σ_{(j→i)} ReLU(h_j + W_e x + b_e)``, the sum in PyG's ``GINEConv``.

    ``h`` is (N, p), as is the result. More than 2^27 numbers are computed in parts, again
    for the gradient of each part.
    """
    most = max(1, MOST_NUMBERS // h.shape[1])
    number = edges.index.shape[1]
    if number <= most:
        return _sum_part(h, edges.index, edges.x, layer.weight, layer.bias, edges.mask)
    out = torch.zeros_like(h)
    for start in range(0, number, most):
        part = slice(start, start + most)
        mask = None if edges.mask is None else edges.mask[part]
        own = edges.index[:, part], edges.x[part]
        arguments = (h, *own, layer.weight, layer.bias, mask)
        out = out + checkpoint(_sum_part, *arguments, use_reentrant=False)
    return out


def _sum_part(
    h: Tensor,
    index: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Sum the messages of some edges at their targets."""
    source, target = index
    messages = (h.index_select(0, source) + F.linear(x, weight, bias)).relu()
    if mask is not None:
        messages = messages * mask[:, None]
    return index_sum(messages, target, len(h))
