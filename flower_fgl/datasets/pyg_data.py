"""Graphs of ``torch_geometric.data.Data`` as datasets and as graph files."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.core.schema import Triple, has_name
from flower_fgl.core.targets import CLASSES, KINDS, LABELS, NUMBERS, Target, TargetKind
from flower_fgl.datasets.client_graph import (
    ClientGraph,
    EdgeTable,
    Graph,
    GraphDataset,
    MessageEdges,
    NodeDataset,
)
from flower_fgl.datasets.graph_files.target_arrays import TargetValues
from flower_fgl.datasets.graph_files.validate import (
    check_target_names,
    doubtful_labels,
    validate_edges,
    validate_graph_dataset,
    validate_node_dataset,
)
from flower_fgl.datasets.graph_files.write import client_arrays, save_client_graph
from flower_fgl.datasets.pyg_read import (
    EDGE_LABELS,
    check_columns,
    check_numbering,
    joined,
    own_masks,
    read_edges,
    read_inputs,
    read_target,
    read_times,
    real_tensor,
    unread_of_plain,
)
from flower_fgl.datasets.pyg_typed import (
    TypedParts,
    TypeNames,
    is_hetero,
    is_typed,
    read_typed,
    read_typed_set,
    unread_of_typed,
)
from flower_fgl.datasets.transforms.typed import (
    TypedTarget,
    typed_dataset,
    with_edge_table,
)

__all__ = [
    "GivenNames",
    "graph_dataset",
    "graphs_to_score",
    "is_data",
    "is_graph",
    "node_dataset",
    "nodes_to_score",
    "plain_to_score",
    "store_graph",
    "store_graphs",
    "store_set",
    "to_npz",
]

log = logging.getLogger(__name__)

VALUES = {CLASSES: ("y",), LABELS: ("y", "y_mask"), NUMBERS: ("y", "y_mask")}
"""Attributes with what is predicted of each graph of a set."""
TARGET_TEXTS = ("target_names", "target_units", "label_names")
NO_CLASSES = ("",)
"""Class names of nodes without classes, as of a file that is read without labels."""


ONE_GRAPH, OWNERS = TypeNames(), TypeNames(is_single=False)


@dataclass(frozen=True)
class GivenNames:
    """What a caller of :func:`to_npz` says; classes are numbers by default."""

    classes: Sequence[str] | None = None
    features: Sequence[str] | Mapping[str, Sequence[str]] = ()
    edge_classes: Sequence[str] | None = None
    edge_features: Sequence[str] = ()
    declared: Sequence[str] = ()
    target: Target | None = None  # labels or numbers; without names they are read
    types: TypeNames = ONE_GRAPH

    @classmethod
    def of_kind(cls, kind: TargetKind, types: TypeNames = ONE_GRAPH) -> GivenNames:
        """Return that ``y`` holds targets of this kind, whose names the graph holds."""
        return cls(target=_given_target(kind, (), ()), types=types)


NO_NAMES = GivenNames()


def is_data(thing: object) -> bool:
    """Return whether an object is a ``torch_geometric.data.Data``."""
    from torch_geometric.data import Data

    return isinstance(thing, Data)


def is_graph(thing: object) -> bool:
    """Return whether an object is a ``Data`` or a ``HeteroData``."""
    return is_data(thing) or is_hetero(thing)


def to_npz(
    data: Any,
    path: str | os.PathLike[str],
    *,
    class_names: Sequence[str] | None = None,
    feature_names: Sequence[str] | Mapping[str, Sequence[str]] = (),
    edge_class_names: Sequence[str] | None = None,
    edge_feature_names: Sequence[str] = (),
    declared_classes: Sequence[str] = (),
    target_kind: TargetKind = CLASSES,
    target_names: Sequence[str] = (),
    target_units: Sequence[str] = (),
    node_type_names: Sequence[str] = (),
    edge_type_names: Sequence[str | Triple] = (),
    target_node: str = "",
    type_widths: Mapping[str, int] = MappingProxyType({}),
    private_relations: Collection[Triple] = (),
) -> Path:
    """Write a PyG graph as a data owner's graph file.

    Parameters
    ----------
    data : torch_geometric.data.Data or HeteroData
        One graph: ``x`` (N, d), ``edge_index`` (2, E), ``y`` (N,) with -1 for unknown
        classes, and optionally ``edge_attr`` (E, a), and ``train_mask``, ``val_mask`` and
        ``test_mask`` (N,), or ``train_idx`` etc., lists of nodes. To classify edges:
        ``edge_label`` or ``edge_y`` (E,), and optionally ``edge_time`` (E,), ascending, and
        ``edge_train_mask`` or ``edge_train_idx`` etc. Link prediction and edges need no
        ``y``. A typed graph is a ``HeteroData``, of which one kind of nodes has ``y``, or
        a ``Data`` with ``node_type`` (N,) and ``edge_type`` (E,).
    path : path-like
        The ``.npz`` file to write; its folder must exist.
    class_names : sequence of str, optional
        Length C. Data owners agree on classes by name. By default the numbers 0, 1, ….
    feature_names : sequence of str, or mapping of str to sequence of str
        Length d: names of the columns of ``x``; data owners agree on them too. Those of a
        ``HeteroData`` are given by kind of nodes.
    edge_class_names : sequence of str, optional
        Names of the classes of edges, by default the numbers 0, 1, ….
    edge_feature_names : sequence of str
        Length a: names of the columns of ``edge_attr``.
    target_kind : {"classes", "labels", "numbers"}
        What ``y`` holds: classes, or in (N, T) labels (1, 0, NaN if unknown) or numbers
        (NaN if unknown).
    target_names, target_units : sequence of str
        Length T: names of the labels or numbers, and the units of numbers. By default
        those of ``data.target_names`` and ``data.target_units``, or numbers.
    node_type_names : sequence of str
        Names of the kinds of nodes, by their numbers in ``node_type``. By default those of
        ``data.node_type_names`` or ``data.hetero_node_types``.
    edge_type_names : sequence of str or (str, str, str)
        Names of the relations, by their numbers in ``edge_type``, or triples (kind of the
        sources, name, kind of the targets). A name whose edges join several pairs of kinds
        gives a relation for each. By default those of ``data.edge_type_names`` or
        ``data.hetero_edge_types``.
    target_node : str
        Kind of the nodes to predict, by default ``data.target_node_type``, or the only
        kind with ``y``.
    type_widths : mapping of str to int
        Columns of ``x`` that the nodes of each kind have, if ``x`` was padded with zeros to
        one width. By default ``data.type_widths``, or all.
    private_relations : collection of (str, str, str)
        Relations that the owner keeps to itself.
    declared_classes : sequence of str
        Classes of nodes or edges that are classes although their name usually marks an
        unknown class (``unknown``, ``NA``), or although nearly every class has one item.

    Returns
    -------
    Path
        ``path``, for ``dataset`` or for a SuperNode's ``graph``.

    Raises
    ------
    DataError
        If the graph lacks features or edges, kinds of nodes or edges have no names, no node
        has a class although ``y`` is given, ``y`` holds floats, they do not fit each
        other, or an attribute looks like a split that cannot be read.
    OSError
        If the file cannot be written.

    Notes
    -----
    1. A warning names all attributes that are not read.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise DataError(f"A graph file ends in .npz, got {path.name}.")
    names = GivenNames(
        class_names,
        feature_names,
        edge_class_names,
        edge_feature_names,
        declared_classes,
        _given_target(target_kind, target_names, target_units),
        TypeNames(
            node_type_names,
            edge_type_names,
            target_node,
            type_widths,
            frozenset((a, name, b) for a, name, b in private_relations),
            is_single=False,
        ),
    )
    dataset = node_dataset(data, path.name, names)
    if dataset.edges is None and dataset.target.names == NO_CLASSES:
        log.warning(
            "%s: without y, the graph is of use for link prediction only.", path
        )
    save_client_graph(path, dataset.client(), has_ids=False)
    return path


def node_dataset(data: Any, name: str, names: GivenNames = NO_NAMES) -> NodeDataset:
    """Convert a PyG graph to a dataset for the classification of nodes or edges."""
    dataset = _converted(data, name, names)
    _warn_of_unread([data], [dataset], name)
    check_target_names(names.declared, f"{name}: declared_classes")
    _check_labels([dataset], names.declared)
    if names.classes is None and dataset.targets is None:
        check_numbering(dataset.y, name)
    edges = dataset.edges
    if names.edge_classes is None and edges is not None and edges.targets is None:
        check_numbering(edges.y, name, "edge")
    return dataset


def _converted(data: Any, name: str, given: GivenNames = NO_NAMES) -> NodeDataset:
    """Return a graph, of which nothing is checked that depends on other graphs."""
    if not is_graph(data):
        raise DataError(
            f"{name}: expected a torch_geometric.data.Data or HeteroData, got "
            f"{type(data).__name__}."
        )
    if is_typed(data, given.types):
        return _typed(data, name, given)
    if isinstance(given.features, Mapping):
        raise DataError(
            f"{name}: feature_names of a Data must be a list, one name for each column of "
            "x."
        )
    x, edge_index = read_inputs(data, name, given.features)
    messages = read_edges(data, name, given.edge_features)
    edges = _edges(data, name, given, messages)
    target, y, targets = _wanted(data, name, given, len(x))
    check_columns(given.features, x, name)
    dataset = NodeDataset(
        name=name,
        x=x,
        edge_index=edge_index,
        y=y,
        target=target,
        masks=own_masks(data, name),
        feature_names=tuple(given.features),
        edges=edges,
        targets=targets,
        messages=_if_described(messages, edge_index),
    )
    validate_node_dataset(dataset)
    return dataset


def _wanted(data: Any, name: str, given: GivenNames, size: int) -> TargetValues:
    """Return what is predicted of ``size`` nodes; nothing of a graph without ``y``."""
    if data.get("y") is None:  # enough for links and edges; other runs report it
        names: tuple[str, ...] = NO_CLASSES
        if given.classes is not None and len(given.classes):
            check_target_names(given.classes, f"{name}: class_names")
            names = tuple(given.classes)
        return TargetValues(Target.classes(names), torch.full((size,), -1))
    return read_target(data, name, given.target, given.classes, size)


def _typed(data: Any, name: str, given: GivenNames) -> NodeDataset:
    """Return a typed graph as a dataset."""
    parts = read_typed(data, name, given.types, given.features)
    target, y, targets = _wanted(parts.items, name, given, parts.size)
    masks = own_masks(parts.items, name, size=parts.size)
    rows = parts.rows
    _check_outside(rows, y, masks, parts.target, name)
    y, targets = y[rows], None if targets is None else targets[rows]
    masks = {key: mask[rows] for key, mask in masks.items()}
    dataset = typed_dataset(
        name,
        parts.tables,
        parts.relations,
        parts.target,
        TypedTarget(y, target, masks, targets),
        _private(given.types.private, parts, name),
    )
    validate_node_dataset(dataset)
    return _with_labelled_edges(dataset, data, name, given)


def _with_labelled_edges(
    dataset: NodeDataset,
    data: Any,
    name: str,
    given: GivenNames,
) -> NodeDataset:
    """Return a typed graph with the edges of the relation that has labels, if one has."""
    found = [
        triple
        for triple in (data.edge_types if is_hetero(data) else ())
        if has_name(triple, given.types.relation)
        and any(data[triple].get(key) is not None for key in EDGE_LABELS)
    ]
    if len(found) != 1:
        return dataset
    (triple,) = found
    store, where = data[triple], f"{name}: {' '.join(triple)}"
    table = _edges(store, where, given, read_edges(store, where, given.edge_features))
    assert table is not None
    return with_edge_table(dataset, table, triple)


def _edges_to_score(data: Any, name: str, *, has_numbers: bool) -> EdgeTable:
    """Return the edges with 0 for what is known of one, else -1; without their split.

    Integers are all known if the model predicts numbers.
    """
    messages = read_edges(data, name)
    number = messages.index.shape[1]
    known = torch.zeros(number, dtype=torch.bool)
    for key in EDGE_LABELS:
        label = real_tensor(data.get(key), key, name)
        if label is None:
            continue
        if not label.dim() or len(label) != number:
            raise DataError(
                f"{name}: {key} must hold one entry for each of the {number} edges, got "
                f"shape {tuple(label.shape)}."
            )
        is_real = label.is_floating_point()
        there = ~label.isnan() if is_real else (label >= 0) | has_numbers
        known |= there[:, None].flatten(1).any(dim=1)
    table = EdgeTable(
        messages.index,
        known.long() - 1,
        Target.classes(("known",)),
        messages.x,
        time=read_times(data, name),
    )
    validate_edges(table, name)
    return table


def plain_to_score(
    data: Any, name: str, *, scores_edges: bool = False, has_numbers: bool = False
) -> NodeDataset:
    """Read a graph with one kind of nodes without labels; its edges may be scored."""
    x, edge_index = read_inputs(data, name)
    unknown = torch.full((len(x),), -1)
    target = Target.classes(NO_CLASSES)
    edges, messages = None, read_edges(data, name)
    if scores_edges:
        edges = _edges_to_score(data, name, has_numbers=has_numbers)
    dataset = NodeDataset(
        name, x, edge_index, unknown, target, edges=edges, messages=messages
    )
    validate_node_dataset(dataset)
    return dataset


def nodes_to_score(
    data: Any, name: str, relation: str = "", *, has_numbers: bool = False
) -> tuple[NodeDataset, Tensor]:
    """Read a typed graph without labels, and the numbers of its nodes in PyG, (N,).

    Any kind of nodes is the target. With a ``relation`` its edges are read, to be scored;
    ``has_numbers`` says that a model predicts numbers of them.
    """
    parts = read_typed(data, name, TypeNames(), has_labels=False)
    unknown = torch.full((len(parts.tables[parts.target].x),), -1)
    wanted = TypedTarget(unknown, Target.classes(NO_CLASSES))
    dataset = typed_dataset(name, parts.tables, parts.relations, parts.target, wanted)
    validate_node_dataset(dataset)
    named = data.edge_types if relation and is_hetero(data) else ()
    found = [triple for triple in named if has_name(triple, relation)]
    if len(found) == 1:
        (triple,) = found
        where = f"{name}: {' '.join(triple)}"
        table = _edges_to_score(data[triple], where, has_numbers=has_numbers)
        dataset = with_edge_table(dataset, table, triple)
    return dataset, parts.numbers


def _check_outside(
    rows: Tensor, y: Tensor, masks: Mapping[str, Tensor], kind: str, name: str
) -> None:
    """Reject labels and masks of nodes of other kinds than the one to predict."""
    other = torch.ones(len(y), dtype=torch.bool)
    other[rows] = False
    if number := int((other & (y >= 0)).sum()):
        raise DataError(
            f"{name}: {number} nodes of other kinds than {kind} have a class or a value. "
            "Set their y to -1 (NaN for numbers), or set target-node."
        )
    for key, mask in masks.items():
        if number := int((other & mask).sum()):
            raise DataError(
                f"{name}: {number} nodes of other kinds than {kind} are in {key}_mask, but "
                f"only those of the kind {kind} are predicted. Set it to False for them."
            )


def _private(
    given: Collection[Triple], parts: TypedParts, name: str
) -> frozenset[Triple]:
    """Return the private relations of a caller, all of which the graph must have."""
    if unknown := sorted(set(given) - set(parts.relations)):
        raise DataError(
            f"{name}: private_relations lists {' '.join(unknown[0])}, which is no relation "
            "of the graph. Relations: "
            f"{', '.join(' '.join(one) for one in parts.relations)}."
        )
    return frozenset(given)


def _warn_of_unread(
    graphs: Sequence[Any],
    datasets: Sequence[NodeDataset],
    name: str,
    *,
    is_set: bool = False,
) -> None:
    """Log the attributes that none of the graphs is read with, once."""
    unread, has_values = set[str](), any(d.targets is not None for d in datasets)
    for graph, d in zip(graphs, datasets, strict=True):
        if d.schema is None:
            unread |= unread_of_plain(graph, has_values=has_values, is_set=is_set)
        else:
            predicted = d.schema.predicted if d.edges else None
            target = d.schema.target
            unread |= unread_of_typed(graph, target, predicted, has_values=has_values)
    if unread:
        of_edges = any(key.startswith("edge_") for key in unread)
        log.warning(
            "%s: not read: %s. Features of nodes are the columns of x%s.",
            name,
            ", ".join(sorted(unread)),
            ", those of edges the columns of edge_attr" if of_edges else "",
        )


def _given_target(
    kind: TargetKind, names: Sequence[str], units: Sequence[str]
) -> Target | None:
    """Return the labels or numbers that a caller names; ``None`` for classes."""
    if kind not in KINDS:
        raise DataError(f"target_kind must be one of {', '.join(KINDS)}, got {kind}.")
    if kind == CLASSES and (names or units):
        raise DataError(
            'target_names and target_units need target_kind = "labels" or "numbers".'
        )
    return None if kind == CLASSES else Target(kind, tuple(names), tuple(units))


def _if_described(messages: MessageEdges, edge_index: Tensor) -> MessageEdges | None:
    """Return the edges; ``None`` if they are undirected, simple and without features."""
    if messages.x.shape[1] or messages.index.shape != edge_index.shape:
        return messages
    order = torch.argsort(messages.index[1], stable=True)
    order = order[torch.argsort(messages.index[0][order], stable=True)]
    return None if torch.equal(messages.index[:, order], edge_index) else messages


def _edges(
    data: Any, name: str, given: GivenNames, messages: MessageEdges
) -> EdgeTable | None:
    """Return the edges with their classes; ``None`` if they have none."""
    held = [key for key in EDGE_LABELS if data.get(key) is not None]
    if not held:
        if given.edge_classes is not None:
            raise DataError(
                f"{name}: there are names of classes of edges, but the graph has no "
                "edge_label."
            )
        return None
    if data.get("edge_label_index") is not None or len(held) > 1:
        raise DataError(
            f"{name}: expected one class for each edge of edge_index, as edge_label or "
            "edge_y; edge_label_index, which refers to other edges, is not supported."
        )
    several = None  # names of columns are those of y
    if given.target is not None and given.target.has_numbers:
        several = Target(given.target.kind, ())
    number = messages.index.shape[1]
    target, y, targets = read_target(
        data, name, several, given.edge_classes, number, key=held[0], item="edge"
    )
    table = EdgeTable(
        messages.index,
        y,
        target,
        messages.x,
        messages.feature_names,
        read_times(data, name),
        own_masks(data, name, "edge_"),
        targets,
    )
    validate_edges(table, name)
    return table


def _check_labels(
    datasets: Sequence[NodeDataset], declared: Collection[str] = ()
) -> None:
    """Reject classes that are probably none, in a graph and in all of them together."""
    of_nodes = [(d.name, d.y, d.target.names) for d in datasets if d.targets is None]
    tables = [(d.name, d.edges) for d in datasets if d.edges is not None]
    of_edges = [(n, t.y, t.target.names) for n, t in tables if t.targets is None]
    for key, item, parts in (("y", "node", of_nodes), ("edge_label", "edge", of_edges)):
        longest = max((names for *_, names in parts), key=len, default=())
        whole = torch.cat(
            [torch.empty(0, dtype=torch.int64), *(y for _, y, _ in parts)]
        )
        if not doubtful_labels(whole, longest, declared):
            continue
        for name, y, names in parts:
            doubt = doubtful_labels(
                y,
                names,
                declared,
                item=item,
                unknown=f"Set {key} to -1",
                declare="write the graph with to_npz(…, declared_classes=…)",
            )
            if doubt:
                raise DataError(f"{name}, {key}: {doubt}")


def graph_dataset(
    graphs: Sequence[Any], name: str, kind: TargetKind = CLASSES
) -> GraphDataset:
    """Convert G PyG graphs with ``x``, ``edge_index`` and ``y`` to a dataset.

    Typed graphs are ``HeteroData`` with ``y`` of the whole graph, or ``Data`` with kinds.
    With classes ``y`` is the class of each graph, -1 if unknown; else it has shape (T,) or
    (1, T), NaN where unknown. A run leaves graphs without a known value out.
    """
    _require_list(graphs, name)
    items = [_own_attributes(graph) if is_hetero(graph) else graph for graph in graphs]
    _check_alike(items, name, kind)
    union, batch = _read_union(graphs, name)
    joint = {key: items[0].get(key) for key in TARGET_TEXTS}
    several = None if kind == CLASSES else Target(kind, ())
    for key in VALUES[kind]:
        joint[key] = values = _joint_values(items, key, name)
        if several is not None and values is not None:
            joint[key] = values.reshape(len(graphs), -1)
    target, y, targets = read_target(
        joint, name, several, None, len(graphs), item="graph"
    )
    if several is None:
        check_numbering(y, name, "graph")
    read = [replace(union, targets=targets)] * len(graphs)
    _warn_of_unread(graphs, read, name, is_set=True)
    if union.schema is None and union.messages is not None:
        messages = _if_described(union.messages, union.edge_index)
        union = replace(union, x=union.x.to_dense(), messages=messages)
    dataset = GraphDataset.of(union, batch, y, target, targets=targets)
    validate_graph_dataset(dataset, may_be_unknown=True)
    return dataset


def _joint_values(items: Sequence[Any], key: str, name: str) -> Tensor | None:
    """Return an attribute of all graphs, of which shapes are alike; ``None`` without it."""
    if items[0].get(key) is None:
        return None
    rows = []
    for number, item in enumerate(items):
        one = item.get(key)
        one = torch.tensor(one) if isinstance(one, int | float) else one
        one = real_tensor(one, key, f"graph {number} of {name}")
        rows.append(one.reshape(1) if one.numel() == 1 else one)
    return torch.cat(rows)


def graphs_to_score(graphs: Any, name: str) -> GraphDataset:
    """Read a list of graphs without targets."""
    _require_list(graphs, name)
    union, batch = _read_union(graphs, name)
    unknown, target = torch.full((len(graphs),), -1), Target.classes(NO_CLASSES)
    dataset = GraphDataset.of(union, batch, unknown, target)
    validate_graph_dataset(dataset, may_be_unknown=True)
    return dataset


def _read_union(graphs: Sequence[Any], name: str) -> tuple[NodeDataset, Tensor]:
    """Return PyG graphs as one disjoint union without targets; the graph of each node."""
    if any(is_typed(graph, ONE_GRAPH) for graph in graphs):
        return read_typed_set(graphs, name)
    joint = joined(graphs, name, ("x", "edge_attr"))
    x, edge_index = read_inputs(joint, name)
    unknown, target = torch.full((len(x),), -1), Target.classes(NO_CLASSES)
    messages = read_edges(joint, name)
    union = NodeDataset(name, x, edge_index, unknown, target, messages=messages)
    return union, joint.batch


def _require_list(graphs: Any, name: str) -> None:
    """Reject what is no list of graphs of one of PyG's classes."""
    is_list = isinstance(graphs, list | tuple) and bool(graphs)
    if is_list and (all(map(is_data, graphs)) or all(map(is_hetero, graphs))):
        return
    raise DataError(
        f"{name}: expected a list of torch_geometric.data.Data, or of HeteroData, one per "
        "graph."
    )


def _own_attributes(graph: Any) -> Any:
    """Return what a ``HeteroData`` holds of the whole graph."""
    from torch_geometric.data import Data

    return Data.from_dict({**graph.to_dict()["_global_store"], "num_nodes": 1})


def _check_alike(graphs: Sequence[Any], name: str, kind: TargetKind) -> None:
    """Reject graphs of a set of which some lack an attribute, or a target."""
    keys = {key for key in graphs[0].keys() if graphs[0].get(key) is not None}  # noqa: SIM118
    shapes = {key: _shape(graphs[0], key) for key in VALUES[kind]}
    if kind != CLASSES and graphs[0].get("y") is None:
        raise DataError(f"{name}: the graphs have no y, the {kind} to predict.")
    for number, graph in enumerate(graphs):
        other = {key for key in graph.keys() if graph.get(key) is not None}  # noqa: SIM118
        if odd := sorted(keys ^ other):
            raise DataError(
                f"{name}: graphs 0 and {number} differ in their attributes "
                f"({', '.join(odd)}). Give all graphs the same; an unknown y is NaN, and "
                "several have a y_mask."
            )
        for key in TARGET_TEXTS:
            if (own := graph.get(key)) != (first := graphs[0].get(key)):
                raise DataError(
                    f"{name}: {key} is {first!r:.80} in graph 0, but {own!r:.80} in graph "
                    f"{number}. Give all graphs the same targets."
                )
        for key, first in shapes.items():
            if (found := _shape(graph, key)) != first:
                each = (
                    "class" if kind == CLASSES else "value per target, NaN if unknown"
                )
                raise DataError(
                    f"{name}: {key} has shape {first} in graph 0, but {found} in graph "
                    f"{number}. Give each graph one {each}."
                )


def _shape(graph: Any, key: str) -> tuple[int, ...]:
    """Return the shape of an attribute; that of one value is ``(1,)`` in any form."""
    found = tuple(getattr(graph.get(key), "shape", ()))
    return found if math.prod(found) != 1 else (1,)


def store_graph(
    data: Any, folder: Path, kind: TargetKind = CLASSES, types: TypeNames = ONE_GRAPH
) -> Path:
    """Write a PyG graph to a folder, under a name that depends on its content."""
    given = GivenNames.of_kind(kind, types)
    client = node_dataset(data, "the graph", given).client()
    path = folder / f"graph-{_digest(client)}.npz"
    return _stored([(path, client)], path)


def store_graphs(
    graphs: Sequence[Any],
    folder: Path,
    kind: TargetKind = CLASSES,
    types: TypeNames = OWNERS,
) -> Path:
    """Write PyG graphs, one per client, to a folder of their own, which is returned."""
    if not graphs:
        raise DataError("The list of graphs is empty: give one graph for each client.")
    names = GivenNames.of_kind(kind, types)
    datasets = [
        _converted(g, f"graph {k} of the list", names) for k, g in enumerate(graphs)
    ]
    _warn_of_unread(graphs, datasets, "the list of graphs")
    _check_labels(datasets)
    if kind == CLASSES:
        check_numbering(torch.cat([d.y for d in datasets]), "the list of graphs")
    found = [d.edges for d in datasets if d.edges is not None]
    tables = [edges.y for edges in found if edges.targets is None]
    check_numbering(torch.cat([torch.empty(0), *tables]), "the list of graphs", "edge")
    clients = [dataset.client() for dataset in datasets]
    digests = "".join(map(_digest, clients))
    digest = hashlib.sha256(digests.encode()).hexdigest()[:16]
    where = folder / f"graphs-{len(datasets)}-{digest}"
    width = max(4, len(str(len(datasets))))
    paths = [where / f"client-{k:0{width}}.npz" for k in range(len(datasets))]
    return _stored(list(zip(paths, clients, strict=True)), where)


def store_set(graphs: Sequence[Any], folder: Path, kind: TargetKind = CLASSES) -> Path:
    """Write a set of PyG graphs to a folder, as one file; return its path."""
    dataset = graph_dataset(graphs, "the list of graphs", kind)
    whole = Graph(
        dataset.x,
        dataset.edge_index,
        dataset.y,
        {},
        batch=dataset.batch,
        targets=dataset.targets,
        messages=dataset.messages,
        node_type=dataset.node_type,
    )
    numbers = torch.arange(dataset.num_graphs)
    client = dataset.client_of(whole, partition_id=0, node_ids=numbers)
    path = folder / f"set-{_digest(client)}.npz"
    return _stored([(path, client)], path)


def _stored(files: Sequence[tuple[Path, ClientGraph]], result: Path) -> Path:
    """Write the graphs or sets whose files do not exist, and return ``result``."""
    try:
        for path, client in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                save_client_graph(path, client, has_ids=False)
    except OSError as error:
        raise DataError(
            f"Cannot write the graph to {result}: {error}. Free some disk space, or set "
            "FLOWER_FGL_CACHE to another folder."
        ) from error
    return result


def _digest(client: ClientGraph) -> str:
    """Return a hash of the content of a client's file."""
    found = hashlib.sha256()
    for name, array in sorted(client_arrays(client, has_ids=False).items()):
        found.update(repr((name, array.dtype.str, array.shape)).encode())
        found.update(array.tobytes())
    return found.hexdigest()[:16]
