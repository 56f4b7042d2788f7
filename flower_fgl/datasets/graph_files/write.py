"""Write a client's graph as a graph file, see docs/graph-files.md."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.atomic import replacing
from flower_fgl.core.errors import DataError
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, EdgeTable, Graph, MessageEdges
from flower_fgl.datasets.graph_files.npz import MASKS
from flower_fgl.datasets.graph_files.own_split import PARTS
from flower_fgl.datasets.graph_files.target_arrays import target_arrays
from flower_fgl.datasets.graph_files.typed_arrays import schema_arrays, type_arrays
from flower_fgl.datasets.graph_files.validate import doubtful_labels
from flower_fgl.datasets.transforms.canonical import scipy_csr, stack_rows

__all__ = ["client_arrays", "graph_arrays", "save_client_graph"]

EDGE_ROWS = {"edge_label", "edge_target", "edge_attr", "edge_time"}
EDGE_ROWS |= {f"edge_{part}_mask" for part in PARTS}
"""Arrays with a row for each edge."""


def save_client_graph(
    path: str | os.PathLike[str], client: ClientGraph, *, has_ids: bool = True
) -> None:
    """Write one client's graph or graphs as a data owner's ``.npz`` file, atomically.

    :func:`load_graph_file` restores a graph exactly, except for ``partition_id``, which the
    caller then sets. Of sets of graphs the file holds the training, validation and test
    graphs, in this order, and their split; :func:`load_graph_set` reads it. The folder
    must exist; an OSError leaves an existing file unchanged. A DataError names masks that
    graph files do not support. Without ``has_ids`` nodes have row numbers, no identifiers.
    """
    names = {name for g in client.graphs for name in g.masks}
    if not names <= set(MASKS):
        raise DataError(
            f"{path}: masks {', '.join(sorted(names - set(MASKS)))} cannot be stored; "
            f"a graph file supports {', '.join(MASKS)}. Rename or remove the others."
        )
    arrays = client_arrays(client, has_ids=has_ids)
    with replacing(Path(path)) as file:
        np.savez(file, **arrays)


def client_arrays(client: ClientGraph, *, has_ids: bool = True) -> dict[str, Any]:
    """Return the arrays of a client's file, see :func:`save_client_graph`."""
    if client.graph.batch is not None:
        return _set_arrays(client)
    arrays = graph_arrays(client.graph)
    if client.target.names != ("",) or client.edges is None:
        arrays |= _declared(client.target, client.graph.y, client.graph.targets)
    if has_ids:
        arrays["node_ids"] = client.node_ids.numpy()
    if client.outside is not None:
        ends = torch.stack([client.outside.own, client.outside.other], dim=1)
        arrays["outside_edges"] = ends.numpy()
        if not torch.equal(client.outside.ids, client.node_ids):
            arrays["outside_ids"] = client.outside.ids.numpy()
    arrays |= _feature_arrays(client)
    if client.edges is not None:
        arrays |= _edge_arrays(client.edges, client)
    arrays |= schema_arrays(client.schema)
    for i, graph in enumerate(client.evaluation):
        arrays |= graph_arrays(graph, f"evaluation_{i}_")
        values = graph.y if graph.targets is None else graph.targets
        arrays[f"evaluation_{i}_y"] = values.numpy()
    return arrays


def _set_arrays(client: ClientGraph) -> dict[str, Any]:
    """Return the arrays of a client's training, validation and test graphs."""
    graphs, edges, batches, masks = client.held, list[MessageEdges](), [], []
    first_node = first_graph = 0
    for graph in graphs:
        assert graph.batch is not None
        listed = graph.messages or MessageEdges(graph.edge_index, torch.zeros(0, 0))
        listed = replace(listed, index=listed.index + first_node)
        edges.append(listed)
        batches.append(graph.batch + first_graph)
        none = torch.zeros(graph.num_items, dtype=torch.bool)
        masks.append([graph.masks.get(part, none) for part in PARTS])
        first_node += graph.num_nodes
        first_graph += graph.num_items
    has_split = any(graph.masks for graph in graphs)
    parts = zip(PARTS, map(torch.cat, zip(*masks, strict=True)), strict=True)
    pairs = torch.cat([one.index for one in edges], dim=1)
    kinds = [graph.node_type for graph in graphs if graph.node_type is not None]
    of_edges = [one.relation for one in edges if one.relation is not None]
    messages = MessageEdges(
        pairs,
        torch.cat([one.x for one in edges]),
        relation=torch.cat(of_edges) if of_edges else None,
    )
    whole = Graph(
        stack_rows([graph.x for graph in graphs]),
        pairs,
        torch.cat([graph.y for graph in graphs]),
        dict(parts) if has_split else {},
        messages=client.graph.messages and messages,
        node_type=torch.cat(kinds) if kinds else None,
    )
    arrays = graph_arrays(whole) | _feature_arrays(client)
    arrays |= schema_arrays(client.schema)
    arrays.pop("target_type", None)  # a run says which nodes are pooled
    arrays["graph_of_node"] = torch.cat(batches).numpy()
    targets = [graph.targets for graph in graphs if graph.targets is not None]
    joint = torch.cat(targets) if targets else None
    return arrays | _declared(client.target, whole.y, joint)


def _declared(
    target: Target, y: Tensor, targets: Tensor | None, *, item: str = "node"
) -> dict[str, Any]:
    """Return the arrays of a target; the source has declared classes that look odd."""
    arrays = target_arrays(target, y, targets, item=item)
    prefix = "edge_" if item == "edge" else ""
    if target.has_classes and doubtful_labels(y, target.names):
        arrays[f"{prefix}declared_classes"] = arrays[f"{prefix}class_names"]
    return arrays


def _feature_arrays(client: ClientGraph) -> dict[str, Any]:
    """Return names, normalization and recipe of the features."""
    arrays: dict[str, Any] = {}
    if client.prepared:
        arrays["prepared"] = np.array(client.prepared)
    if (messages := client.graph.messages) is not None and messages.feature_names:
        arrays["edge_attr_names"] = np.array(messages.feature_names, dtype=np.str_)
    if client.feature_names:
        of_nodes = client.feature_names[: client.num_features]
        arrays["feature_names"] = np.array(of_nodes, dtype=np.str_)
    if client.scaling is not None:
        arrays["feature_scale"] = np.array(client.scaling.kind)
        if client.scaling.statistics is not None:
            mean, std = client.scaling.statistics
            arrays |= {"feature_mean": mean.numpy(), "feature_std": std.numpy()}
    return arrays


def _edge_arrays(edges: EdgeTable, client: ClientGraph) -> dict[str, Any]:
    """Return the arrays of edges with classes; ``edge_index`` then lists these edges.

    In a typed graph those of the other relations come first.
    """
    arrays = {
        "edge_index": edges.pairs.numpy(),
        **_declared(edges.target, edges.y, edges.targets, item="edge"),
        "edge_attr": edges.x.numpy(),
        "edge_attr_names": np.array(edges.feature_names, dtype=np.str_),
    }
    if edges.time is not None:
        arrays["edge_time"] = edges.time.numpy()
    arrays |= {f"edge_{name}_mask": mask.numpy() for name, mask in edges.masks.items()}
    schema, messages = client.schema, client.graph.messages
    if schema is None or messages is None:
        return arrays
    assert schema.predicted is not None
    assert messages.relation is not None
    number = schema.relations.index(schema.predicted)
    others = messages.relation != number
    pairs = arrays.pop("edge_index")
    blank = {"edge_attr": 0.0, "edge_label": -1, "edge_target": np.nan}
    blank["edge_time"] = next(iter(arrays.get("edge_time", ())), 0.0)  # times ascend
    out = dict(arrays)
    for key in EDGE_ROWS & arrays.keys():
        shape = (int(others.sum()), *arrays[key].shape[1:])
        filled = np.full(shape, blank.get(key, False), arrays[key].dtype)
        out[key] = np.concatenate([filled, arrays[key]])
    relation = torch.full((pairs.shape[1],), number)
    return out | {
        "edge_index": np.concatenate(
            [messages.index[:, others].numpy(), pairs], axis=1
        ),
        "edge_type": torch.cat([messages.relation[others], relation]).numpy(),
    }


def graph_arrays(graph: Graph, prefix: str = "") -> dict[str, Any]:
    """Return the arrays of one graph by their names in the file."""
    if graph.x.layout == torch.sparse_csr:
        matrix = scipy_csr(graph.x)
        arrays = {
            "x_indptr": matrix.indptr,
            "x_indices": matrix.indices,
            "x_data": matrix.data,
            "x_shape": np.array(matrix.shape, dtype=np.int64),
        }
    else:
        arrays = {"x": graph.x.numpy()}
    arrays["edge_index"] = graph.edge_index.numpy()
    if (edges := graph.messages) is not None:
        arrays["edge_index"] = edges.index.numpy()
        if edges.x.shape[1]:
            arrays["edge_attr"] = edges.x.numpy()
    arrays |= type_arrays(graph)
    arrays |= {f"{name}_mask": mask.numpy() for name, mask in graph.masks.items()}
    return {prefix + key: array for key, array in arrays.items()}
