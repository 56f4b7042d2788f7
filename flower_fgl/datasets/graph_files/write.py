"""Write a client's graph as the file its owner would have, see ``files.py``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.datasets.graph_files.npz import MASKS
from flower_fgl.datasets.transforms.canonical import scipy_csr

__all__ = ["save_client_graph"]


def save_client_graph(path: str | os.PathLike[str], client: ClientGraph) -> None:
    """Write one client's graph as an owner's ``.npz`` file, all of it or nothing.

    Parameters
    ----------
    path : path-like
        File to write; its folder exists.
    client : ClientGraph
        What :func:`load_graph_file` gives back to the last bit, but for
        ``partition_id``: that is given by who loads the file.

    Raises
    ------
    DataError
        If a mask has a name that the file does not know.
    OSError
        If the file cannot be written; an older file of that name is left as it was.
    """
    path = Path(path)
    names = {name for g in (client.graph, *client.evaluation) for name in g.masks}
    if not names <= set(MASKS):
        raise DataError(
            f"{path}: masks {', '.join(sorted(names - set(MASKS)))} cannot be stored; "
            f"a graph file knows {', '.join(MASKS)}."
        )
    arrays = _graph_arrays(client.graph, "")
    arrays["class_names"] = np.array(client.class_names, dtype=np.str_)
    arrays["node_ids"] = client.node_ids.numpy()
    if client.scaling is not None:
        arrays["feature_scale"] = np.array(client.scaling.kind)
        if client.scaling.statistics is not None:
            mean, std = client.scaling.statistics
            arrays |= {"feature_mean": mean.numpy(), "feature_std": std.numpy()}
    for i, graph in enumerate(client.evaluation):
        arrays |= _graph_arrays(graph, f"evaluation_{i}_")
    scratch = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(scratch, "xb") as file:
            np.savez(file, **arrays)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _graph_arrays(graph: Graph, prefix: str) -> dict[str, Any]:
    """Name the arrays of one graph as they stand in the file."""
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
    arrays |= {"edge_index": graph.edge_index.numpy(), "y": graph.y.numpy()}
    arrays |= {f"{name}_mask": mask.numpy() for name, mask in graph.masks.items()}
    return {prefix + key: array for key, array in arrays.items()}
