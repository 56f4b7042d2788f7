"""Neighbour sums over the edges between clients, and the graph that they complete.

Yao et al., "FedGCN: Convergence-Communication Tradeoffs in Federated Training of Graph
Convolutional Networks", NeurIPS 2023.

========================  ===============================================================
symbol                    function or argument
========================  ===============================================================
d̃_v                      :func:`degrees`: 1 + the number of all neighbours of v
N[v]                      v and its neighbours
V_k                       nodes of client k
c_k(v)                    :func:`partial_sums`: Σ_{u ∈ N[v] ∩ V_k} x_u / √d̃_u
(ÂX)_v                    (1 / √d̃_v) Σ_k c_k(v), ``SummedGraph.x``
========================  ===============================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.nn import GraphInput, SparseOperator, Topology
from flower_fgl.nn.layers import ONE_STEP
from flower_fgl.nn.sparse import Operator
from flower_fgl.nn.stacked import BlockOperator, StackedInput
from flower_fgl.nn.topology import OperatorKind

__all__ = ["OwnedEdges", "SummedGraph", "degrees", "listed_nodes", "partial_sums"]
__all__ += ["readable_nodes", "summed_graph"]


@dataclass(frozen=True, eq=False)
class OwnedEdges:
    """All edges of a client's N nodes, whose identifiers are ``ids`` (N,).

    ``inside`` (2, 2E) are the edges among them, both directions, without self-loops.
    ``own`` (m,) is the client's end of each edge to another client, and ``other`` (m,)
    the other end, as a position in ``outside`` (h,), the ascending identifiers of the h
    outside neighbours.
    """

    inside: Tensor
    own: Tensor
    other: Tensor
    outside: Tensor
    ids: Tensor

    @property
    def num_nodes(self) -> int:
        """Number of own nodes N."""
        return len(self.ids)


def degrees(edges: OwnedEdges) -> Tensor:
    """Count d̃_v (N,): each own node and all its neighbours, on any client."""
    size = edges.num_nodes
    inside = torch.bincount(edges.inside[1], minlength=size)
    return 1 + inside + torch.bincount(edges.own, minlength=size)


def listed_nodes(edges: OwnedEdges, *, min_outside: int, hops: int) -> Tensor:
    """Choose the own nodes (b,) whose sums the clients form together, ascending.

    These are nodes with at least ``min_outside`` neighbours on other clients. With 2 hops,
    other clients receive the sum too, so that it also needs as many own nodes.
    """
    size = edges.num_nodes
    outside = torch.bincount(edges.own, minlength=size)
    listed = outside >= max(1, min_outside)
    if hops == 2:
        listed &= 1 + torch.bincount(edges.inside[1], minlength=size) >= min_outside
    return listed.nonzero().squeeze(1)


def partial_sums(x: Tensor, edges: OwnedEdges, own: Tensor, other: Tensor) -> Tensor:
    """Compute c_k(v), what a client knows of the sum of each node v: (b + o, d).

    ``x`` (N, d), strided or sparse CSR, are the features of the own nodes. The sums are
    those of the own nodes ``own`` (b,), then those of the outside nodes at the positions
    ``other`` (o,) of ``edges.outside``.
    """
    scaled = _scaled(x, edges)
    inner = _closed(edges).matmul(scaled)[own]
    weights = scaled.new_ones(len(edges.own))
    shape = (len(edges.outside), edges.num_nodes)
    across = SparseOperator.from_entries(edges.other, edges.own, weights, shape)
    return torch.cat([inner, across.matmul(scaled)[other]])


def _scaled(x: Tensor, edges: OwnedEdges) -> Tensor:
    """Return x_u / √d̃_u of the own nodes as a dense matrix."""
    dense = x.to_dense()
    return dense * degrees(edges).to(dense.dtype).rsqrt()[:, None]


def _closed(edges: OwnedEdges) -> SparseOperator:
    """Return A + I of the own nodes."""
    loops = torch.arange(edges.num_nodes, device=edges.inside.device)
    source, target = torch.cat([edges.inside, loops.expand(2, -1)], dim=1)
    ones = torch.ones(len(source), device=source.device)
    return SparseOperator.from_entries(
        target, source, ones, (edges.num_nodes, edges.num_nodes)
    )


class Summed(GraphInput):
    """Graphs whose features are the rows of ÂX, and whose ``normalised`` operator is Â.

    Only the first layer of a GCN reads the features, and it takes them as propagated
    already. Another backbone would propagate them again, which raises an error.
    """

    normalised: Operator

    def operator(self, kind: OperatorKind) -> Operator:
        """Return Â."""
        if kind != "normalised":
            raise DataError(f'Sums of neighbours have no operator "{kind}": use a GCN.')
        return self.normalised

    def filtered_linear(
        self,
        h: Tensor | None,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        kind: OperatorKind,
        coefficients: tuple[float, ...],
    ) -> Tensor:
        """Compute ``Â H Wᵀ + b``; for the features ``(ÂX) Wᵀ + b``."""
        if h is not None:
            return super().filtered_linear(
                h, weight, bias, kind=kind, coefficients=coefficients
            )
        if kind != "normalised" or coefficients != ONE_STEP:
            raise DataError("The first layer on sums of neighbours must be a GCN's.")
        return self.linear(None, weight, bias)


class StackedSums(Summed, StackedInput):
    """The graphs of K clients, each a :class:`SummedGraph`, as one input."""

    def __init__(self, graphs: Sequence[SummedGraph]) -> None:
        super().__init__(graphs)
        weight = torch.cat([graph.weight for graph in graphs])
        self.normalised = BlockOperator(weighted(self.topology, weight))


class SummedGraph(Summed):
    """The graph of a client with its sums.

    ``sums`` (M, d) are (ÂX)_v of each node; ``edge_index`` (2, E) has one self-loop per
    node, and ``weight`` (E,) are the entries of Â.
    """

    stacked_as: ClassVar[type[StackedInput]] = StackedSums

    def __init__(self, sums: Tensor, edge_index: Tensor, weight: Tensor) -> None:
        self.union = None
        self.topology = Topology(edge_index, None, len(sums), sums.dtype)
        self._set_features(sums)
        self.weight = weight
        self.normalised = weighted(self.topology, weight)

    @property
    def num_bytes(self) -> int:
        """Memory of sums, edges and operator, in bytes."""
        return self.x.nbytes + 40 * self.edge_index.shape[1]


def weighted(topology: Topology, weight: Tensor) -> SparseOperator:
    """Return the matrix with the entries ``weight`` (E,) at the edges."""
    source, target = topology.edge_index
    size = (topology.num_nodes, topology.num_nodes)
    return SparseOperator.from_entries(target, source, weight, size)


def summed_graph(
    x: Tensor,
    edges: OwnedEdges,
    own: Tensor,
    other: Tensor,
    sums: Tensor,
    other_degrees: Tensor,
    *,
    hops: int,
) -> SummedGraph:
    """Complete a client's graph by the sums that it received.

    ``x`` (N, d), strided or sparse CSR, are the features of the own nodes. ``own`` (b,)
    are own nodes, and ``other`` (o,) positions in ``edges.outside`` of outside nodes,
    read with 2 hops only, whose sums were received: ``sums`` (b, d), or (b + o, d), are
    their Σ_k c_k(v), and ``other_degrees`` (o,) the d̃ of ``other``. With 1 hop the
    graph has the own nodes and the edges among them; with 2 also the outside
    neighbours, as nodes N to N + o − 1, and the edges to them.

    Notes
    -----
    1. Own nodes that are not in ``own`` have the sums of the own neighbours only. That is
       all of the sum, unless the owner left them out.
    2. The operator keeps the degrees of the whole graph, also where edges are left out. A
       third layer reads the outside neighbours, whose other neighbours are missing.
    """
    size = edges.num_nodes
    total = degrees(edges).to(x.dtype)
    mine = _closed(edges).matmul(_scaled(x, edges))
    mine = mine.index_copy(0, own, sums[: len(own)])
    loops = torch.arange(size, device=x.device)
    ends = torch.cat([edges.inside, loops.expand(2, -1)], dim=1)
    if hops == 2:
        place = torch.full((len(edges.outside),), -1, device=x.device)
        place[other] = size + torch.arange(len(other), device=x.device)
        kept = place[edges.other] >= 0
        across = torch.stack([edges.own[kept], place[edges.other[kept]]])
        new = size + torch.arange(len(other), device=x.device)
        ends = torch.cat([ends, across, across.flip(0), new.expand(2, -1)], dim=1)
        mine = torch.cat([mine, sums[len(own) :]])
        # a smaller number can only come from noise
        total = torch.cat([total, other_degrees.clamp(min=2.0)])
    factor = total.rsqrt()
    return SummedGraph(mine * factor[:, None], ends, factor[ends[0]] * factor[ends[1]])


def readable_nodes(memberships: Tensor) -> Tensor:
    """Find the nodes (n,), bool, whose features follow from sums over known sets of nodes.

    ``memberships`` (R, n) are the weights of the n unknown nodes in R known sums. A node is
    determined if every vector of the null space is 0 there.
    """
    if not memberships.numel():
        return torch.zeros(memberships.shape[1], dtype=torch.bool)
    _, values, right = torch.linalg.svd(memberships.double(), full_matrices=True)
    rank = int((values > 1e-9 * values.max()).sum())
    free = right[rank:]  # a basis of the null space
    if not len(free):
        return torch.ones(memberships.shape[1], dtype=torch.bool)
    readable: Tensor = free.abs().amax(dim=0) < 1e-7
    return readable
