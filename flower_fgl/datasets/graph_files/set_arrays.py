"""Conversion of the arrays of a set of graphs to a validated ``GraphDataset``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.client_graph import GraphDataset
from flower_fgl.datasets.graph_files.archive import Array, integers
from flower_fgl.datasets.graph_files.graph_file import NO_CLASSES, read_feature_names
from flower_fgl.datasets.graph_files.npz import (
    SPARSE_KEYS,
    check_labels,
    read_masks,
    try_node_dataset,
)
from flower_fgl.datasets.graph_files.own_split import PARTS
from flower_fgl.datasets.graph_files.problems import (
    ErrorCollector,
    clip,
    has_control_characters,
)
from flower_fgl.datasets.graph_files.target_arrays import TargetValues
from flower_fgl.datasets.graph_files.validate import (
    LONGEST_NAME,
    validate_graph_dataset,
)

__all__ = ["INPUTS", "check_graphs", "graph_numbers", "read_texts", "set_dataset"]

INPUTS = ("x", *SPARSE_KEYS, "edge_index", "edges", "edge_attr", "edge_attr_names")
MOST_GRAPHS = 10**6


def graph_numbers(arrays: Mapping[str, Array], where: str) -> Array:
    """Return the graph of each node, shape (N,), ascending from 0."""
    graphs = integers(arrays, "graph_of_node", where)
    if graphs.ndim != 1 or not len(graphs):
        raise DataError(
            f"{where}: graph_of_node must hold the graph of each node, shape (N,), got "
            f"{graphs.shape}. A set needs at least one graph with a node."
        )
    back = (np.diff(graphs) < 0).nonzero()[0]
    if len(back) or graphs[0] < 0:
        first = int(back[0]) + 1 if len(back) else 0
        raise DataError(
            f"{where}: graph_of_node must ascend from 0, got {graphs[first]} at node "
            f"{first}{f' after {graphs[first - 1]}' if first else ''}. Sort the nodes by "
            "graph."
        )
    return graphs


def check_graphs(graph_of_node: Array, ids: tuple[str, ...], where: str) -> None:
    """Reject too many graphs, graphs without nodes, and nodes of an unknown graph."""
    number = len(ids)
    if number > MOST_GRAPHS:
        raise DataError(
            f"{where} holds {number:,} graphs, the limit is {MOST_GRAPHS:,}. Split the "
            "file, or leave some out."
        )
    if (last := int(graph_of_node[-1])) >= number:
        raise DataError(
            f"{where}: graph_of_node names graph {last}, but graphs are numbered 0 to "
            f"{number - 1}, one for each entry of y or graph_ids."
        )
    sizes = np.bincount(graph_of_node, minlength=number)
    if empty := (sizes == 0).nonzero()[0].tolist():
        more = f", and {len(empty) - 1:,} more have none" if len(empty) > 1 else ""
        raise DataError(
            f'{where}: graph "{clip(ids[empty[0]])}" has no node{more}. Give each graph at '
            "least one node, or remove it. A single node without edges is a graph."
        )


def set_dataset(
    arrays: Mapping[str, Array],
    graph_of_node: Array,
    values: TargetValues,
    where: str,
    attempt: ErrorCollector,
    *,
    has_masks: bool,
) -> GraphDataset | None:
    """Build the graphs from their arrays, and validate them."""
    inputs = {key: arrays[key] for key in INPUTS if key in arrays}
    shape = inputs["x"].shape if "x" in inputs else (len(graph_of_node), 0)
    has_features = "x_data" in inputs or shape[1:] != (0,)
    if not has_features:  # one column takes their place while the edges are checked
        inputs["x"] = np.zeros((shape[0], 1), dtype=np.float32)
    if not {"edges", "edge_index"} & inputs.keys():
        raise DataError(
            f"{where}: edges are missing. Add edges of shape (M, 2), with M = 0 if no "
            "graph has any."
        )
    union = try_node_dataset(inputs, where, NO_CLASSES, attempt, has_labels=False)
    if union is None:
        return None
    if union.num_nodes != len(graph_of_node):
        raise DataError(
            f"{where}: graph_of_node must have one entry per row of x, shape "
            f"({union.num_nodes},), got {graph_of_node.shape}."
        )
    masks = read_masks(arrays, where, PARTS) if has_masks else {}
    dataset = GraphDataset(
        union.name,
        union.x if has_features else union.x[:, :0],
        union.edge_index,
        torch.from_numpy(graph_of_node),
        values.y,
        values.target,
        masks,
        values.targets,
        union.messages,
    )
    if has_features:
        names = read_feature_names(arrays, dataset.num_features, where)
        dataset = replace(dataset, feature_names=names)
    # the message names the file, not the stem that is the name of the dataset
    validate_graph_dataset(replace(dataset, name=where), may_be_unknown=True)
    if has_masks and values.target.has_classes:
        check_labels(values.y, values.target.names, arrays, where, of="graph")
    return dataset


def read_texts(
    arrays: Mapping[str, Array], key: str, where: str, number: int = 0
) -> tuple[str, ...]:
    """Return an array of ids or keys of graphs; empty if the file has none."""
    if key not in arrays:
        return ()
    texts = arrays[key]
    is_list = texts.dtype.kind == "U" and texts.ndim == 1
    if not is_list or len(texts) != (number or len(texts)):
        raise DataError(
            f"{where}: {key} must be one text for each graph, shape ({number or 'G'},), "
            f"got {texts.dtype} of shape {texts.shape}."
        )
    found: list[str] = texts.tolist()
    for bad in (text for text in found if not _is_name(text)):
        raise DataError(
            f'{where}: {key} holds "{clip(bad)}", expected one line of 1 to {LONGEST_NAME} '
            "characters for each graph."
        )
    if key == "graph_ids" and len(set(found)) < len(found):
        raise DataError(
            f"{where}: graph_ids names a graph twice. Give each graph its own id; "
            "graph_keys may repeat."
        )
    return tuple(found)


def _is_name(text: str) -> bool:
    """Return whether text is one line of 1 to 300 characters."""
    is_line = bool(text.strip()) and not has_control_characters(text)
    return is_line and len(text) <= LONGEST_NAME
