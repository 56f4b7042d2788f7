"""Edges of a graph and the propagation operators built from them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flower_fgl.nn.layers import gcn_norm
from flower_fgl.nn.sparse import (
    EdgeOperator,
    EdgePattern,
    Operator,
    SparseOperator,
    index_sum,
)

__all__ = ["OperatorKind", "Topology", "graph_filter"]

OperatorKind = Literal["normalised", "mean", "sum"]
"""D^-1/2 (A + I) D^-1/2 of GCN, D^-1 A of GraphSAGE, A of GIN."""


class Topology:
    """The edges of a graph and the propagation operators built from them.

    Parameters
    ----------
    edge_index : Tensor of shape (2, E), int64
        Sources and targets, each undirected edge in both directions.
    edge_weight : Tensor of shape (E,), float, or None
        Weight of each edge. If it requires grad, operators are differentiable in it and
        are not cached.
    num_nodes, dtype : int and torch.dtype
        Number of nodes N, and type of the operators.
    """

    def __init__(
        self,
        edge_index: Tensor,
        edge_weight: Tensor | None,
        num_nodes: int,
        dtype: torch.dtype,
    ) -> None:
        self.edge_index, self.edge_weight = edge_index, edge_weight
        self.num_nodes, self.dtype = num_nodes, dtype
        self._operators: dict[OperatorKind, Operator] = {}
        self._attention: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._pattern: EdgePattern | None = None

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
        if kind not in self._operators:
            # the cached operator must serve training even if evaluation creates it
            with torch.inference_mode(False), torch.no_grad():
                size = (self.num_nodes, self.num_nodes)
                self._operators[kind] = SparseOperator.from_entries(
                    *self._entries(kind), size
                )
        return self._operators[kind]

    def _entries(self, kind: OperatorKind) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows (targets), columns (sources) and values of an operator."""
        edges, weight = self.edge_index, self.edge_weight
        if kind == "normalised":
            edges, value = gcn_norm(edges, weight, self.num_nodes, self.dtype)
            return edges[1], edges[0], value
        if weight is None:
            weight = torch.ones(edges.shape[1], dtype=self.dtype, device=edges.device)
        if kind == "mean":
            total = index_sum(weight, edges[1], self.num_nodes)
            total = torch.where(total == 0, 1, total)
            weight = weight / total.index_select(0, edges[1])
        return edges[1], edges[0], weight

    def pattern(self) -> EdgePattern:
        """Return the positions (target, source) of all edges, sorted once."""
        if self._pattern is None:
            size = (self.num_nodes, self.num_nodes)
            with torch.inference_mode(False), torch.no_grad():
                source, target = self.edge_index
                self._pattern = EdgePattern(target, source, size)
        return self._pattern

    def attention_edges(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the edges for attention: those without self-loops, then one loop per node.

        Source and target (E',), and weight (E',), which is 1 for the self-loops, or
        ``None`` if the graph has no weights.
        """
        if not self.is_constant:
            return self._attention_edges()
        if self._attention is None:
            with torch.inference_mode(False), torch.no_grad():
                self._attention = self._attention_edges()
        return self._attention

    def _attention_edges(self) -> tuple[Tensor, Tensor, Tensor | None]:
        source, target = self.edge_index
        others = source != target
        loops = torch.arange(self.num_nodes, device=source.device)
        weight = self.edge_weight
        if weight is not None:
            weight = torch.cat([weight[others], weight.new_ones(self.num_nodes)])
        source = torch.cat([source[others], loops])
        return source, torch.cat([target[others], loops]), weight


def graph_filter(
    operator: Operator,
    h: Tensor,
    coefficients: tuple[float, ...],
    bias: Tensor | None = None,
) -> Tensor:
    """Apply a polynomial of an operator by Horner's rule: ``Σ_k c_k S^k h + b``, (N, p).

    Parameters
    ----------
    operator : Operator
        S, of shape (N, N).
    h, bias : Tensor of shape (N, p), and (p,) or None, float
        Node representations, and b, added to every row.
    coefficients : tuple of float
        c_0, …, c_K; the last is not 0. They take K products.
    """
    *lower, highest = coefficients
    out = h if highest == 1 else highest * h
    for number, coefficient in enumerate(reversed(lower), start=1):
        out = operator.matmul(out, bias if number == len(lower) else None)
        if coefficient:
            out = out + (h if coefficient == 1 else coefficient * h)
    return out if lower or bias is None else out + bias
