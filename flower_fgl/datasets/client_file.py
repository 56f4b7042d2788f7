"""A client's graphs as one safetensors file, and the sizes in its header."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_safetensors
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import (
    ClientGraph,
    Graph,
    MessageEdges,
    OutsideEdges,
    Scaling,
)
from flower_fgl.nn.sparse import narrow_csr

__all__ = ["GraphSizes", "graph_sizes", "pack_client", "unpack_client"]

OPTIONAL = ("batch", "pairs", "pair_x", "targets", "node_type")
"""Tensors of a graph that may be missing."""
STATISTICS = {
    "statistics": ("mean", "std"),
    "edge_statistics": ("edge mean", "edge std"),
}
"""Names of the tensors of a :class:`Scaling`."""
CSR = ("indptr", "indices", "values", "shape")
OUTSIDE = ("own", "other", "ids")


@dataclass(frozen=True)
class GraphSizes:
    """Sizes of a client's graphs, those for evaluation included.

    ``num_edges`` counts the entries of the adjacency matrix (2E), ``num_entries`` the
    stored features: N·d, or those that are not zero if ``is_sparse``. ``num_train_nodes``
    and ``num_train`` are the nodes of the training graph, and its training nodes (or
    graphs, or edges). ``num_messages`` counts the edges with direction.
    """

    num_bytes: int
    num_nodes: int
    num_edges: int
    num_features: int
    num_entries: int
    is_sparse: bool
    num_train_nodes: int
    num_train: int
    num_edge_features: int = 0
    num_messages: int = 0


def graph_sizes(path: Path) -> GraphSizes:
    """Read the sizes of a client's graphs without reading the graphs."""
    try:
        with safe_open(path, "pt") as file:
            shapes = {k: file.get_slice(k).get_shape() for k in file.keys()}  # noqa: SIM118 (not a dict)
            is_sparse = "0/x/shape" in shapes
            x = file.get_tensor("0/x/shape").tolist() if is_sparse else shapes["0/x"]
            num_train = int(file.get_tensor("0/mask/train").sum())
        num_bytes = path.stat().st_size
    except (OSError, SafetensorError, KeyError) as error:
        raise DataError(f"Cannot read {path}: {error}.") from error

    def total(name: str) -> int:
        return sum(math.prod(s) for k, s in shapes.items() if k.endswith(f"/{name}"))

    messages = shapes.get("0/message_x", (0, 0))
    entries = total("values") if is_sparse else total("x")
    nodes = total("indptr") if is_sparse else entries // max(x[1], 1)
    return GraphSizes(
        num_bytes, nodes, total("edge_index") // 2, x[1], entries, is_sparse, x[0],
        num_train, shapes.get("0/pair_x", messages)[1], messages[0],
    )  # fmt: skip


def pack_client(client: ClientGraph) -> bytes:
    """Serialize a client as safetensors."""
    tensors: dict[str, Tensor] = {"node_ids": client.node_ids}
    for part, names in STATISTICS.items():
        if found := getattr(client.scaling, part, None):
            tensors |= dict(zip(names, found, strict=True))
    if client.outside is not None:
        # safetensors stores no views of one tensor
        ends = vars(client.outside).items()
        tensors |= {f"outside {name}": part.clone() for name, part in ends}
    for number, graph in enumerate(client.graphs):
        tensors |= {f"{number}/{k}": v for k, v in _graph_tensors(graph).items()}
    return save_safetensors({k: v.contiguous() for k, v in tensors.items()})


def _graph_tensors(graph: Graph) -> dict[str, Tensor]:
    """Return the tensors of a graph by their names in the file."""
    tensors = {"edge_index": graph.edge_index, "y": graph.y}
    found = {name: getattr(graph, name) for name in OPTIONAL}
    tensors |= {name: tensor for name, tensor in found.items() if tensor is not None}
    if (edges := graph.messages) is not None:
        tensors |= {"message_index": edges.index, "message_x": edges.x}
        if edges.relation is not None:
            tensors["message_relation"] = edges.relation
    if graph.x.layout == torch.sparse_csr:
        tensors["x/indptr"] = graph.x.crow_indices()
        tensors["x/indices"] = graph.x.col_indices()
        tensors["x/values"] = graph.x.values()
        tensors["x/shape"] = torch.tensor(graph.x.shape)
    else:
        tensors["x"] = graph.x
    return tensors | {f"mask/{name}": mask for name, mask in graph.masks.items()}


def unpack_client(
    tensors: dict[str, Tensor], partition_id: int, target: Target
) -> ClientGraph:
    """Build a client from the tensors of its file, see :func:`pack_client`."""
    node_ids = tensors.pop("node_ids")
    statistics = {
        part: (tensors.pop(mean), tensors.pop(std))
        for part, (mean, std) in STATISTICS.items()
        if mean in tensors
    }
    outside = None
    if "outside own" in tensors:
        outside = OutsideEdges(*(tensors.pop(f"outside {part}") for part in OUTSIDE))
    groups: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, _, name = key.partition("/")
        groups.setdefault(int(number), {})[name] = tensor
    graph, *others = (_read_graph(groups[number]) for number in sorted(groups))
    scaling = Scaling("columns", **statistics) if statistics else None
    return ClientGraph(
        partition_id, graph, target, node_ids, tuple(others), scaling, outside=outside
    )


def _read_graph(tensors: Mapping[str, Tensor]) -> Graph:
    """Build a graph from its tensors in the file, whose hash was checked."""
    masks = {k[5:]: mask for k, mask in tensors.items() if k.startswith("mask/")}
    x: Any = tensors.get("x")
    if x is None:
        start, column, value, shape = (tensors[f"x/{name}"] for name in CSR)
        x = narrow_csr(start, column, value, tuple(shape.tolist()))
    optional: dict[str, Any] = {name: tensors.get(name) for name in OPTIONAL}
    if "message_index" in tensors:
        ends, sent = tensors["message_index"], tensors["message_x"]
        relation = tensors.get("message_relation")
        optional["messages"] = MessageEdges(ends, sent, relation=relation)
    return Graph(x, tensors["edge_index"], tensors["y"], masks, **optional)
