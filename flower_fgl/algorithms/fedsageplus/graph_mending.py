"""Graphs with hidden nodes, and graphs with generated nodes."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.nn import GraphInput, Topology
from flower_fgl.nn.graph_union import select_rows
from flower_fgl.nn.sparse import csr_matrix

__all__ = ["HiddenNodes", "MendedGraph", "hide_nodes"]


@dataclass(frozen=True, eq=False)
class HiddenNodes:
    """A graph with some nodes hidden, so that the missing neighbours are known.

    ``inputs`` are the n remaining nodes, ``kept`` (n,) their numbers in the whole graph,
    and ``counts`` (n,) their numbers of hidden neighbours. ``centres`` (M,) are the nodes
    that lost a neighbour, ``hidden`` (H, d) the features of the hidden nodes with a
    remaining neighbour, and ``lost`` (M, H), sparse CSR, is 1 where a hidden node was a
    centre's neighbour.
    """

    inputs: GraphInput
    kept: Tensor
    hidden: Tensor
    centres: Tensor
    lost: Tensor
    counts: Tensor

    def wanted(self, most: int) -> Tensor:
        """Return the number of neighbours to generate for each centre: (M,), int64."""
        return self.counts[self.centres].clamp(max=most)

    @property
    def num_bytes(self) -> int:
        """Approximate memory of edges and features, in bytes."""
        x = self.inputs.x
        size = x.values().numel() * 3 if x.layout == torch.sparse_csr else x.numel()
        return 4 * size + 48 * self.inputs.edge_index.shape[1] + self.hidden.nbytes


def hide_nodes(graph: GraphInput, is_hidden: Tensor) -> HiddenNodes:
    """Hide nodes and all their edges, Zhang et al. 2021, Sec. 3.2.

    ``graph`` is undirected; at least one node must remain.
    """
    kept = (~is_hidden).nonzero().squeeze(1)
    number = torch.full_like(is_hidden, -1, dtype=torch.int64)
    number[kept] = torch.arange(len(kept), device=kept.device)
    source, target = graph.edge_index
    inner = ~(is_hidden[source] | is_hidden[target])
    is_lost = ~is_hidden[source] & is_hidden[target]
    centre = number[source[is_lost]]
    counts = torch.bincount(centre, minlength=len(kept))
    centres, row = torch.unique(centre, return_inverse=True)
    found, column = torch.unique(target[is_lost], return_inverse=True)
    shape, ones = (len(centres), len(found)), torch.ones(len(row), device=row.device)
    return HiddenNodes(
        GraphInput(select_rows(graph.x, kept), number[graph.edge_index[:, inner]]),
        kept,
        select_rows(graph.x, found).to_dense(),
        centres,
        csr_matrix(row, column, ones, shape),
        counts,
    )


class MendedGraph(GraphInput):
    """A graph with generated nodes, each connected to one node of the graph.

    ``owner`` (M,) are those nodes. The generated nodes have the features ``generated``
    (M, d), which may require grad, and the numbers N to N + M − 1. The two blocks of
    features are projected separately and then concatenated, so sparse features never
    become a dense matrix of N rows, except in :meth:`dense_features`. Propagated features
    are not cached. ``x`` holds the features of the graph's own nodes only.
    """

    def __init__(self, graph: GraphInput, owner: Tensor, generated: Tensor) -> None:
        size = graph.num_nodes
        number = torch.arange(size, size + len(owner), device=owner.device)
        new = torch.stack([torch.cat([owner, number]), torch.cat([number, owner])])
        edges = torch.cat([graph.edge_index, new], dim=1)
        self.union = None
        self.topology = Topology(edges, None, size + len(owner), graph.x.dtype)
        self.generated = generated
        self._set_features(graph.x)

    def with_generated(self, generated: Tensor) -> MendedGraph:
        """Return the same graph with new features (M, d) of the generated nodes."""
        out = copy(self)
        out.generated = generated
        return out

    @property
    def num_bytes(self) -> int:
        """Memory added to the graph, in bytes, with estimated operators."""
        return self.generated.nbytes + 48 * self.edge_index.shape[1]

    @property
    def _is_kept(self) -> bool:
        return False

    def dense_features(self) -> Tensor:
        """Return own and generated features as a strided tensor (N + M, d), not cached."""
        return torch.cat([super().dense_features(), self.generated])

    def linear(
        self, h: Tensor | None, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Map node representations linearly, see :meth:`GraphInput.linear`."""
        if h is not None:
            return super().linear(h, weight, bias)
        own = super().linear(None, weight, bias)
        return torch.cat([own, F.linear(self.generated, weight, bias)])
