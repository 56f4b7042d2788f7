"""Reader of a data owner's set of graphs: one ``.npz`` file, or a folder of CSV tables.

docs/graph-files.md describes the arrays and tables.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flower_fgl.core.errors import (
    DataError,
    ErrorCollector,
    clip,
    has_control_characters,
    show_path,
)
from flower_fgl.core.held_kind import GRAPHS, NODES
from flower_fgl.datasets.client_graph import GraphDataset, Scaling
from flower_fgl.datasets.graph_files.archive import Array, integers, read_arrays
from flower_fgl.datasets.graph_files.csv_rows import Wanted
from flower_fgl.datasets.graph_files.csv_tables import reject_set
from flower_fgl.datasets.graph_files.graph_file import (
    KNOWN,
    NO_CLASSES,
    SCALING,
    check_kind,
    inspect,
    read_feature_names,
    read_logged,
    read_scaling,
)
from flower_fgl.datasets.graph_files.npz import (
    GRAPH_KEYS,
    SPARSE_KEYS,
    check_labels,
    read_masks,
    read_prepared,
    try_node_dataset,
)
from flower_fgl.datasets.graph_files.own_split import PARTS
from flower_fgl.datasets.graph_files.set_csv import check_number, read_set_folder
from flower_fgl.datasets.graph_files.target_arrays import (
    TARGET_KEYS,
    TargetValues,
    read_names,
    read_values,
)
from flower_fgl.datasets.graph_files.typed_arrays import SCHEMA_KEYS, TYPE_KEYS
from flower_fgl.datasets.graph_files.validate import (
    LONGEST_NAME,
    validate_graph_dataset,
)

__all__ = ["OwnedSet", "inspect_graph_set", "load_graph_set"]


INPUTS = ("x", *SPARSE_KEYS, "edge_index", "edges", "edge_attr", "edge_attr_names")
TYPES = (*TYPE_KEYS, *SCHEMA_KEYS[:3], "private_relations")
SET_KEYS = frozenset(
    [
        *INPUTS,
        *TYPES,
        *("graph_of_node", "declared_classes", *TARGET_KEYS),
        *("graph_ids", "graph_keys", "feature_names", "prepared"),
        *SCALING,
        *(f"{part}_mask" for part in PARTS),
    ]
)


@dataclass(frozen=True, eq=False)
class OwnedSet:
    """A set of graphs read from its data owner's file.

    The ``masks`` of ``dataset`` hold the file's split and are empty without one, and
    ``y`` is -1 where the label is unknown. ``ids`` are unique names of the G graphs, 0,
    1, … if the file has none, ``keys`` identifiers by which they can be split, and
    ``smiles`` those of a table of molecules; the last two may be empty. ``scaling``,
    ``notes`` and ``prepared`` are as in
    :class:`~flower_fgl.datasets.graph_files.graph_file.LocalGraphFile`.
    """

    dataset: GraphDataset
    ids: tuple[str, ...]
    keys: tuple[str, ...] = ()
    smiles: tuple[str, ...] = ()
    scaling: Scaling | None = None
    notes: tuple[str, ...] = ()
    prepared: str = ""


def load_graph_set(path: str | os.PathLike[str], **options: Any) -> OwnedSet:
    """Read and validate a data owner's set of graphs, an ``.npz`` file or CSV folder.

    The ``options`` are ``needs_labels`` and ``target_kind`` of :class:`.Wanted`. A
    DataError says that the file is missing or damaged, holds one graph, or that its content
    is inconsistent.
    """
    return read_logged(_load, path, Wanted(**options))


def inspect_graph_set(
    path: str | os.PathLike[str], **options: Any
) -> tuple[OwnedSet | None, list[str]]:
    """Read a file as :func:`load_graph_set`, and return all of its errors.

    The set is ``None`` if there is an error; each message says how to fix it.
    """
    return inspect(_load, path, Wanted(**options))


def _load(path: Path, attempt: ErrorCollector, wanted: Wanted) -> OwnedSet | None:
    """Read a set of graphs; return ``None`` if an error was collected."""
    arrays, needs_labels = _read(path, attempt, wanted), wanted.needs_labels
    if attempt.problems:
        return None
    where = show_path(path)
    ids = attempt(read_texts, arrays, "graph_ids", where)
    graph_of_node = attempt(graph_numbers, arrays, where)
    target = attempt(read_names, arrays, where) if needs_labels else NO_CLASSES
    if graph_of_node is None or target is None or attempt.problems:
        return None
    y = arrays.get("y", np.empty(0)) if needs_labels else np.empty(0)
    number = len(ids or ()) or (len(y) if y.ndim else 0) or int(graph_of_node[-1]) + 1
    ids = ids or tuple(map(str, range(number)))
    values: TargetValues | None = TargetValues(target, torch.full((number,), -1))
    if needs_labels:
        values = attempt(read_values, arrays, where, target, number, item="graph")
    attempt(check_graphs, graph_of_node, ids, where)
    if values is None or attempt.problems:
        return None
    dataset = set_dataset(
        arrays, graph_of_node, values, where, attempt, has_masks=needs_labels
    )
    if dataset is None or attempt.problems:
        return None
    scaling = attempt(read_scaling, arrays, dataset.num_features, where)
    keys = attempt(read_texts, arrays, "graph_keys", where, number)
    prepared = attempt(read_prepared, arrays, where, dataset.schema) or ""
    if attempt.problems:
        return None
    if not keys and "graph_ids" in arrays:
        keys = ids
    smiles, notes = (
        tuple(arrays.get(key, np.empty(0)).tolist()) for key in ("smiles", "notes")
    )
    return OwnedSet(dataset, ids, keys or (), smiles, scaling, notes, prepared)


def _read(path: Path, attempt: ErrorCollector, wanted: Wanted) -> dict[str, Array]:
    """Return the arrays of a file or folder; reject one graph in place of a set."""
    check_kind(path)
    where = show_path(path)
    if os.path.isdir(path):
        if os.path.exists(path / GRAPHS):
            return read_set_folder(path, wanted, attempt)
        if (path / NODES).is_file():
            reject_set(path / NODES)
        raise _one_graph(where)
    arrays = read_arrays(path, KNOWN, GRAPH_KEYS)
    if "graph_of_node" not in arrays:
        raise _one_graph(where)
    if surplus := sorted(arrays.keys() - SET_KEYS):
        raise DataError(
            f"{where}: {', '.join(surplus)} cannot be used in a set of graphs "
            "(graph_of_node). Remove them."
        )
    return arrays


def _one_graph(where: str) -> DataError:
    """Return the error for one graph in place of a set."""
    return DataError(
        f'{where} holds one graph, but setting = "graph" needs a set of them: an .npz '
        "file with graph_of_node, or a folder with graphs.csv."
    )


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
    check_number(number, where)
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
    inputs = {key: arrays[key] for key in (*INPUTS, *TYPES) if key in arrays}
    x = inputs.get("x", np.empty((len(graph_of_node), 0)))
    if "x_data" not in inputs and x.shape[1:] == (0,):
        inputs["x"] = x.astype(np.float32)
    if not {"edges", "edge_index"} & inputs.keys():
        raise DataError(
            f"{where}: edges are missing. Add edges of shape (M, 2), with M = 0 if no "
            "graph has any."
        )
    union = try_node_dataset(
        inputs, where, NO_CLASSES, attempt, has_labels=False, is_set=True
    )
    if union is None:
        return None
    if union.num_nodes != len(graph_of_node):
        raise DataError(
            f"{where}: graph_of_node must have one entry per row of x, shape "
            f"({union.num_nodes},), got {graph_of_node.shape}."
        )
    masks = read_masks(arrays, where, PARTS) if has_masks else {}
    dataset = GraphDataset.of(
        union,
        torch.from_numpy(graph_of_node),
        values.y,
        values.target,
        masks=masks,
        targets=values.targets,
    )
    if dataset.num_features:
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
    for text in found:
        is_line = bool(text.strip()) and not has_control_characters(text)
        if is_line and len(text) <= LONGEST_NAME:
            continue
        raise DataError(
            f'{where}: {key} holds "{clip(text)}", expected one line of 1 to '
            f"{LONGEST_NAME} characters for each graph."
        )
    if key == "graph_ids" and len(set(found)) < len(found):
        raise DataError(
            f"{where}: graph_ids names a graph twice. Give each graph its own id; "
            "graph_keys may repeat."
        )
    return tuple(found)
