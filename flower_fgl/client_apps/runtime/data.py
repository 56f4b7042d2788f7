"""A client's graph as tensors on its device, opened by a node config; names and floors."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from flwr.app import Context, Message
from torch import Tensor

from flower_fgl.client_apps.runtime.training import (
    EdgeTrainingSet,
    LinkTrainingSet,
    TrainingSet,
)
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import DataError, PayloadError, RunError, clip
from flower_fgl.core.node_settings import NodeSettings
from flower_fgl.core.options import Scalar
from flower_fgl.core.schema import Schema
from flower_fgl.core.target_scale import TargetScale
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.datasets.owned import client_from_file
from flower_fgl.datasets.store import open_store
from flower_fgl.datasets.transforms.normalize_features import order_columns
from flower_fgl.nn import GraphInput
from flower_fgl.nn.relations import Relations
from flower_fgl.protocols.describe import (
    AGREEMENT,
    MAX_TEXT,
    UNNUMBERED,
    ClassAgreement,
)

__all__ = ["ClientData", "agreed_place", "broken_by_data", "client_label"]
__all__ += ["file_stamps", "models_folder", "node_place", "open_client_data"]
__all__ += ["owner_key", "owner_name", "read_agreement"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ClientData:
    """A client's graph as tensors on its device, with its labels and evaluation graphs.

    ``inputs`` are the training graph and each evaluation graph, whose propagation
    operators are computed once. ``training`` holds training nodes (or graphs) and
    labels; numbers are standardised in float32 once their ``scale`` is known (``None``
    for classes). ``labels`` of each graph are classes (n_g,), int64; several labels
    (n_g, T), float32, NaN if unknown; or numbers (n_g, T), float64, NaN if unknown.
    ``columns`` are masks (n_g,) of the nodes (or graphs) of every score column of each
    graph, ``sizes`` their labelled nodes. ``own_classes`` (C,) marks classes with a
    training node. ``partition_sha256`` is empty for a data owner's own file; ``place``
    is partition-id and number of partitions. ``memo`` holds results that are computed
    once per graph, e.g. by a method.
    """

    graph: ClientGraph
    inputs: list[GraphInput]
    training: TrainingSet
    labels: list[Tensor]
    columns: list[dict[str, Tensor]]
    sizes: dict[str, int]
    own_classes: Tensor
    num_classes: int
    partition_sha256: str = ""
    place: tuple[int, int] = (UNNUMBERED, 0)
    scale: TargetScale | None = None
    memo: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @property
    def num_entries(self) -> int:
        """Number of known training labels or numbers, or of training items with classes."""
        labels = self.training.labels
        return int((~labels.isnan()).sum()) if labels.dim() == 2 else labels.numel()

    @cached_property
    def graph_bytes(self) -> int:
        """Estimate of the memory of the graphs and of cached operators, in bytes."""
        size = 0
        for g in (self.graph.graph, *self.graph.evaluation):
            is_sparse = g.x.layout == torch.sparse_csr
            features = 12 * g.x.values().numel() if is_sparse else 4 * g.x.numel()
            size += 24 * g.edge_index.numel() + 2 * features
        return size

    @classmethod
    def build(
        cls,
        graph: ClientGraph,
        device: torch.device,
        partition_sha256: str = "",
        place: tuple[int, int] = (UNNUMBERED, 0),
    ) -> ClientData:
        """Move a graph to its device and index its masks."""
        graphs = [graph.graph, *graph.evaluation]
        inputs = [_graph_input(g).to(device) for g in graphs]
        scored = {name for g in graph.evaluation for name in g.masks} | {"train"}
        columns = [{n: m for n, m in graph.graph.masks.items() if n not in scored}]
        columns += [dict(g.masks) for g in graph.evaluation]
        sizes = {
            name: int((mask & (g.y >= 0)).sum())
            for g, masks in zip(graphs, columns, strict=True)
            for name, mask in masks.items()
        }
        return cls(
            graph,
            inputs,
            _training_set(graph.graph, inputs[0]),
            [_labels_of(g).to(device) for g in graphs],
            [{n: m.to(device) for n, m in masks.items()} for masks in columns],
            sizes,
            (graph.class_counts("train") > 0).to(device),
            graph.num_classes,
            partition_sha256,
            place,
        )

    def with_inputs(self, inputs: Sequence[GraphInput]) -> ClientData:
        """Return the data on graphs with more nodes.

        These have no label, and are in no set that is trained on or evaluated.
        """
        more = [g.num_nodes - len(y) for g, y in zip(inputs, self.labels, strict=True)]
        return replace(
            self,
            inputs=list(inputs),
            training=TrainingSet(inputs[0], self.training.index, self.training.labels),
            labels=[
                F.pad(y, (0, m), value=-1)
                for y, m in zip(self.labels, more, strict=True)
            ],
            columns=[
                {name: F.pad(mask, (0, m), value=False) for name, mask in masks.items()}
                for masks, m in zip(self.columns, more, strict=True)
            ],
            memo={},  # the data that keep these in their memo would refer to themselves
        )


def _training_set(graph: Graph, inputs: GraphInput) -> TrainingSet:
    """Return the training nodes, graphs or edges of a graph."""
    if graph.pairs is not None and graph.pair_x is None:
        return LinkTrainingSet.of(graph, inputs)
    index = (graph.masks["train"] & (graph.y >= 0)).nonzero().squeeze(1)
    labels = _labels_of(graph)[index].to(inputs.device)
    kind = TrainingSet if graph.pairs is None else EdgeTrainingSet
    return kind(inputs, index.to(inputs.device), labels)


def _labels_of(graph: Graph) -> Tensor:
    """Return the classes; of labels 1, 0, of numbers these, NaN if unknown or hidden."""
    if graph.targets is None:
        return graph.y
    is_hidden = (graph.y < 0)[:, None]
    if graph.targets.is_floating_point():
        return graph.targets.masked_fill(is_hidden, torch.nan)
    is_unknown = (graph.targets < 0) | is_hidden
    return graph.targets.to(torch.float32).masked_fill(is_unknown, torch.nan)


def _graph_input(graph: Graph) -> GraphInput:
    """Return a graph, or a batch of graphs, with the edges for messages, as model input."""
    batch: dict[str, Any] = {}
    if graph.batch is not None and graph.pairs is None:
        batch = {"batch": graph.batch, "num_graphs": graph.num_items}
    inputs = GraphInput(graph.x, graph.edge_index, **batch)
    if graph.pairs is not None:
        inputs = inputs.with_pairs(graph.pairs, graph.pair_x)
    edges = graph.messages
    if edges is not None and edges.relation is not None:
        assert graph.node_type is not None
        relations = Relations(graph.node_type, edges.index, edges.relation)
        return inputs.with_relations(relations)
    return inputs if edges is None else inputs.with_messages(edges.index, edges.x)


def open_client_data(
    config: RunConfig,
    context: Context,
    device: torch.device,
    agreement: ClassAgreement | None = None,
) -> ClientData:
    """Load the graph named in the node config: ``graph``, or a partition of a dataset.

    Without an agreement a data owner's graph keeps its own class order. The DataError of
    a data owner's file reveals no content, since the server receives it; the log of this
    node has the details.
    """
    node = context.node_config
    if "graph" in node:
        try:
            graph = client_from_file(
                Path(str(node["graph"])), config, str(node.get("id-key", ""))
            )
        except DataError as error:
            log.error("The graph of this node cannot be used: %s", error)
            raise DataError(
                "its graph file cannot be used. The log of its SuperNode names the error; "
                "flower-fgl check-graph shows it too."
            ) from None
        place = node_place(node)
        if agreement is not None:
            if agreement.feature_names and not config.share_feature_names:
                raise PayloadError(
                    "the agreement names features, but share-feature-names is false"
                )
            graph = graph.renumbered(agreement.partition_id, agreement.names)
            place = agreement.partition_id, agreement.num_partitions
        graph = _in_agreed_schema(graph, config, agreement)
        if agreement is not None:  # names are in the order of the agreed schema
            graph = order_columns(graph, agreement.feature_names)
        return ClientData.build(graph, device, place=place)
    partition_id, num_partitions = node_place(node)
    store = open_store(config, num_partitions)
    return ClientData.build(
        _in_agreed_schema(store.load(partition_id), config, agreement),
        device,
        store.index.partition_sha256,
        (partition_id, num_partitions),
    )


def _in_agreed_schema(
    graph: ClientGraph, config: RunConfig, agreement: ClassAgreement | None
) -> ClientGraph:
    """Return a typed graph with kinds and relations numbered as all clients do."""
    if graph.schema is None:
        return graph
    # other runs do not load the code of typed graphs
    from flower_fgl.datasets.transforms.typed import agreed_graph

    text = "" if agreement is None else agreement.schema
    agreed = Schema.from_text(text) if text else None
    return agreed_graph(graph, config.schema_align, agreed)


def file_stamps(node: Mapping[str, Any]) -> tuple[tuple[str, int, int], ...]:
    """Return a value that changes when the graph file of a node config changes.

    It holds name, bytes and modification time (nanoseconds) of the file, or of every file
    of the folder and of its folders ``nodes`` and ``edges``, and of ``id-key``; it is empty
    without ``graph`` or such a file.
    """
    if "graph" not in node:
        return ()
    # the methods of Path raise errors for long names and unknown users
    path = Path(os.path.expanduser(str(node["graph"])))
    files = [path]
    if os.path.isdir(path):
        parts = path.iterdir(), path.glob("nodes/*"), path.glob("edges/*")
        files = sorted(file for part in parts for file in part)
    if "id-key" in node:
        files.append(Path(os.path.expanduser(str(node["id-key"]))))
    found = []
    for file in files:
        with contextlib.suppress(OSError, ValueError):  # ValueError: a NUL character
            stat = file.stat()
            found.append((file.name, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def node_place(node: Mapping[str, Any]) -> tuple[int, int]:
    """Read ``partition-id`` and ``num-partitions``; RunError if they are no partition.

    A data owner may omit both; the server then assigns its partition-id.
    """
    if "graph" in node and not {"partition-id", "num-partitions"} & node.keys():
        return UNNUMBERED, 0
    out = []
    for key in ("partition-id", "num-partitions"):
        value = node.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise RunError(
                f"The node config must hold {key} as a whole number, got {value!r}. "
                "Start the SuperNode with --node-config "
                '"partition-id=0 num-partitions=3", or with graph="/path/to/graph.npz".'
            )
        out.append(value)
    if out[0] >= out[1]:
        raise RunError(
            f"partition-id must be below num-partitions = {out[1]}, got {out[0]}. "
            "Partitions are numbered from 0."
        )
    return out[0], out[1]


def read_agreement(message: Message) -> ClassAgreement | None:
    """Return the agreement with the data owners, if the message holds one."""
    if AGREEMENT not in message.content:
        return None
    return ClassAgreement.from_record(message.content)


def agreed_place(message: Message, context: Context) -> tuple[int, int]:
    """Return a client's partition-id and the number of partitions: agreed, or its node's.

    They are -1 and 0 for a data owner that the server has not numbered yet.
    """
    # a node with a partition of a dataset has its number from its own node config
    agreement = read_agreement(message)
    if agreement is not None and "graph" in context.node_config:
        return agreement.partition_id, agreement.num_partitions
    return node_place(context.node_config)


def owner_name(node: Mapping[str, Scalar]) -> str:
    """Return a data owner's name: ``name`` of the node config, else that of ``graph``.

    The name of a file is used without its ending. It is empty for a partition of a
    dataset. Characters that the server refuses, such as line breaks, are escaped.
    """
    path = Path(str(node.get("graph", "")))
    name = path.stem if path.suffix == ".npz" else path.name
    return clip(node.get("name", name), MAX_TEXT)


def owner_key(node: Mapping[str, Scalar]) -> str:
    """Return a name for a node's files that follows from its graph and nothing else.

    Two graphs never have the same key, whatever their owners are named.
    """
    about = f"partition {node.get('partition-id')} of {node.get('num-partitions')}"
    if "graph" in node:
        about = os.path.realpath(os.path.expanduser(str(node["graph"])))
    return hashlib.sha256(about.encode()).hexdigest()[:16]


def models_folder(node: Mapping[str, Scalar]) -> Path | None:
    """Return the folder of a node's models, ``None`` if it stores none.

    It is ``model-dir``, by default ``models`` for a data owner and none for a partition.
    """
    folder = node.get("model-dir", "models" if "graph" in node else "")
    return Path(str(folder)).expanduser() if folder else None


def client_label(node: Mapping[str, Scalar]) -> str:
    """Return a data owner's name, or the number of a partition, for messages."""
    return owner_name(node) or f"client {node.get('partition-id', '(no number)')}"


def broken_by_data(
    node: NodeSettings, config: RunConfig, data: ClientData
) -> list[str]:
    """Return a phrase, without numbers of the graph, for each floor that a run breaks."""
    found = []
    if data.graph.replaces_split and node.own_split:
        # the default of a set of graphs is a split by identifiers
        is_set = config.classifies_graphs
        remedy = (
            "set split = public in the run" if is_set else "leave split out of the run"
        )
        found.append(
            f"split = {config.split}, but the split in its graph file counts: {remedy}, or "
            "the data owner sets own-split = false"
        )
    if int(data.training.index.numel()) < node.min_train_nodes:
        found.append(
            f"too few training items here: its node config demands min-train-nodes = "
            f"{node.min_train_nodes}"
        )
    name, least = config.positive_class, config.min_class_count
    if node.hides_numbers:
        # else the server could choose the run's number, and the refusals would count
        least = node.min_class_count
    if node.graph and name and least > 1 and fewest_members(data, name) < least:
        found.append(
            f"positive-class = {name}, of which a set of this node has fewer than "
            f"min-class-count = {least} items"
        )
    return found


def fewest_members(data: ClientData, name: str) -> int:
    """Return the fewest items of a class in a non-empty set; 0 if the graph lacks it."""
    if name not in data.graph.target.names or data.graph.graph.targets is not None:
        return 0
    number, sets = data.graph.target.names.index(name), [data.training.labels]
    for _, y, masks in zip(data.inputs, data.labels, data.columns, strict=True):
        sets += [y[mask & (y >= 0)] for mask in masks.values()]
    return min((int((y == number).sum()) for y in sets if len(y)), default=0)
