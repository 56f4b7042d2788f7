"""Write a client's graph as a graph file, see ``graph_file.py``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flower_fgl.core.atomic import replacing
from flower_fgl.core.errors import DataError
from flower_fgl.datasets.client_graph import ClientGraph, EdgeTable, Graph
from flower_fgl.datasets.graph_files.npz import MASKS
from flower_fgl.datasets.graph_files.target_arrays import target_arrays
from flower_fgl.datasets.graph_files.validate import doubtful_labels
from flower_fgl.datasets.transforms.canonical import scipy_csr

__all__ = ["save_client_graph"]


def save_client_graph(path: str | os.PathLike[str], client: ClientGraph) -> None:
    """Write one client's graph as a data owner's ``.npz`` file, atomically.

    :func:`load_graph_file` restores it exactly, except for ``partition_id``, which the
    caller then sets. The folder must exist.

    Raises
    ------
    DataError
        If a mask has a name that graph files do not support.
    OSError
        If the file cannot be written; an existing file then stays unchanged.
    """
    path = Path(path)
    names = {name for g in (client.graph, *client.evaluation) for name in g.masks}
    if not names <= set(MASKS):
        raise DataError(
            f"{path}: masks {', '.join(sorted(names - set(MASKS)))} cannot be stored; "
            f"a graph file supports {', '.join(MASKS)}. Rename or remove the others."
        )
    arrays = _graph_arrays(client.graph, "")
    if client.class_names != ("",) or client.edges is None:
        arrays |= target_arrays(client.target, client.graph.y, client.graph.targets)
        is_plain = client.target.has_classes
        if is_plain and doubtful_labels(client.graph.y, client.class_names):
            arrays["declared_classes"] = arrays["class_names"]  # by its source
    arrays["node_ids"] = client.node_ids.numpy()
    if client.outside is not None:
        ends = torch.stack([client.outside.own, client.outside.other], dim=1)
        arrays["outside_edges"] = ends.numpy()
        if not torch.equal(client.outside.ids, client.node_ids):
            arrays["outside_ids"] = client.outside.ids.numpy()
    if (messages := client.graph.messages) is not None and messages.feature_names:
        arrays["edge_attr_names"] = np.array(messages.feature_names, dtype=np.str_)
    if client.edges is not None:
        arrays |= _edge_arrays(client.edges)
    if client.feature_names:
        of_nodes = client.feature_names[: client.num_features]
        arrays["feature_names"] = np.array(of_nodes, dtype=np.str_)
    if client.scaling is not None:
        arrays["feature_scale"] = np.array(client.scaling.kind)
        if client.scaling.statistics is not None:
            mean, std = client.scaling.statistics
            arrays |= {"feature_mean": mean.numpy(), "feature_std": std.numpy()}
    if client.prepared:
        arrays["prepared"] = np.array(client.prepared)
    for i, graph in enumerate(client.evaluation):
        arrays |= _graph_arrays(graph, f"evaluation_{i}_")
        values = graph.y if graph.targets is None else graph.targets
        arrays[f"evaluation_{i}_y"] = values.numpy()
    with replacing(path) as file:
        np.savez(file, **arrays)


def _edge_arrays(edges: EdgeTable) -> dict[str, Any]:
    """Return the arrays of edges with classes; ``edge_index`` then lists these edges."""
    arrays = {
        "edge_index": edges.pairs.numpy(),
        **target_arrays(edges.target, edges.y, edges.targets, item="edge"),
        "edge_attr": edges.x.numpy(),
        "edge_attr_names": np.array(edges.feature_names, dtype=np.str_),
    }
    if edges.target.has_classes and doubtful_labels(edges.y, edges.class_names):
        arrays["edge_declared_classes"] = arrays["edge_class_names"]
    if edges.time is not None:
        arrays["edge_time"] = edges.time.numpy()
    return arrays | {f"edge_{n}_mask": mask.numpy() for n, mask in edges.masks.items()}


def _graph_arrays(graph: Graph, prefix: str) -> dict[str, Any]:
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
    arrays |= {f"{name}_mask": mask.numpy() for name, mask in graph.masks.items()}
    return {prefix + key: array for key, array in arrays.items()}
