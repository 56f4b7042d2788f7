"""Neighbour sampling: few neighbours of every node, and the layers' inputs they give.

Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large Graphs", NeurIPS
2017 (sampled neighbourhoods of mini-batches).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from flower_fgl.nn.computation_graph import Level
from flower_fgl.nn.graph_input import GraphInput
from flower_fgl.nn.graph_union import concatenated_ranges
from flower_fgl.nn.sparse import SparseOperator
from flower_fgl.nn.topology import OperatorKind

__all__ = ["NeighborSampler", "NeighbourLists"]


@dataclass(frozen=True, eq=False)
class NeighbourLists:
    """The neighbours of every node, in compressed sparse rows.

    ``start`` (N + 1,) is the start of each node's neighbours in ``neighbour`` (E,), the
    sources of the edges, sorted by target.
    """

    start: Tensor
    neighbour: Tensor

    @classmethod
    def of(cls, edge_index: Tensor, num_nodes: int) -> NeighbourLists:
        """Sort the edges by target, for use inside and outside inference mode."""
        with torch.inference_mode(False):
            source, target = edge_index.clone()
            order = torch.argsort(target, stable=True)
            start = torch.zeros(num_nodes + 1, dtype=torch.int64, device=target.device)
            start[1:] = torch.bincount(target, minlength=num_nodes).cumsum(0)
            return cls(start, source[order])

    @property
    def num_nodes(self) -> int:
        """Number of nodes N."""
        return self.start.numel() - 1

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        return int(self.start.nbytes + self.neighbour.nbytes)

    def sample(
        self, nodes: Tensor, limit: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw up to ``limit`` neighbours of each of n nodes, without replacement.

        A node with at most that many keeps all; for other nodes every set of that size is
        equally likely. The generator draws on the CPU. Returns positions in ``nodes``
        (m,), ascending, and in ``neighbour`` (m,).
        """
        first = self.start[nodes]
        degree = self.start[nodes + 1] - first
        count = degree.clamp(max=limit)
        place = torch.arange(len(nodes), device=nodes.device)
        target = torch.repeat_interleave(place, count)
        entry = concatenated_ranges(first, count)
        crowded = degree > limit
        if bool(crowded.any()):
            picks = _distinct(degree[crowded], limit, generator)
            drawn = first[crowded][:, None] + picks
            entry.masked_scatter_(crowded.index_select(0, target), drawn)
        return target, entry


def _distinct(sizes: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` different numbers below each size: (n, count), int64."""
    # Floyd's algorithm (Bentley & Floyd, CACM 30(9), 1987) for all rows at once: step j
    # draws t from 0 to size − count + j, and takes that maximum instead if t was drawn
    # before. The work does not grow with the sizes.
    # float64 can represent every integer up to 2⁵³
    draws = torch.rand(count, len(sizes), generator=generator, dtype=torch.float64).to(
        sizes.device
    )
    picks = torch.empty_like(draws, dtype=torch.int64)
    for j in range(count):
        last = sizes - count + j
        pick = (draws[j] * (last + 1)).long()
        is_taken = torch.zeros_like(pick, dtype=torch.bool)
        for earlier in picks[:j]:
            is_taken |= earlier == pick
        picks[j] = torch.where(is_taken, last, pick)
    return picks.T


class _Drawn(NamedTuple):
    """Neighbours drawn for one layer: positions of targets, entries, and their factors."""

    target: Tensor
    entry: Tensor
    scale: Tensor


class NeighborSampler:
    """Draw the inputs of a batch's layers from one graph.

    The graph has no edge weights that require grad.

    The entries that a node's row of an operator keeps are multiplied by the node's degree
    over their number. A row times any representations is then unbiased. The entry of the
    node itself is always kept. The network's nonlinear functions make its output biased,
    as in any neighbour sampling. The first layer reads propagated features. Of strided
    features they are computed once for the whole graph, so that this layer is exact and
    draws nothing.
    """

    def __init__(self, graph: GraphInput) -> None:
        self.graph = graph
        source, target = graph.edge_index
        others = source != target
        source, target = source[others], target[others]
        # the order of the entries of an operator, see csr_matrix
        order = torch.argsort(target * graph.num_nodes + source, stable=True)
        edges = torch.stack([source[order], target[order]])
        self.lists = NeighbourLists.of(edges, graph.num_nodes)
        self._values: dict[OperatorKind, tuple[Tensor, Tensor]] = {}

    def values(self, kind: OperatorKind) -> tuple[Tensor, Tensor]:
        """Return an operator's entries of ``lists``, (E,), and its diagonal, (N,)."""
        if kind not in self._values:
            with torch.inference_mode(False), torch.no_grad():
                matrix = cast(SparseOperator, self.graph.operator(kind)).matrix
                row = torch.repeat_interleave(matrix.crow_indices().diff().long())
                is_own = row == matrix.col_indices()
                entries = matrix.values()
                own = entries.new_zeros(self.graph.num_nodes)
                own = own.index_add(0, row[is_own], entries[is_own])
                self._values[kind] = entries[~is_own], own
        return self._values[kind]

    def draw(
        self, targets: Tensor, limits: Sequence[int], generator: torch.Generator
    ) -> GraphInput:
        """Draw the input of a network for some different nodes ``targets`` (n,).

        ``limits`` are the most neighbours per node in each layer, those of the last
        layer first. The network returns the rows of ``targets`` in their order. The
        generator draws on the CPU.
        """
        graph = self.graph
        place = torch.full((graph.num_nodes,), -1, device=targets.device)
        place[targets] = torch.arange(len(targets), device=targets.device)
        is_kept = graph.x.layout == torch.strided
        nodes, found = targets, []
        for number, limit in enumerate(limits, start=1):
            inner, drawn = len(nodes), None
            if not (is_kept and number == len(limits)):
                target, entry = self.lists.sample(nodes, limit, generator)
                first = self.lists.start
                degree = first[nodes + 1] - first[nodes]
                factor = degree / degree.clamp(min=1, max=limit)
                drawn = _Drawn(target, entry, factor[target])
                neighbour = self.lists.neighbour[entry]
                fresh = torch.unique(neighbour[place[neighbour] < 0])
                count = torch.arange(len(fresh), device=nodes.device)
                place[fresh] = len(nodes) + count
                nodes = torch.cat([nodes, fresh])
            found.append((nodes, inner, drawn))
        levels: tuple[Level, ...] = ()
        for reached, inner, drawn in found:
            level = _SampledLevel(graph, reached, inner, place, levels, is_batch=True)
            level.sampler, level.drawn = self, drawn
            levels = (level, *levels)
        return levels[0]


class _SampledLevel(Level):
    """Input of one layer, which reads the drawn neighbours only."""

    sampler: NeighborSampler
    drawn: _Drawn | None

    def make_operator(self, kind: OperatorKind) -> SparseOperator:
        """Return rows of the output nodes and columns of the input nodes."""
        if self.drawn is None:
            raise TypeError(
                "The first layer reads features that are propagated already."
            )
        around, own = self.sampler.values(kind)
        target, entry, scale = self.drawn
        nodes = self.output_nodes
        place = torch.arange(len(nodes), device=nodes.device)
        neighbour = self.sampler.lists.neighbour[entry]
        kept = own[nodes]
        return SparseOperator.from_entries(
            torch.cat([target, place]),
            torch.cat([self.place_of(neighbour), place]),
            torch.cat([around[entry] * scale.to(around.dtype), kept]),
            (len(nodes), self.num_nodes),
        )
