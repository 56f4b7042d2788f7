"""Graph classes: complete datasets, and the graphs of one client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.core.schema import Schema
from flower_fgl.core.targets import NUMBERS, Target

__all__ = [
    "ClientGraph",
    "EdgeTable",
    "Graph",
    "GraphDataset",
    "MessageEdges",
    "NodeDataset",
    "OutsideEdges",
    "Scaling",
    "numbered_within",
]


class _HasTarget:
    """What is predicted of some items; code for classes only names these."""

    target: Target

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the C classes."""
        return self.target.names

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return self.target.width


class _Edges:
    """Edges as their owner lists them: each has a row of every tensor and mask."""

    ends: ClassVar[str]
    """Name of the tensor (2, M) of sources and targets."""

    def select(self, chosen: Tensor) -> Self:
        """Return the edges of a boolean mask of shape (M,), or of some numbers (m,)."""
        held, fields = cast(Any, self), dict(vars(self))
        ends, masks = fields.pop(self.ends), fields.get("masks", {})
        rows: dict[str, Any] = {self.ends: ends[:, chosen]}
        rows |= {k: v[chosen] for k, v in fields.items() if isinstance(v, Tensor)}
        if masks:
            rows["masks"] = {name: mask[chosen] for name, mask in masks.items()}
        return cast(Self, replace(held, **rows))

    def within(self, nodes: Tensor, num_nodes: int) -> Self:
        """Return the edges of the subgraph induced on ``nodes``, numbered as there."""
        ends = numbered_within(vars(self)[self.ends], nodes, num_nodes)
        kept = (ends >= 0).all(dim=0)
        held: Any = self.select(kept)
        return cast(Self, replace(held, **{self.ends: ends[:, kept]}))


@dataclass(frozen=True, eq=False)
class EdgeTable(_HasTarget, _Edges):
    """The edges of a graph with what is predicted of them, as their owner lists them.

    An edge has a direction here, and two nodes may have several edges. ``pairs`` (2, M),
    int64, are source and target of each edge, and ``y`` (M,), int64, its class, -1 if
    unknown; of edges with ``targets`` 0 for a known number. These are numbers (M, T),
    float64, NaN if unknown. ``x`` (M, a), float32, are the features of the edges, of which
    there may be none, with a ``feature_names``, or none. ``time`` (M,), float64, ascends.
    ``masks`` (M,), bool, are the owner's split (``train``, ``val``, ``test``), if any.
    """

    ends = "pairs"

    pairs: Tensor
    y: Tensor
    target: Target
    x: Tensor
    feature_names: tuple[str, ...] = ()
    time: Tensor | None = None
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    targets: Tensor | None = None

    @property
    def num_edges(self) -> int:
        """Number of edges M."""
        return int(self.y.numel())


@dataclass(frozen=True, eq=False)
class MessageEdges(_Edges):
    """Edges as their owner lists them, along which messages may pass.

    They have a direction and features. Two nodes may have several, and a node edges to
    itself. ``index`` (2, M), int64, are source and target of each edge, and ``x`` (M, a),
    float32, its features, of which there may be none, with a ``feature_names``, or none.
    In a typed graph ``relation`` (M,), int64, is that of each edge, by its place in the
    schema.
    """

    ends = "index"

    index: Tensor
    x: Tensor
    feature_names: tuple[str, ...] = ()
    relation: Tensor | None = None

    def in_order(self, columns: Sequence[int]) -> MessageEdges:
        """Return the edges with the columns of their features in another order."""
        names = self.feature_names and tuple(self.feature_names[i] for i in columns)
        return replace(self, x=self.x[:, columns], feature_names=names)


def numbered_within(edge_index: Tensor, nodes: Tensor, num_nodes: int) -> Tensor:
    """Return the ends (2, M) of edges as places in ``nodes``, -1 for other nodes."""
    place = torch.full((num_nodes,), -1)
    place[nodes] = torch.arange(len(nodes))
    return place[edge_index]


@dataclass(frozen=True, eq=False)
class _Dataset(_HasTarget):
    """What all complete datasets have."""

    name: str  # in the table of sources, e.g. "cora"
    x: Tensor  # (N, d), float32
    edge_index: Tensor  # (2, 2E), int64
    # (N,), int64: class of each node, -1 if unknown; with targets 0 if one is known
    y: Tensor
    target: Target  # names of the classes, labels or numbers
    # (N,), bool: published split (train, val, test); empty if there is none
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    feature_names: tuple[str, ...] = ()  # length d, or empty
    # (N, T): whether a node has each label, int8, -1 if unknown; or numbers, float64, NaN
    targets: Tensor | None = None
    # as listed; None if the source lists undirected edges without features
    messages: MessageEdges | None = None
    node_type: Tensor | None = None  # (N,), int64: kind by its place in the schema
    schema: Schema | None = None  # kinds and relations of a typed graph

    @property
    def num_features(self) -> int:
        """Feature width d."""
        return int(self.x.shape[1])

    def client_of(self, graph: Graph, **fields: Any) -> ClientGraph:
        """Return a client that holds a part of the dataset.

        ``fields`` are others of :class:`ClientGraph`, at least number and node ids.
        """
        common = {"feature_names": self.feature_names, "schema": self.schema}
        return ClientGraph(graph=graph, target=self.target, **{**common, **fields})


@dataclass(frozen=True, eq=False)
class NodeDataset(_Dataset):
    """One complete graph, as loaded from a source.

    Features are sparse CSR if most entries are zero. Edges are undirected and simple: both
    directions, sorted by (row, column), without self-loops or duplicates. In a typed graph
    ``x`` has a block of columns for each kind, and ``y`` is known for nodes of the kind to
    predict only.
    """

    network: Tensor | None = None  # (N,): that of each node, if there are several
    edges: EdgeTable | None = None  # with their classes, if they have any

    @property
    def num_nodes(self) -> int:
        """Number of nodes N."""
        return int(self.y.numel())

    def graph(self, masks: Mapping[str, Tensor]) -> Graph:
        """Return the whole graph with a split."""
        return Graph(
            self.x,
            self.edge_index,
            self.y,
            masks,
            targets=self.targets,
            messages=self.messages,
            node_type=self.node_type,
        )

    def client(
        self, masks: Mapping[str, Tensor] | None = None, **fields: Any
    ) -> ClientGraph:
        """Return the whole graph as client 0, by default with the published split.

        ``fields`` are others of :class:`ClientGraph`.
        """
        whole = self.graph(self.masks if masks is None else masks)
        common = {"partition_id": 0, "node_ids": torch.arange(self.num_nodes)}
        return self.client_of(whole, **{**common, "edges": self.edges, **fields})


@dataclass(frozen=True, eq=False)
class GraphDataset(_Dataset):
    """Many small graphs, stored as one disjoint union.

    ``batch`` (N,), int64, is the graph of each node, non-decreasing. ``y``, ``masks`` and
    ``targets`` are those of the G graphs, ``messages`` those of all graphs. Features of
    edges that are bytes in the file stay uint8: as float32 they take most of the memory of
    molecules. If graphs of one kind of nodes have no features, ``d == 0``, degree features
    are built from the training graphs when the dataset is split.
    """

    batch: Tensor = field(kw_only=True)

    @classmethod
    def of(
        cls, union: NodeDataset, batch: Tensor, y: Tensor, target: Target, **others: Any
    ) -> GraphDataset:
        """Return the graphs of a disjoint union; ``others`` are fields of the class."""
        shared = {f.name: getattr(union, f.name) for f in fields(_Dataset)}
        own = {"batch": batch, "y": y, "target": target, "masks": {}, "targets": None}
        return cls(**{**shared, **own, **others})

    @property
    def num_graphs(self) -> int:
        """Number of graphs G."""
        return int(self.y.numel())


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph with labels and masks, for training or evaluation.

    With ``batch`` it is the disjoint union of G graphs with one label each. Labels, masks
    and counts then refer to graphs instead of nodes; with ``pairs`` to these. In link
    prediction ``y`` is 1 for an edge, 0 for a negative; and ``edge_index`` holds the
    training edges only. Other fields are as in :class:`NodeDataset`.
    """

    x: Tensor
    edge_index: Tensor
    y: Tensor
    # train, val, test, and those of a setting (unseen, missing, new_client)
    masks: Mapping[str, Tensor]
    batch: Tensor | None = None  # (N,), int64: graph of each node, non-decreasing
    pairs: Tensor | None = None  # (2, P), int64: pairs of nodes to predict
    pair_x: Tensor | None = None  # (P, a), float32: of edges to classify
    targets: Tensor | None = None
    # if a backbone reads them, without those of held-out pairs and later times
    messages: MessageEdges | None = None
    node_type: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """Number of nodes N."""
        return int(self.x.shape[0])

    @property
    def num_items(self) -> int:
        """Number of labelled items: N nodes, G graphs, or P pairs of nodes."""
        return int(self.y.numel())

    def class_counts(self, num_classes: int, chosen: Tensor | None = None) -> Tensor:
        """Count the items of each class, (C,); of labels and numbers those that have each.

        ``chosen`` is a boolean mask of items, by default all.
        """
        known = self.y >= 0
        known = known if chosen is None else known & chosen
        if self.targets is not None:
            values = self.targets[known]
            has = ~values.isnan() if values.is_floating_point() else values == 1
            return has.sum(dim=0)
        return torch.bincount(self.y[known], minlength=num_classes)


@dataclass(frozen=True, eq=False)
class Scaling:
    """Normalization that was applied to features.

    With the kind ``rows`` each node's features were divided by the sum of their absolute
    values. With ``columns`` each feature was standardized: ``statistics`` are the mean that
    was subtracted, and the deviation by which the result was divided, both (d,), float64.
    ``edge_statistics`` (a,) are those of the features of classified edges; ``None`` if
    these are unchanged.
    """

    kind: str
    statistics: tuple[Tensor, Tensor] | None = None
    edge_statistics: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, eq=False)
class OutsideEdges:
    """Edges between a client's nodes and nodes of other clients.

    ``own`` (m,), int64, is the number of the client's node in its graph, and ``other`` (m,)
    the identifier of the other client's node. ``ids`` (N,) are the identifiers of the
    client's own nodes, by which others name them.
    """

    own: Tensor
    other: Tensor
    ids: Tensor


@dataclass(frozen=True, eq=False)
class ClientGraph(_HasTarget):
    """All graphs of one client.

    Masks of ``graph``, for training, always include ``train``, ``val`` and ``test``,
    which may be empty. Each mask of the ``evaluation`` graphs (inductive validation and
    test graphs, unseen nodes, a new client's graph) is one metric column.
    """

    partition_id: int  # 0..K-1
    graph: Graph
    target: Target  # the same on every client
    # (N,) or (G,), int64: number of each node or graph in the source, ascending
    node_ids: Tensor
    evaluation: tuple[Graph, ...] = ()
    scaling: Scaling | None = None  # None for raw features
    # length d, followed by those of the features of edges that the run reads; or empty
    feature_names: tuple[str, ...] = ()
    outside: OutsideEdges | None = None  # None unless the method needs them
    edges: EdgeTable | None = None  # of which setting = "edge" makes its items
    name: str = ""  # of its natural owner; empty for a partition of a dataset
    # settings from which the split of an owner's graph was drawn, by name, and whether it
    # replaces one in the file
    drawn_from: tuple[tuple[str, bool | int | float | str], ...] = ()
    replaces_split: bool = False
    # hashes of recipe and vocabulary, one for each kind, sorted, separated by blanks
    prepared: str = ""
    schema: Schema | None = None

    @property
    def num_features(self) -> int:
        """Feature width d."""
        return int(self.graph.x.shape[1])

    @property
    def num_edge_features(self) -> int:
        """Width a of the features of edges that the run reads, else 0."""
        graph = self.graph
        if graph.pair_x is not None:
            return int(graph.pair_x.shape[1])
        return 0 if graph.messages is None else int(graph.messages.x.shape[1])

    @property
    def scale(self) -> str:
        """Kind of feature normalization: ``none``, ``rows`` or ``columns``."""
        return "none" if self.scaling is None else self.scaling.kind

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The training graph, then those for evaluation."""
        return (self.graph, *self.evaluation)

    def changed(self, change: Callable[[Graph], Graph]) -> ClientGraph:
        """Apply a function to all graphs."""
        graph, *others = map(change, self.graphs)
        return replace(self, graph=graph, evaluation=tuple(others))

    @property
    def held(self) -> tuple[Graph, ...]:
        """Graphs that count for the client's size: ``graph``, or all if it is a union."""
        return (self.graph,) if self.graph.batch is None else self.graphs

    @property
    def num_items(self) -> int:
        """Number of nodes (of the kind to predict), of graphs in a batch, or of pairs."""
        graph, schema = self.graph, self.schema
        is_of_nodes = graph.pairs is None and graph.batch is None
        if schema is not None and is_of_nodes and graph.node_type is not None:
            kind = schema.node_types.index(schema.target)
            return int((graph.node_type == kind).sum())
        return sum(graph.num_items for graph in self.held)

    @property
    def num_edges(self) -> int:
        """Number of undirected edges in :attr:`held`."""
        return sum(graph.edge_index.shape[1] // 2 for graph in self.held)

    def class_counts(self, mask: str = "train") -> Tensor:
        """Count the nodes (or graphs) of each class in a mask of ``graph``: (C,), int64."""
        return self.graph.class_counts(self.target.width, self.graph.masks[mask])

    def renumbered(self, partition_id: int, names: tuple[str, ...]) -> ClientGraph:
        """Return the graph with its number, and with the order of the federation.

        ``names`` are those of the classes, labels or numbers. Columns of ``targets`` are in
        this order, and unknown for a label or number that the graph lacks.
        """
        own = self.target
        unknown = sorted(set(own.names) - set(names))
        if unknown:
            raise DataError(
                f"The graph has {'targets' if own.has_numbers else own.kind} that the "
                f"federation does not know: {', '.join(unknown)}. A graph file must not "
                "change during a run; start the run again."
            )
        if names == own.names:
            return replace(self, partition_id=partition_id)
        unit = dict(zip(own.names, own.units, strict=False))
        units = tuple(unit.get(name, "") for name in names) if unit else ()
        target = Target(own.kind, names, units)
        client = self.changed(lambda graph: self._in_order(graph, names))
        return replace(client, partition_id=partition_id, target=target)

    def _in_order(self, graph: Graph, names: tuple[str, ...]) -> Graph:
        """Return one of the graphs with what is predicted in the order of ``names``."""
        numbers = [names.index(name) for name in self.target.names]
        if graph.targets is None:
            # the last entry maps the label -1 to itself
            return replace(graph, y=torch.tensor([*numbers, -1])[graph.y])
        unknown = torch.nan if self.target.kind == NUMBERS else -1
        targets = graph.targets.new_full((len(graph.targets), len(names)), unknown)
        targets[:, numbers] = graph.targets
        return replace(graph, targets=targets)  # y only says which items have a label
