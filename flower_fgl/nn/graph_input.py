"""Graph input of the backbones, with cached operators and propagated features."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.nn.graph_union import GraphBatch, select_rows
from flower_fgl.nn.relations import Relations
from flower_fgl.nn.sparse import Operator, SparseOperator, computed_once, index_sum
from flower_fgl.nn.topology import (
    Direction,
    Messages,
    OperatorKind,
    Topology,
    Ways,
    graph_filter,
)

__all__ = ["GraphInput", "Pooling"]

Pooling = Literal["sum", "mean"]
"""Aggregation of the nodes of a graph."""


class GraphInput:
    """A graph, or a batch of graphs, as input of a backbone.

    Parameters
    ----------
    x : Tensor of shape (N, d), float
        Features, strided or sparse CSR. Strided features may require grad.
    edge_index : Tensor of shape (2, E), int64
        Sources and targets, each undirected edge in both directions; (2, 0) without
        edges.
    edge_weight : Tensor of shape (E,), float, optional
        Weight of each edge, by default 1; may require grad.
    batch : Tensor of shape (N,), int64, optional
        Graph of each node, non-decreasing. The input is then a batch of graphs (a
        disjoint union) whose graphs are classified.
    num_graphs : int, optional
        Number of graphs G in the batch, including graphs without nodes; by default one
        more than the largest entry of ``batch``.

    Raises
    ------
    DataError
        If shapes or layouts do not fit, an edge names a node that does not exist, or
        ``batch`` decreases or is out of range.

    Notes
    -----
    1. Propagation operators, the transpose of sparse features, and propagated strided
       features are computed at their first use and cached: ``x``, ``edge_index`` and
       ``edge_weight`` must not change in place. Nothing that requires grad is cached.
    2. Sparse features are projected first and then propagated, ``S^k (X Wᵀ)``. This is
       equal by associativity, while ``S^k X`` would be dense.
    """

    def __init__(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        *,
        batch: Tensor | None = None,
        num_graphs: int | None = None,
    ) -> None:
        _check(x, edge_index, edge_weight)
        self.union = None
        if batch is not None:
            self.union = GraphBatch(edge_index, batch, num_graphs)
            if batch.numel() != x.shape[0]:
                raise DataError(
                    f"batch must have one entry for each of the {x.shape[0]} nodes, "
                    f"got {batch.numel()}."
                )
        self.topology = Topology(edge_index, edge_weight, x.shape[0], x.dtype)
        self._set_features(x)

    union: GraphBatch | None
    """Assignment of nodes to graphs; ``None`` where nodes are classified."""

    selected: Tensor | None = None
    """Graphs that :meth:`select` chose, of shape (G,), int64; else ``None``."""

    shape: Literal["", "loops", "pairs"] = ""
    """Known shape: each node is its own only neighbour (loops), or node i and node i + N/2
    are each other's (pairs)."""

    _dense: Tensor | None = None
    _chosen_from: tuple[GraphInput, Tensor] | None = None
    """The batch that :meth:`select` chose from, and the chosen nodes."""

    pairs: Tensor | None = None
    """Pairs of nodes to predict, of shape (2, P), int64; ``None`` for nodes or graphs."""

    pair_x: Tensor | None = None
    """Features of the pairs, of shape (P, a), float; ``None`` for link prediction."""

    messages: Messages | None = None
    """Edges with direction and features, for backbones that read them."""

    relations: Relations | None = None
    """Kinds of nodes and relations of edges, for backbones of typed graphs."""

    _related: GraphBatch | None = None
    """The edges of :attr:`relations` of a batch, once :meth:`select` needs them."""

    _ways: dict[Direction, Ways]
    _directed: dict[Direction, tuple[GraphInput, GraphInput | None]]

    def with_messages(self, index: Tensor, x: Tensor) -> GraphInput:
        """Return the same graph with edges as their owner lists them.

        ``index`` (2, M), int64, are source and target of each edge, and ``x`` (M, a),
        float, its features; a may be 0.
        """
        out = copy(self)
        out.messages, out._ways, out._directed = Messages(index, x), {}, {}
        return out

    def with_relations(self, relations: Relations) -> GraphInput:
        """Return the same graph with kinds of nodes and relations of edges."""
        out = copy(self)
        out.relations, out._related = relations, None
        return out

    def masked(
        self, mask: Tensor, edge_of: Sequence[Tensor], direction: Direction = "both"
    ) -> GraphInput:
        """Return the same graph with a weight in [0, 1] of each edge; 0 removes it.

        The weights (E,) may require grad. Messages are multiplied by them; a mean divides
        by the number of weights above 0. ``edge_of`` (M,) is the edge to which each message
        belongs: one tensor for :attr:`relations`, or for each of :meth:`ways` in the
        network's ``direction``, or for :attr:`edge_index`.
        """
        weights = [mask[of] for of in edge_of]
        is_plain = self.relations is None and self.messages is None
        topology = self.topology
        if is_plain:
            size, dtype = topology.num_nodes, topology.dtype
            edges = self.edge_index
            topology = Topology(edges, weights[0], size, dtype, is_mask=True)
        out = self._like(topology, self.x)
        if self.relations is not None:
            out.relations = replace(self.relations, mask=weights[0])
        elif self.messages is not None:
            ways = [way for way in self.ways(direction) if way is not None]
            masked = [w.masked(m) for w, m in zip(ways, weights, strict=True)]
            out._ways[direction] = Ways(*masked)
        return out

    def ways(self, direction: Direction) -> Ways:
        """Return the edges along which messages pass in a direction, computed once.

        A ValueError says that the graph has no :attr:`messages`.
        """
        return computed_once(self._ways, direction, lambda: self._find_ways(direction))

    def directed(self, direction: Direction) -> tuple[GraphInput, GraphInput | None]:
        """Return the graph with directed edges, and with those of a second way.

        They have operators of their own, which are computed once.
        """
        if direction not in self._directed:
            first, second = self.ways(direction)
            back = None if second is None else self._along(second)
            self._directed[direction] = self._along(first), back
        return self._directed[direction]

    def _along(self, edges: Messages) -> GraphInput:
        """Return the same features with directed edges."""
        size, dtype = self.num_nodes, self.topology.dtype
        out = GraphInput._of(
            Topology(
                edges.index, edges.mask, size, dtype, is_mask=edges.mask is not None
            ),
            self.x,
            self.union,
        )
        out._sparse = self._sparse
        return out

    def _find_ways(self, direction: Direction) -> Ways:
        """Choose the edges of these graphs from the whole batch, or compute them."""
        if self._chosen_from is not None and self.selected is not None:
            whole, _ = self._chosen_from
            return whole.ways(direction).select(whole._union(), self.selected)
        if self.messages is None:
            raise ValueError(
                "This network reads edges with direction and features, but the graph has "
                "none: call with_messages()."
            )
        return self.messages.ways(direction)

    def with_pairs(self, pairs: Tensor, pair_x: Tensor | None = None) -> GraphInput:
        """Return the same graph, with its cached operators, and pairs of nodes to predict.

        The pairs are (2, P), int64, and their features (P, a), float, if they have any.
        """
        out = copy(self)
        out.pairs, out.pair_x = pairs, pair_x
        return out

    @classmethod
    def _of(
        cls, topology: Topology, x: Tensor, union: GraphBatch | None = None
    ) -> GraphInput:
        """Build from parts that fit together, without the checks of the constructor."""
        out = object.__new__(cls)
        out.topology, out.union = topology, union
        out._set_features(x)
        return out

    def _like(self, topology: Topology, x: Tensor) -> GraphInput:
        """Return the same graphs, pairs and messages with other edges or features."""
        out = GraphInput._of(topology, x, self.union)
        out.pairs, out.pair_x = self.pairs, self.pair_x
        out.messages, out.relations = self.messages, self.relations
        return out

    def _set_features(self, x: Tensor) -> None:
        self.x = x
        is_sparse = x.layout == torch.sparse_csr
        self._sparse = SparseOperator(x) if is_sparse else None
        self._dense = None
        self._ways, self._directed = {}, {}
        self._filtered: dict[tuple[OperatorKind, tuple[float, ...]], Tensor] = {}
        self._encodings: dict[Hashable, Tensor] = {}

    @property
    def edge_index(self) -> Tensor:
        """The edges, of shape (2, E), int64."""
        return self.topology.edge_index

    @property
    def edge_weight(self) -> Tensor | None:
        """The weights of the edges, of shape (E,), or ``None``."""
        return self.topology.edge_weight

    @property
    def num_nodes(self) -> int:
        """Number of nodes N."""
        return self.topology.num_nodes

    @property
    def batch(self) -> Tensor | None:
        """Graph of each node, of shape (N,), int64; ``None`` for a single graph."""
        return None if self.union is None else self.union.batch

    @property
    def num_graphs(self) -> int:
        """Number of graphs G, 1 without ``batch``."""
        return 1 if self.union is None else self.union.num_graphs

    @property
    def num_features(self) -> int:
        """Feature width d."""
        return int(self.x.shape[1])

    @property
    def device(self) -> torch.device:
        """Device of the features."""
        return self.x.device

    def to(self, device: torch.device | str) -> GraphInput:
        """Return the graph on a device: itself if it is already there."""
        device = torch.empty(0, device=device).device  # "cuda" names the current one
        if device == self.device and device == self.edge_index.device:
            return self
        weight = self.edge_weight
        topology = Topology(
            self.edge_index.to(device),
            None if weight is None else weight.to(device),
            self.num_nodes,
            self.topology.dtype,
        )
        union = self.union
        if union is not None:
            batch = union.batch.to(device)
            union = GraphBatch.trusted(topology.edge_index, batch, union.num_graphs)
        out = GraphInput._of(topology, self.x.to(device), union)
        out.pairs = None if self.pairs is None else self.pairs.to(device)
        out.pair_x = None if self.pair_x is None else self.pair_x.to(device)
        out.messages = None if self.messages is None else self.messages.to(device)
        out.relations = None if self.relations is None else self.relations.to(device)
        return out

    def select(self, graphs: Tensor) -> GraphInput:
        """Select graphs (g,) of a batch, in the desired order, as a batch of their own."""
        part = self._union().select(graphs)
        weight = self.edge_weight
        topology = Topology(
            part.edge_index,
            None if weight is None else weight[part.edges],
            len(part.nodes),
            self.topology.dtype,
        )
        union = GraphBatch.trusted(part.edge_index, part.batch, len(graphs))
        out = GraphInput._of(topology, select_rows(self.x, part.nodes), union)
        out.selected, out._chosen_from = graphs, (self, part.nodes)
        if self.relations is not None:
            out.relations = self._select_relations(self.relations, part.nodes, graphs)
        return out

    def _select_relations(
        self, whole: Relations, nodes: Tensor, graphs: Tensor
    ) -> Relations:
        """Return kinds and relations of some graphs (g,) with their nodes (n,)."""
        if self._related is None:
            union = self._union()
            found = GraphBatch.trusted(whole.index, union.batch, union.num_graphs)
            self._related = found
        part = self._related.select(graphs)
        relation = whole.relation[part.edges]
        return Relations(whole.node_type[nodes], part.edge_index, relation)

    def pool(self, h: Tensor, how: Pooling, kind: int | None = None) -> Tensor:
        """Aggregate the rows of ``h`` (N, p) of each graph: (G, p), zeros without nodes.

        In a typed graph ``kind`` is that of the nodes to aggregate, ``None`` for all.
        """
        union = self._union()
        batch, number = union.batch, union.num_nodes
        if kind is not None:
            assert self.relations is not None
            chosen = (self.relations.node_type == kind).nonzero().flatten()
            h, batch = h.index_select(0, chosen), batch[chosen]
            number = torch.bincount(batch, minlength=union.num_graphs)
        total = index_sum(h, batch, union.num_graphs)
        return total if how == "sum" else total / number.clamp(min=1)[:, None]

    def _union(self) -> GraphBatch:
        if self.union is None:
            raise DataError(
                "Expected a batch of graphs, got a single graph: pass batch to GraphInput."
            )
        return self.union

    def level(self, number: int) -> GraphInput:
        """Return the input of layer ``number`` of consecutive layers: the whole graph.

        Only a :func:`~flower_fgl.nn.computation_graph.receptive_field` has smaller inputs.
        """
        return self

    def with_features(self, x: Tensor) -> GraphInput:
        """Return a graph with the same edges and cached operators, and features (N, d').

        A DataError says that the number of rows or the dtype differs.
        """
        if x.shape[0] != self.num_nodes or x.dtype != self.topology.dtype:
            raise DataError(
                f"The new features must have {self.num_nodes} rows of "
                f"{self.topology.dtype}, got {x.shape[0]} of {x.dtype}."
            )
        out = self._like(self.topology, x)
        out._ways = self._ways
        return out

    def with_edges(
        self, edge_index: Tensor, edge_weight: Tensor | None = None
    ) -> GraphInput:
        """Return a graph with new edges, the same features, and their cached transpose.

        Edges (2, E'), weights (E',) and errors are as in the constructor; of a batch of
        graphs there is a DataError.
        """
        if self.union is not None:
            raise DataError(
                "with_edges() needs a single graph, got a batch of "
                f"{self.union.num_graphs} graphs: construct a new GraphInput."
            )
        _check(self.x, edge_index, edge_weight)
        size, dtype = self.num_nodes, self.topology.dtype
        out = GraphInput._of(Topology(edge_index, edge_weight, size, dtype), self.x)
        out._sparse = self._sparse
        return out

    def encode_nodes(
        self, key: Hashable, compute: Callable[[GraphInput], Tensor]
    ) -> Tensor:
        """Return a constant (N, p) that depends only on the edges of each node's graph.

        ``compute`` makes it from this input, once for a ``key``, which names the constant
        and its parameters; graphs that :meth:`select` chooses take their rows of it.
        """
        if self._chosen_from is not None:
            whole, nodes = self._chosen_from
            return whole.encode_nodes(key, compute).index_select(0, nodes)
        return computed_once(self._encodings, key, lambda: compute(self))

    def operator(self, kind: OperatorKind) -> Operator:
        """Return a propagation operator, see :meth:`Topology.operator`."""
        return self.topology.operator(kind)

    def propagate(self, h: Tensor, kind: OperatorKind) -> Tensor:
        """Propagate node representations (N, p), which may require grad, by one step."""
        return self.operator(kind).matmul(h)

    def linear(
        self, h: Tensor | None, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Map node representations linearly, (N, q); sparse features stay sparse.

        ``h`` are hidden representations (N, p), ``None`` for the graph's features.
        ``weight`` (q, p) and ``bias`` (q,) are as in :class:`torch.nn.Linear`.
        """
        if h is None and self._sparse is not None:
            return self._sparse.matmul(weight.t(), bias)
        return F.linear(self.x if h is None else h, weight, bias)

    def dense_features(self) -> Tensor:
        """Return the features as a strided tensor (N, d); sparse ones are filled once."""
        if self._sparse is None:
            return self.x
        if self._dense is None:
            with torch.inference_mode(False), torch.no_grad():
                self._dense = self.x.to_dense()
        return self._dense

    def per_row(self, vector: Tensor) -> Tensor:
        """Return a vector (p,) in a shape that adds to representations (N, p).

        Those (K, p) of stacked weights are added to representations (K, n, p).
        """
        return vector.unsqueeze(-2)

    def filtered_linear(
        self,
        h: Tensor | None,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        kind: OperatorKind,
        coefficients: tuple[float, ...],
    ) -> Tensor:
        """Compute ``(Σ_k c_k S^k H) Wᵀ + b``, (N, q): propagate, then map linearly.

        ``h`` (N, p), ``weight`` W and ``bias`` b are as in :meth:`linear`, ``kind`` is S,
        and ``coefficients`` are c_0, c_1, …; (0, 1) is one step of propagation.
        """
        if h is None and self._is_kept:
            return self.linear(self.propagated(kind, coefficients), weight, bias)
        z = self.linear(h, weight)
        if bias is not None and len(coefficients) == 1:
            bias = self.per_row(bias)  # no operator adds it to the rows
        return graph_filter(self.operator(kind), z, coefficients, bias)

    @property
    def _is_kept(self) -> bool:
        """Whether propagated features are constant and no larger than the features."""
        is_plain = self._sparse is None and not self.x.requires_grad
        return is_plain and self.topology.is_constant

    def propagated(self, kind: OperatorKind, coefficients: tuple[float, ...]) -> Tensor:
        """Return ``Σ_k c_k S^k X`` (N, d) of constant strided features, computed once."""
        return computed_once(
            self._filtered,
            (kind, coefficients),
            lambda: graph_filter(self.operator(kind), self.x, coefficients),
        )


def _check(x: Tensor, edge_index: Tensor, edge_weight: Tensor | None) -> None:
    if x.dim() != 2 or x.layout not in (torch.strided, torch.sparse_csr):
        raise DataError(
            "x must be a matrix (nodes, features), strided or sparse CSR, got shape "
            f"{tuple(x.shape)}, layout {x.layout}."
        )
    if x.layout == torch.sparse_csr and x.requires_grad:
        raise DataError(
            "Sparse x cannot require grad: make it dense with x.to_dense()."
        )
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise DataError(
            f"edge_index must be of shape (2, edges), got {tuple(edge_index.shape)}."
        )
    if edge_weight is not None and edge_weight.shape != edge_index.shape[1:]:
        raise DataError(
            f"edge_weight must have one entry for each of the {edge_index.shape[1]} "
            f"edges, got shape {tuple(edge_weight.shape)}."
        )
    if edge_index.numel():
        low, high = (int(v) for v in edge_index.aminmax())
        if low < 0 or high >= x.shape[0]:
            raise DataError(
                f"edge_index must contain nodes 0 to {x.shape[0] - 1}, "
                f"got {low} to {high}."
            )
