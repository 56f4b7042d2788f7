"""Inputs of layers for selected nodes: all nodes that determine them, or sampled ones.

Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large Graphs", NeurIPS
2017 (sampled neighbourhoods of mini-batches).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.nn.graph_input import GraphInput
from flower_fgl.nn.graph_union import concatenated_ranges, select_rows
from flower_fgl.nn.sparse import Operator, SparseOperator, computed_once, memo_bytes
from flower_fgl.nn.topology import OperatorKind

__all__ = ["ClientDraws", "Level", "NeighborSampler", "NeighbourLists"]
__all__ += ["output_nodes", "receptive_field"]


SHARE, SHARE_IN_BATCH = 0.75, 0.5
"""Largest share of the nodes that is worth extracting, once or for every batch."""


def receptive_field(
    graph: GraphInput, targets: Tensor, reach: int, *, is_batch: bool = False
) -> GraphInput | None:
    """Extract the part of a graph that the layers need for some of its nodes.

    ``targets`` (n,) are distinct nodes, and ``reach`` is the number of consecutive layers
    that read neighbours (:attr:`~flower_fgl.nn.backbone.Backbone.reach`). If this
    ``is_batch``, one of many mini-batches, strided features are propagated once over the
    whole graph, and each mini-batch selects its rows.

    The network then returns the rows of ``targets``, and each layer computes only the nodes
    that later layers need. ``None`` if the part covers most of the graph, a gradient flows
    to edges or features, or ``graph`` is a subclass with its own form of features. Results
    equal those of the whole graph up to the order of sums. Dropout draws for fewer nodes,
    so the same seed gives other masks than on the whole graph.
    """
    is_plain = type(graph) is GraphInput and graph.batch is None
    if not is_plain or not graph.topology.is_constant or graph.x.requires_grad:
        return None
    most = int((SHARE_IN_BATCH if is_batch else SHARE) * graph.num_nodes)
    found = _surroundings(graph.edge_index, targets, graph.num_nodes, reach, most)
    if found is None:
        return None
    nodes, extents = found
    place = torch.full((graph.num_nodes,), -1, device=nodes.device)
    place[nodes] = torch.arange(len(nodes), device=nodes.device)
    levels: tuple[Level, ...] = ()
    for inner, size in pairwise(extents):
        level = Level(graph, nodes[:size], inner, place, levels, is_batch)
        levels = (level, *levels)
    return levels[0]


def _surroundings(
    edge_index: Tensor, targets: Tensor, num_nodes: int, steps: int, most: int
) -> tuple[Tensor, list[int]] | None:
    """Order nodes by distance; ``None`` if more than ``most`` precede the last step."""
    source, target = edge_index
    reached = torch.zeros(num_nodes, dtype=torch.bool, device=targets.device)
    reached[targets] = True
    rings, extents = [targets], [len(targets)]
    for _ in range(steps):
        if extents[-1] > most:
            return None
        near = torch.zeros_like(reached)
        near[source[reached[target]]] = True
        ring = (near & ~reached).nonzero().squeeze(1)
        reached |= near
        rings.append(ring)
        extents.append(extents[-1] + len(ring))
    return torch.cat(rings), extents


def output_nodes(field: GraphInput, reach: int) -> list[Tensor]:
    """Return the nodes of the whole graph that each of ``reach`` layers computes."""
    return [cast(Level, field.level(number)).output_nodes for number in range(reach)]


class Level(GraphInput):
    """Input of one layer, which reads nodes up to a distance and outputs fewer."""

    def __init__(
        self,
        whole: GraphInput,
        nodes: Tensor,
        inner: int,
        place: Tensor,
        later: tuple[Level, ...],
        is_batch: bool,
    ) -> None:
        self.topology, self.union = whole.topology, None
        # Input nodes by distance. The first ``inner`` are output nodes, and all their
        # neighbours are input nodes.
        self._whole, self._nodes, self._inner = whole, nodes, inner
        # In a mini-batch, select rows of the whole graph's propagated features.
        self._is_batch = is_batch
        # Position of each node of the graph in ``nodes``; the inputs of later layers, but
        # not this one: memory of a cycle is freed only by the garbage collector.
        self._place, self._later = place, later
        self._rows: dict[int, Tensor | SparseOperator] = {}
        self._operators: dict[OperatorKind, SparseOperator] = {}
        self._filtered = {}

    @property
    def num_nodes(self) -> int:
        """Number of input nodes."""
        return len(self._nodes)

    @property
    def output_nodes(self) -> Tensor:
        """Nodes of the whole graph whose rows a layer returns, in their order."""
        return self._nodes[: self._inner]

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors kept by all levels, in bytes."""
        levels = (self, *self._later)
        kept = [(one._rows, one._operators, one._filtered) for one in levels]
        return memo_bytes([self._place, kept])

    def operator(self, kind: OperatorKind) -> Operator:
        """Raise an error: layers must call :meth:`filtered_linear`."""
        raise TypeError(
            f'A receptive field has no square operator "{kind}": its input and output '
            "nodes differ. Call filtered_linear() or propagate()."
        )

    def propagate(self, h: Tensor, kind: OperatorKind) -> Tensor:
        """Propagate to the output nodes: (inner, p)."""
        return self._operator(kind).matmul(h)

    def level(self, number: int) -> Level:
        """Return the input of layer ``number``."""
        return (self, *self._later)[number]

    def linear(
        self, h: Tensor | None, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Map the representations of the output nodes linearly."""
        if h is None:
            return _map(self._features(self._inner), weight, bias)
        return F.linear(h[: self._inner], weight, bias)

    def filtered_linear(
        self,
        h: Tensor | None,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        kind: OperatorKind,
        coefficients: tuple[float, ...],
    ) -> Tensor:
        """Propagate by at most one step and map linearly."""
        if h is not None:
            return self._propagate(F.linear(h, weight), kind, coefficients, bias)
        if self._whole.x.layout == torch.sparse_csr:
            z = _map(self._features(self.num_nodes), weight, None)
            return self._propagate(z, kind, coefficients, bias)

        def compute() -> Tensor:
            if self._is_batch:
                whole = self._whole.propagated(kind, coefficients)
                return select_rows(whole, self._nodes[: self._inner])
            x = select_rows(self._whole.x, self._nodes)
            return self._propagate(x, kind, coefficients)

        filtered = computed_once(self._filtered, (kind, coefficients), compute)
        return F.linear(filtered, weight, bias)

    def _propagate(
        self,
        z: Tensor,
        kind: OperatorKind,
        coefficients: tuple[float, ...],
        bias: Tensor | None = None,
    ) -> Tensor:
        """Apply ``c_0 I + c_1 S`` to representations of the input nodes."""
        own, around = coefficients
        out = self._operator(kind).matmul(z if around == 1 else around * z, bias)
        return out + own * z[: self._inner] if own else out

    def _operator(self, kind: OperatorKind) -> SparseOperator:
        """Return rows of the output nodes and columns of the input nodes."""
        return computed_once(self._operators, kind, lambda: self.make_operator(kind))

    def make_operator(self, kind: OperatorKind) -> SparseOperator:
        """Build the operator of a kind, once."""
        whole = cast(SparseOperator, self._whole.operator(kind)).matrix
        part = select_rows(whole, self._nodes[: self._inner])
        return SparseOperator.from_rows(
            part.crow_indices(),
            self.place_of(part.col_indices().long()),
            part.values(),
            (self._inner, self.num_nodes),
        )

    def place_of(self, nodes: Tensor) -> Tensor:
        """Return the positions of nodes of the whole graph among the input nodes."""
        return self._place[nodes]

    def _features(self, size: int) -> Tensor | SparseOperator:
        """Return the features of the first ``size`` input nodes."""

        def compute() -> Tensor | SparseOperator:
            x = select_rows(self._whole.x, self._nodes[:size])
            return SparseOperator(x) if x.layout == torch.sparse_csr else x

        return computed_once(self._rows, size, compute)


def _map(
    features: Tensor | SparseOperator, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Map dense or sparse features linearly."""
    if isinstance(features, SparseOperator):
        return features.matmul(weight.t(), bias)
    return F.linear(features, weight, bias)


class ClientDraws:
    """Uniform numbers of K clients, each from its own generator, on the CPU.

    The nodes of client k are the rows from k · ``size`` on.
    """

    def __init__(self, generators: Sequence[torch.Generator], size: int) -> None:
        self.generators, self.size = generators, size

    def in_order(self, nodes: Tensor) -> Tensor:
        """Sort nodes by client; those of one client keep their order."""
        return nodes[torch.argsort(nodes // self.size, stable=True)]

    def counts(self, nodes: Tensor) -> list[int]:
        """Count the nodes of each client."""
        number = len(self.generators)
        found: list[int] = torch.bincount(nodes // self.size, minlength=number).tolist()
        return found

    def rand(self, rows: int, counts: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Draw a matrix (``rows``, n) with ``counts`` columns of each client."""
        parts = [
            torch.rand(rows, count, generator=generator, dtype=dtype)
            for count, generator in zip(counts, self.generators, strict=True)
        ]
        return torch.cat(parts, dim=1)


@dataclass(frozen=True, eq=False)
class NeighbourLists:
    """The neighbours of every node, in compressed sparse rows.

    ``start`` (N + 1,) is the start of each node's neighbours in ``neighbour`` (E,), by
    target.
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
        self, nodes: Tensor, limit: int, generator: torch.Generator | ClientDraws
    ) -> tuple[Tensor, Tensor]:
        """Draw up to ``limit`` neighbours of each of n nodes, without replacement.

        Every set of that size is equally likely. The generator draws on the CPU; with those
        of several clients the nodes must be sorted by client. Returns positions in
        ``nodes`` (m,), ascending, and in ``neighbour`` (m,).
        """
        first = self.start[nodes]
        degree = self.start[nodes + 1] - first
        count = degree.clamp(max=limit)
        place = torch.arange(len(nodes), device=nodes.device)
        target = torch.repeat_interleave(place, count)
        entry = concatenated_ranges(first, count)
        crowded = degree > limit
        if bool(crowded.any()):
            # float64 can represent every integer up to 2⁵³
            sizes = degree[crowded]
            if isinstance(generator, ClientDraws):
                counts = generator.counts(nodes[crowded])
                draws = generator.rand(limit, counts, torch.float64)
            else:
                shape = limit, len(sizes)
                draws = torch.rand(shape, generator=generator, dtype=torch.float64)
            picks = _distinct(sizes, draws.to(nodes.device))
            drawn = first[crowded][:, None] + picks
            entry.masked_scatter_(crowded.index_select(0, target), drawn)
        return target, entry


def _distinct(sizes: Tensor, draws: Tensor) -> Tensor:
    """Turn uniform draws (count, n) into different numbers below each size: (n, count)."""
    # Floyd's algorithm (Bentley & Floyd, CACM 30(9), 1987) for all rows at once: step j
    # draws t from 0 to size − count + j, and takes that maximum instead if t was drawn
    # before. The work does not grow with the sizes.
    count = len(draws)
    picks = torch.empty_like(draws, dtype=torch.int64)
    for j in range(count):
        last = sizes - (count - j)
        pick = (draws[j] * (last + 1)).long()
        if j:
            # amax of bytes takes a part of the time of any()
            is_taken = (picks[:j] == pick).view(torch.uint8).amax(0).bool()
            pick = torch.where(is_taken, last, pick)
        picks[j] = pick
    return picks.T


_Drawn = tuple[Tensor, Tensor, Tensor]
"""Neighbours drawn for one layer: positions of targets, entries, and their factors."""


class NeighborSampler:
    """Draw the inputs of a batch's layers from one graph, whose edge weights are constant.

    The entries that a node's row of an operator keeps are multiplied by the node's degree
    over their number: a row times any representations is then unbiased. The entry of the
    node itself is always kept. The network's nonlinear functions make its output biased, as
    in any neighbour sampling. Propagated strided features are computed once for the whole
    graph, so that the first layer is exact and draws nothing.
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

        def compute() -> tuple[Tensor, Tensor]:
            matrix = cast(SparseOperator, self.graph.operator(kind)).matrix
            row = torch.repeat_interleave(matrix.crow_indices().diff().long())
            is_own = row == matrix.col_indices()
            entries = matrix.values()
            own = entries.new_zeros(self.graph.num_nodes)
            own = own.index_add(0, row[is_own], entries[is_own])
            return entries[~is_own], own

        return computed_once(self._values, kind, compute)

    def draw(
        self, targets: Tensor, limits: Sequence[int], generator: torch.Generator
    ) -> GraphInput:
        """Draw the input of a network for some different nodes ``targets`` (n,).

        ``limits`` are the most neighbours per node in each layer, those of the last layer
        first.
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
                drawn = (target, entry, factor[target])
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
