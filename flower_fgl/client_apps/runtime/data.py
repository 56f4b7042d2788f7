"""A client's graph as it is computed with: how a process opens and keeps it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from torch import Tensor

from flower_fgl.client_apps.runtime.training import TrainingSet
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import DataError, RunError
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.datasets.owned import client_from_file
from flower_fgl.datasets.store import open_store
from flower_fgl.nn import GraphInput
from flower_fgl.protocols.describe import UNNUMBERED, ClassAgreement

__all__ = [
    "ClientData",
    "DataCache",
    "file_stamps",
    "node_place",
    "open_client_data",
]

log = logging.getLogger(__name__)
CACHE_BYTES = 2 << 30


@dataclass(frozen=True, eq=False)
class ClientData:
    """A client's graph in the form in which it is computed with, on its device.

    Parameters
    ----------
    graph : ClientGraph
        What the client sees.
    inputs : list of GraphInput
        Of the training graph and of each evaluation graph; their propagation operators
        are computed once.
    training : TrainingSet
        Training nodes (or graphs) and labels.
    labels : list of Tensor of shape (n_g,), int64
        Classes of each graph's nodes; of a union of graphs, those of the graphs.
    columns : list of dict of str to Tensor of shape (n_g,), bool
        For each graph: the nodes (or graphs) of every score column.
    sizes : dict of str to int
        Labelled nodes (or graphs) of every score column.
    own_classes : Tensor of shape (C,), bool
        Classes of which the client has a training node (or graph).
    partition_sha256 : str
        Hash of the partition; empty for an owner's own file.
    shapes : dict of str to (dict of str to tuple of int)
        Shapes of the state of each backbone built here: a memo.
    memo : dict
        What a method computes once for the graph.
    """

    graph: ClientGraph
    inputs: list[GraphInput]
    training: TrainingSet
    labels: list[Tensor]
    columns: list[dict[str, Tensor]]
    sizes: dict[str, int]
    own_classes: Tensor
    partition_sha256: str
    shapes: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    memo: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @classmethod
    def build(
        cls, graph: ClientGraph, device: torch.device, partition_sha256: str = ""
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
        index = (graph.graph.masks["train"] & (graph.graph.y >= 0)).nonzero().squeeze(1)
        return cls(
            graph,
            inputs,
            TrainingSet(inputs[0], index.to(device), graph.graph.y[index].to(device)),
            [g.y.to(device) for g in graphs],
            [{n: m.to(device) for n, m in masks.items()} for masks in columns],
            sizes,
            (graph.class_counts("train") > 0).to(device),
            partition_sha256,
        )

    @property
    def num_bytes(self) -> int:
        """Memory of features, edges and the memo, in bytes, caches estimated."""
        graphs = [self.graph.graph, *self.graph.evaluation]
        kept = _memo_bytes(self.memo) + _memo_bytes(self.training.fields)
        return kept + sum(
            3 * 8 * g.edge_index.numel() + 2 * _feature_bytes(g.x) for g in graphs
        )


def _graph_input(graph: Graph) -> GraphInput:
    if graph.batch is None:
        return GraphInput(graph.x, graph.edge_index)
    return GraphInput(
        graph.x, graph.edge_index, batch=graph.batch, num_graphs=graph.num_items
    )


def _feature_bytes(x: Tensor) -> int:
    if x.layout == torch.sparse_csr:
        return 12 * int(x.values().numel())
    return 4 * x.numel()


def _memo_bytes(value: Any) -> int:
    """Add up tensors, and what says its ``num_bytes``, in a memo."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(_memo_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_memo_bytes(item) for item in value)
    return int(getattr(value, "num_bytes", 0))


class DataCache:
    """The graphs a process has opened, the least recently used dropped first.

    Parameters
    ----------
    limit : int
        Bytes kept at most (the newest is always kept).
    """

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit = limit
        self._entries: OrderedDict[tuple[Any, ...], ClientData] = OrderedDict()
        self._sizes: dict[tuple[Any, ...], int] = {}

    def get(self, key: tuple[Any, ...], build: Callable[[], ClientData]) -> ClientData:
        """Return what is kept under ``key``, else build and keep it."""
        if self._entries:
            # its memo may have grown since it was handed out
            newest = next(reversed(self._entries))
            self._sizes[newest] = self._entries[newest].num_bytes
        if key not in self._entries:
            self._entries[key] = build()
        self._entries.move_to_end(key)
        self._sizes[key] = self._entries[key].num_bytes
        total = sum(self._sizes.values())
        while total > self._limit and len(self._entries) > 1:
            oldest, _ = self._entries.popitem(last=False)
            total -= self._sizes.pop(oldest)
        return self._entries[key]


def open_client_data(
    config: RunConfig,
    context: Context,
    device: torch.device,
    agreement: ClassAgreement | None = None,
) -> ClientData:
    """Load the graph a node is told to hold.

    Parameters
    ----------
    config : RunConfig
        Data settings.
    context : Context
        Its node config holds either ``graph`` (an owner's own file) or ``partition-id``
        and ``num-partitions``.
    device : torch.device
        Where to put it.
    agreement : Agreement, optional
        What was settled with an owner; before, the graph is in its own class order.

    Returns
    -------
    ClientData

    Raises
    ------
    DataError
        If the data cannot be had. Of an owner's file the message says nothing of what is
        in it, since it travels to the server; this node's log says more.
    """
    node = context.node_config
    if "graph" in node:
        try:
            graph = client_from_file(Path(str(node["graph"])), config)
        except DataError as error:
            log.error("The graph of this node cannot be used: %s", error)
            raise DataError(
                "its graph file cannot be used; the log of its SuperNode says why, and "
                "so does flower-fgl check-graph."
            ) from None
        if agreement is not None:
            graph = graph.renumbered(agreement.partition_id, agreement.class_names)
        return ClientData.build(graph, device)
    partition_id, num_partitions = node_place(node)
    store = open_store(config, num_partitions)
    return ClientData.build(
        store.load(partition_id), device, store.index.partition_sha256
    )


def file_stamps(node: Mapping[str, Any]) -> tuple[tuple[str, int, int], ...]:
    """Tell an owner's graph from what its file held at another time.

    Parameters
    ----------
    node : mapping of str to object
        Node config.

    Returns
    -------
    tuple of (str, int, int)
        Name, bytes and time of the file, or of every file of the folder; empty without
        an owner's graph, or without its file.
    """
    if "graph" not in node:
        return ()
    path = Path(str(node["graph"])).expanduser()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return tuple(
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in files
        if file.exists()
    )


def node_place(node: Mapping[str, Any]) -> tuple[int, int]:
    """Read ``partition-id`` and ``num-partitions`` of a node.

    Raises
    ------
    RunError
        If one is missing or no whole number, or there is no such partition.

    Notes
    -----
    1. An owner who brings a graph may leave both away: the server numbers it.
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
