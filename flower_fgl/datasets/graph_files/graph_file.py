"""Reader of a data owner's graph: one ``.npz`` file, or a folder of CSV tables.

docs/graph-files.md describes the arrays and tables.
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.errors import DataError, ErrorCollector, clip, show_path
from flower_fgl.core.held_kind import GRAPHS, RELATIONS, is_owner
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import (
    Graph,
    NodeDataset,
    OutsideEdges,
    Scaling,
)
from flower_fgl.datasets.graph_files.archive import (
    EVALUATION,
    Array,
    integers,
    read_arrays,
)
from flower_fgl.datasets.graph_files.csv_rows import Wanted, csv_rows
from flower_fgl.datasets.graph_files.csv_tables import read_csv_folder
from flower_fgl.datasets.graph_files.npz import (
    EDGE_KEYS,
    GRAPH_KEYS,
    LocalGraphFile,
    check_labels,
    node_dataset,
    read_prepared,
    try_node_dataset,
)
from flower_fgl.datasets.graph_files.target_arrays import (
    KNOWN_EDGES,
    TARGET_KEYS,
    read_names,
)
from flower_fgl.datasets.graph_files.typed_arrays import SCHEMA_KEYS, chosen_relation
from flower_fgl.datasets.graph_files.typed_csv import read_typed_folder
from flower_fgl.datasets.graph_files.validate import check_feature_names
from flower_fgl.datasets.graph_files.write import save_client_graph

__all__ = [
    "KNOWN",
    "NO_CLASSES",
    "SCALING",
    "LocalGraphFile",
    "check_kind",
    "edges_to_score",
    "inspect",
    "inspect_graph_file",
    "load_graph_file",
    "read_feature_names",
    "read_logged",
    "read_scaling",
    "save_client_graph",
]

log = logging.getLogger(__name__)

NO_CLASSES = Target.classes(("",))
"""Target of a file that is read without labels."""
OUTSIDE = ("outside_edges", "outside_ids")
SCALING = ("feature_scale", "feature_mean", "feature_std")
SET = ("graph_of_node", "graph_ids", "graph_keys")
"""Arrays that only a set of graphs has."""
SINGLE = {*TARGET_KEYS[1:], *OUTSIDE, *SCALING, *EDGE_KEYS, *SET}
SINGLE |= {*SCHEMA_KEYS, "declared_classes", "feature_names", "node_ids", "prepared"}
"""Arrays that an evaluation graph does not have."""
KNOWN = SINGLE | GRAPH_KEYS
"""All arrays, see docs/graph-files.md."""


class _Noted(Protocol):
    """Content of a file, with sentences on how it was read."""

    @property
    def notes(self) -> tuple[str, ...]: ...


Held = TypeVar("Held", bound=_Noted)


def load_graph_file(path: str | os.PathLike[str], **options: Any) -> LocalGraphFile:
    """Read and validate a data owner's graph file.

    ``path`` is an ``.npz`` file, or a folder with ``nodes.csv`` and ``edges.csv`` or with
    ``relations.csv``; ``~`` is the user's home folder. The graph is undirected and
    simple; the log counts dropped self-loops and duplicate edges. Features stay sparse or
    dense. A DataError says that the file is missing or damaged, contains pickled objects,
    or that its arrays are inconsistent. It names the array and the way to fix it. The
    ``options`` are those of :class:`.Wanted`.
    """
    return read_logged(_load, path, Wanted(**options))


def inspect_graph_file(
    path: str | os.PathLike[str], **options: Any
) -> tuple[LocalGraphFile | None, list[str]]:
    """Read a file as :func:`load_graph_file`, and return all of its errors.

    The graph is ``None`` if there is an error; each message says how to fix it.
    """
    return inspect(_load, path, Wanted(**options))


def read_logged(
    read: Callable[[Path, ErrorCollector, Wanted], Held | None],
    path: str | os.PathLike[str],
    wanted: Wanted,
) -> Held:
    """Call a reader of graph files, which raises its first error, and log its notes."""
    # the methods of Path raise errors for long names and unknown users
    owned = read(Path(os.path.expanduser(path)), ErrorCollector(), wanted)
    assert owned is not None  # the collector raises the first error
    for note in owned.notes:
        log.info("%s: %s", show_path(path), note)
    return owned


def inspect(
    read: Callable[[Path, ErrorCollector, Wanted], Held | None],
    path: str | os.PathLike[str],
    wanted: Wanted,
) -> tuple[Held | None, list[str]]:
    """Call a reader of graph files, and return what it read, or all of its errors."""
    attempts = ErrorCollector(collect=True)
    owned = attempts(read, Path(os.path.expanduser(path)), attempts, wanted)
    return (None if attempts.problems else owned), attempts.problems


def _load(path: Path, attempt: ErrorCollector, wanted: Wanted) -> LocalGraphFile | None:
    """Read a graph file; return ``None`` if an error was collected."""
    arrays: dict[str, Array]
    check_kind(path)
    if os.path.exists(path / GRAPHS):
        rows = csv_rows(path / GRAPHS, ("id",))
        raise _holds_a_set(path, sum(1 for _ in rows) - 1)
    if os.path.exists(path / RELATIONS):
        typed = read_typed_folder(path, wanted, attempt)
        return typed and _owned(*typed, show_path(path), attempt)
    if os.path.isdir(path):
        arrays = read_csv_folder(path, wanted, attempt)
        if attempt.problems:
            return None
    else:
        arrays = read_arrays(path, KNOWN, GRAPH_KEYS)
        if any(key in arrays for key in SET):
            graphs = arrays.get("graph_of_node", np.empty(0))
            raise _holds_a_set(path, len(np.unique(graphs)))
        if not wanted.needs_labels:
            arrays = _without_labels(arrays)
    if wanted.scores_edges:
        arrays = edges_to_score(arrays)
        arrays |= chosen_relation(arrays, wanted.target_relation)
    where = show_path(path)
    target = attempt(read_names, arrays, where) if wanted.needs_labels else NO_CLASSES
    if target is None:  # labels cannot be validated, but all other arrays can
        arrays = _without_labels(arrays)
    dataset = try_node_dataset(
        arrays,
        where,
        target or NO_CLASSES,
        attempt,
        has_labels=wanted.needs_labels and target is not None,
    )
    if dataset is None:
        return None
    if target and wanted.needs_labels and target.has_classes:
        attempt(check_labels, dataset.y, target.names, arrays, where)
    return _owned(dataset, arrays, where, attempt)


def _owned(
    dataset: NodeDataset,
    arrays: Mapping[str, Array],
    where: str,
    attempt: ErrorCollector,
) -> LocalGraphFile | None:
    """Return a graph with the other arrays of its file, or ``None`` after an error."""
    number, width = dataset.num_nodes, dataset.num_features
    node_ids = attempt(_node_ids, arrays, number, where)
    evaluation = attempt(_evaluation_graphs, arrays, where, dataset.target, width)
    scaling = attempt(read_scaling, arrays, width, where)
    outside = attempt(_outside_edges, arrays, number, where)
    columns = attempt(read_feature_names, arrays, width, where)
    prepared = attempt(read_prepared, arrays, where, dataset.schema) or ""
    if node_ids is None or evaluation is None or attempt.problems:
        return None
    dataset = replace(dataset, feature_names=columns or dataset.feature_names)
    names, notes = (
        tuple(arrays.get(k, np.empty(0)).tolist()) for k in ("names", "notes")
    )
    has_ids = bool(names) or "node_ids" in arrays
    return LocalGraphFile(
        dataset, node_ids, evaluation, names, scaling, outside, notes, prepared, has_ids
    )


def _holds_a_set(path: Path, number: int) -> DataError:
    """Return the error for a set of graphs in place of one graph."""
    return DataError(
        f'{show_path(path)} holds a set of {number:,} graphs: set setting = "graph".'
    )


def check_kind(path: Path) -> None:
    """Reject a CSV table in place of its folder, and a folder of other files."""
    where = show_path(path)
    if not os.path.isdir(path):
        if path.suffix.lower() == ".csv":
            folder = show_path(path.parent)
            raise DataError(
                f"{where} is a single table, but a graph in CSV form is a folder with "
                f'nodes.csv and edges.csv. Give the folder, e.g. "{folder}".'
            )
        return
    graphs = sorted(name for name in os.listdir(path) if name.endswith(".npz"))
    if graphs and not is_owner(path):
        raise DataError(
            f"{where} is a folder of graph files, but one graph is expected: a file such "
            f"as {show_path(path / graphs[0])}, or a folder with nodes.csv and edges.csv."
        )


def _without_labels(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Drop labels, class names, masks and evaluation graphs."""
    return {
        key: array
        for key, array in arrays.items()
        if key not in TARGET_KEYS
        and (not key.endswith("_mask") or key in EDGE_KEYS)
        and not EVALUATION.fullmatch(key)
    }


def edges_to_score(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Replace what is known of edges by 0 for something, else -1; drop their split."""
    out = {key: array for key, array in arrays.items() if not key.endswith("_mask")}
    ends = arrays.get("edges", arrays.get("edge_index", np.empty(0)))
    number = ends.size // 2  # another array says so if its shape is wrong
    label = arrays.get("edge_label", np.full(number, -1))
    if label.dtype.kind in "iu":
        label = np.minimum(label, 0)
    numbers = out.pop("edge_target", None)
    is_real = numbers is not None and numbers.dtype.kind in "fiu"
    if numbers is not None and is_real and numbers.shape[:1] == (number,):
        columns = tuple(range(1, numbers.ndim))
        is_known = ~np.isnan(numbers).all(axis=columns)
        label = np.asarray(is_known, dtype=np.int64) - 1
    for key in ("edge_target_names", "edge_target_units"):
        out.pop(key, None)
    return out | KNOWN_EDGES | {"edge_label": label}


def read_scaling(
    arrays: Mapping[str, Array], num_features: int, where: str
) -> Scaling | None:
    """Return the normalization that the file declares."""
    scale, *statistics = (arrays.get(key) for key in SCALING)
    given = [a for a in statistics if a is not None]
    if scale is None and not given:
        return None
    is_text = scale is not None and scale.dtype.kind == "U" and not scale.ndim
    kind = str(scale) if is_text else ""
    if kind == "rows" and not given:
        return Scaling(kind)
    is_odd = any(a.shape != (num_features,) or a.dtype.kind != "f" for a in given)
    if kind != "columns" or len(given) < len(statistics) or is_odd:
        raise DataError(
            f'{where}: feature_scale must be "rows", or "columns" with feature_mean and '
            f'feature_std of {num_features} floats each, got "{clip(scale)}". Remove all '
            "three arrays if the features are raw."
        )
    with np.errstate(over="ignore"):  # becomes inf, rejected here
        mean, std = (a.astype(np.float64) for a in given)
    if not (np.isfinite(mean).all() and np.isfinite(std).all() and (std > 0).all()):
        raise DataError(
            f"{where}: feature_mean must be finite, and feature_std finite and above 0. "
            "Use 1 for a feature that is constant."
        )
    return Scaling(kind, (torch.from_numpy(mean), torch.from_numpy(std)))


def read_feature_names(
    arrays: Mapping[str, Array], num_features: int, where: str
) -> tuple[str, ...]:
    """Return the names of the feature columns; empty if the file has none."""
    if "feature_names" not in arrays:
        return ()
    names = arrays["feature_names"]
    if names.dtype.kind != "U" or names.shape != (num_features,):
        raise DataError(
            f"{where}: feature_names must be {num_features} texts, one for each column of "
            f"x, got {names.dtype} of shape {names.shape}."
        )
    found: list[str] = names.tolist()
    check_feature_names(found, where)
    return tuple(found)


def _node_ids(arrays: Mapping[str, Array], num_nodes: int, where: str) -> Tensor:
    """Return the owner's node numbers; 0..N-1 if the file has none."""
    if "node_ids" not in arrays:
        return torch.arange(num_nodes)
    ids = integers(arrays, "node_ids", where)
    if ids.shape != (num_nodes,):
        raise DataError(
            f"{where}: node_ids must have shape ({num_nodes},), got {ids.shape}."
        )
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise DataError(
            f"{where}: node id {values[counts > 1][0]} occurs {counts.max()} times. Give "
            "each node its own id."
        )
    if not np.array_equal(values, ids):
        raise DataError(f"{where}: node_ids must ascend. Sort the nodes by id.")
    return torch.from_numpy(ids)


def _outside_edges(
    arrays: Mapping[str, Array], num_nodes: int, where: str
) -> OutsideEdges | None:
    """Return the edges to nodes of other data owners, ``None`` without such an array."""
    if "outside_edges" not in arrays:
        return None
    name = next((n for n in ("outside_ids", "node_ids") if n in arrays), "")
    if not name:
        raise DataError(
            f"{where}: outside_edges needs node_ids (or outside_ids), by which the other "
            "data owners name this owner's nodes. Add the array."
        )
    edges, ids = (integers(arrays, key, where) for key in ("outside_edges", name))
    if edges.ndim != 2 or edges.shape[1] != 2:
        raise DataError(
            f"{where}: outside_edges must be (M, 2), got shape {edges.shape}."
        )
    if ids.shape != (num_nodes,) or len(np.unique(ids)) < num_nodes:
        raise DataError(
            f"{where}: {name} must hold a different id for each of the {num_nodes} nodes, "
            f"got shape {ids.shape} with {len(np.unique(ids))} different ids."
        )
    own, other = edges.T
    if len(own) and not 0 <= own.min() <= own.max() < num_nodes:
        raise DataError(
            f"{where}: outside_edges names nodes {own.min()} to {own.max()}, but x has the "
            f"rows 0 to {num_nodes - 1}. The first column holds row numbers of x."
        )
    if np.isin(other, ids).any():
        raise DataError(
            f"{where}: outside_edges names the id {other[np.isin(other, ids)][0]}, which "
            "is a node of this file. Write edges between own nodes into edges."
        )
    edges = np.unique(edges, axis=0)
    own, other = (torch.from_numpy(np.ascontiguousarray(end)) for end in edges.T)
    return OutsideEdges(own, other, torch.from_numpy(ids))


def _evaluation_graphs(
    arrays: Mapping[str, Array], where: str, target: Target, num_features: int
) -> tuple[Graph, ...]:
    """Return the evaluation graphs of the file in the order of their numbers."""
    nested: dict[int, dict[str, Array]] = {}
    for key, array in arrays.items():
        if match := EVALUATION.fullmatch(key):
            nested.setdefault(int(match[1]), {})[match[2]] = array
    if sorted(nested) != list(range(len(nested))):
        raise DataError(
            f"{where}: evaluation graphs must be numbered 0, 1, …, got "
            f"{sorted(nested)}."
        )
    graphs = []
    for i in range(len(nested)):
        part = f"{where}, evaluation_{i}"
        shared = {key: arrays[key] for key in SCHEMA_KEYS if key in arrays}
        dataset = node_dataset(nested[i] | shared, part, target)
        if dataset.num_features != num_features:
            raise DataError(
                f"{part}: expected {num_features} features as in the graph itself, got "
                f"{dataset.num_features}."
            )
        graphs.append(dataset.graph(dataset.masks))
    return tuple(graphs)
