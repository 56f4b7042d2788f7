"""A data owner's graph, and its conversion from the arrays of an ``.npz`` file."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from flower_fgl.core.errors import DataError, ErrorCollector, clip, show_path
from flower_fgl.core.schema import Schema
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import (
    ClientGraph,
    EdgeTable,
    Graph,
    MessageEdges,
    NodeDataset,
    OutsideEdges,
    Scaling,
)
from flower_fgl.datasets.graph_files.archive import Array, integers, no_file
from flower_fgl.datasets.graph_files.target_arrays import (
    EDGE_TARGET_KEYS,
    TargetValues,
    read_names,
    read_values,
)
from flower_fgl.datasets.graph_files.typed_arrays import (
    TYPE_KEYS,
    read_schema,
    with_types,
)
from flower_fgl.datasets.graph_files.validate import (
    check_edge_features,
    check_feature_names,
    check_whole_numbers,
    doubtful_labels,
    validate_edges,
    validate_node_dataset,
)
from flower_fgl.datasets.transforms.canonical import (
    csr_tensor,
    sorted_distinct,
    undirected_simple,
)

__all__ = [
    "EDGE_KEYS",
    "GRAPH_KEYS",
    "MASKS",
    "SPARSE_KEYS",
    "LocalGraphFile",
    "check_labels",
    "edge_table",
    "node_dataset",
    "read_bytes",
    "read_masks",
    "read_prepared",
    "try_node_dataset",
]

MASKS = ("train", "val", "test", "unseen", "missing", "new_client")
SPARSE_KEYS = ("x_indptr", "x_indices", "x_data", "x_shape")
GRAPH_KEYS = {
    "x",
    *SPARSE_KEYS,
    "edge_index",
    "edges",
    "y",
    "edge_attr",
    *TYPE_KEYS,
    *(f"{m}_mask" for m in MASKS),
}

EDGE_KEYS = (
    *EDGE_TARGET_KEYS,
    *("edge_declared_classes", "edge_time", "edge_attr", "edge_attr_names"),
    *("edge_train_mask", "edge_val_mask", "edge_test_mask"),
)
"""Arrays of an :class:`~flower_fgl.datasets.client_graph.EdgeTable`."""
EDGES = frozenset(EDGE_KEYS) - {"edge_attr", "edge_attr_names"}
"""Those of edges with classes only."""
MAX_FEATURES = 10_000_000
"""Largest feature width; a hidden layer of 64 then takes 2.6 GB."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LocalGraphFile:
    """A graph read from its data owner's file.

    The ``masks`` of ``dataset`` hold the file's split and are empty without one.
    ``node_ids`` (N,), int64, are the owner's node numbers, ascending; 0..N-1 if the file
    has none; ``names`` the owner's N node ids if they are text. ``has_ids`` is false if the
    file has neither, so that nodes have only their row numbers. ``evaluation`` are
    additional graphs for evaluation only. ``scaling`` is the normalization of the
    features before they were written, ``None`` for raw features, and ``outside`` the
    edges to nodes of other data owners, ``None`` without a table of them. ``notes`` are
    sentences for the owner on how the file was read, and ``prepared`` is the hash of the
    recipe and vocabulary of ``flower-fgl prepare``, else empty.
    """

    dataset: NodeDataset
    node_ids: Tensor
    evaluation: tuple[Graph, ...] = ()
    names: tuple[str, ...] = ()
    scaling: Scaling | None = None
    outside: OutsideEdges | None = None
    notes: tuple[str, ...] = ()
    prepared: str = ""
    has_ids: bool = True

    @property
    def ids(self) -> Array:
        """The owner's identifiers of the nodes, (N,): text, or else ``node_ids``."""
        if self.names:
            return np.array(self.names, dtype=object)
        return self.node_ids.numpy()

    def client_graph(
        self, partition_id: int, masks: Mapping[str, Tensor] | None = None
    ) -> ClientGraph:
        """Return the graph of a client, by default with the split in the file."""
        masks = self.dataset.masks if masks is None else masks
        if not {"train", "val", "test"} <= set(masks):
            raise DataError(
                f"{self.dataset.name} holds no split into train, val and test nodes. "
                "Add train_mask, val_mask and test_mask (CSV: a column split), or set "
                "split."
            )
        return self.dataset.client(
            dict(masks),
            partition_id=partition_id,
            node_ids=self.node_ids,
            evaluation=self.evaluation,
            scaling=self.scaling,
            outside=self.outside,
            prepared=self.prepared,
        )


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file; raise ``DataError`` if it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise no_file(path) from error
    except OSError as error:
        raise DataError(
            f"Cannot read {show_path(path)}: {error.strerror}. Check the path and the "
            "permissions of the file."
        ) from error


def node_dataset(
    arrays: Mapping[str, Array], where: str, target: Target
) -> NodeDataset:
    """Build one graph as :func:`try_node_dataset`, and raise its first error."""
    dataset = try_node_dataset(arrays, where, target, ErrorCollector())
    assert dataset is not None  # the collector raises the first error
    return dataset


def try_node_dataset(
    arrays: Mapping[str, Array],
    where: str,
    target: Target,
    attempt: ErrorCollector,
    *,
    has_labels: bool = True,
    is_set: bool = False,
) -> NodeDataset | None:
    """Build one graph from the arrays of ``GRAPH_KEYS``, and validate it.

    It is undirected and simple; the log counts dropped and added edges. Without
    ``has_labels``, ``y`` is not read and every label is -1. The result is ``None`` if an
    error was collected. If it ``is_set``, it is the union of all graphs of a set.
    """
    x = attempt(_features, arrays, where, is_set=is_set)
    if x is None:
        if has_labels:
            attempt(integers, arrays, "y", where)
        attempt(_edge_index, arrays, where)
        attempt(read_masks, arrays, where)
        return None
    num_nodes = x.shape[0]
    values = TargetValues(target, torch.full((num_nodes,), -1))
    read: TargetValues | None = values
    if has_labels:
        read = attempt(read_values, arrays, where, target, num_nodes)
    edge_index = attempt(_simple_edges, arrays, num_nodes, where)
    masks = attempt(read_masks, arrays, where)
    has_edges = edge_index is not None and not EDGES.isdisjoint(arrays)
    edges = attempt(edge_table, arrays, where) if has_edges else None
    messages = None
    if edges is not None:
        messages = MessageEdges(edges.pairs, edges.x, edges.feature_names)
    elif edge_index is not None and not has_edges:
        messages = attempt(_message_edges, arrays, where, keeps_bytes=is_set)
    # unreadable edges count as empty so that the rest can be validated
    none = torch.empty(2, 0, dtype=torch.int64)
    dataset = NodeDataset(
        name=Path(where).stem,
        x=x,
        edge_index=none if edge_index is None else edge_index,
        y=(read or values).y,
        target=target,
        masks=masks or {},
        edges=edges,
        targets=(read or values).targets,
        messages=messages,
    )
    found = ErrorCollector(collect=True)
    # messages name the file, not its stem
    validate_node_dataset(replace(dataset, name=where), found)
    for problem in found.problems:
        attempt.add(problem)
    is_whole = all(part is not None for part in (read, edge_index, masks, messages))
    is_valid = is_whole and not found.problems
    is_typed = any(key in arrays for key in TYPE_KEYS)
    schema = attempt(read_schema, arrays, where, is_set=is_set) if is_typed else None
    if is_valid and schema is not None:
        return attempt(with_types, dataset, arrays, schema, where)
    return dataset if is_valid and not is_typed else None


def _simple_edges(arrays: Mapping[str, Array], num_nodes: int, where: str) -> Tensor:
    """Return the edges as an undirected simple graph, shape (2, 2E)."""
    edge_index = torch.from_numpy(_edge_index(arrays, where))
    if edge_index.numel():
        low, high = int(edge_index.min()), int(edge_index.max())
        if low < 0 or high >= num_nodes:
            raise DataError(
                f"{where}: edges name nodes {low} to {high}, but x has the rows 0 to "
                f"{num_nodes - 1}. Write edges as row numbers of x, not as ids."
            )
    simple = undirected_simple(edge_index, num_nodes)
    has_classes = not EDGES.isdisjoint(arrays)
    if has_classes or "edge_attr" not in arrays:
        _log_changes(edge_index, simple, num_nodes, where, has_classes=has_classes)
    return simple


def _message_edges(
    arrays: Mapping[str, Array], where: str, *, keeps_bytes: bool = False
) -> MessageEdges:
    """Return the edges with their features, in the order of the file.

    If it ``keeps_bytes``, features that are bytes in the file stay so.
    """
    index = torch.from_numpy(np.ascontiguousarray(_edge_index(arrays, where)))
    num_edges = index.shape[1]
    features = arrays.get("edge_attr", np.zeros((num_edges, 0), dtype=np.float32))
    columns = arrays.get("edge_attr_names", np.empty(0, dtype=np.str_))
    if features.dtype.kind not in "fiu":
        raise DataError(f"{where}: edge_attr must hold numbers, got {features.dtype}.")
    if columns.dtype.kind != "U" or columns.shape not in ((0,), features.shape[1:]):
        raise DataError(
            f"{where}: edge_attr_names must be one text for each column of edge_attr, got "
            f"{columns.dtype} of shape {columns.shape}."
        )
    check_feature_names(columns.tolist(), f"{where}: edge_attr_names")
    check_whole_numbers(features, f"{where}: edge_attr", columns.tolist())
    dtype = np.uint8 if keeps_bytes and features.dtype == np.uint8 else np.float32
    with np.errstate(over="ignore", invalid="ignore"):  # becomes inf, rejected below
        x = torch.from_numpy(np.ascontiguousarray(features, dtype=dtype))
    check_edge_features(x, num_edges, where)
    return MessageEdges(index, x, tuple(columns.tolist()))


def edge_table(arrays: Mapping[str, Array], where: str) -> EdgeTable:
    """Return the edges with their classes, in the order of the file."""
    messages = _message_edges(arrays, where)
    if not {"edge_label", "edge_target"} & arrays.keys():
        held = sorted(EDGES.intersection(arrays))
        raise DataError(
            f"{where}: array edge_label is missing, the class of each edge (or "
            f"edge_target, its numbers). Add it, or remove {', '.join(held)}: without it "
            f"nothing reads {'them' if len(held) > 1 else 'it'}."
        )
    names = read_names(arrays, where, item="edge")
    num_edges = len(messages.x)
    target, y, targets = read_values(arrays, where, names, num_edges, item="edge")
    time = arrays.get("edge_time")
    if time is not None and time.dtype.kind not in "fiu":
        raise DataError(f"{where}: edge_time must hold numbers, got {time.dtype}.")
    masks = read_masks(arrays, where, MASKS[:3], "edge_")
    table = EdgeTable(
        messages.index,
        y,
        target,
        messages.x,
        messages.feature_names,
        None if time is None else torch.from_numpy(time.astype(np.float64)),
        masks,
        targets,
    )
    validate_edges(table, where)
    if target.has_classes:
        check_labels(table.y, target.names, arrays, where, of="edge")
    return table


def check_labels(
    y: Tensor,
    names: tuple[str, ...],
    arrays: Mapping[str, Array],
    where: str,
    of: str = "node",
) -> None:
    """Reject classes that are probably none, unless the file declares them.

    ``y`` are classes in [-1, C) of nodes, edges or graphs (``of``) with the ``names``.
    """
    label, prefix = ("edge_label", "edge_") if of == "edge" else ("y", "")
    key = f"{prefix}declared_classes"
    declared = arrays.get(key, np.empty(0, dtype=np.str_))
    others = set(declared.flatten().tolist()).difference(names)
    if declared.dtype.kind != "U" or declared.ndim != 1 or others:
        raise DataError(
            f"{where}: {key} must be a list of names in {prefix}class_names, got "
            f"{clip(next(iter(others), declared.dtype))}. Correct or remove the array."
        )
    doubt = doubtful_labels(
        y,
        names,
        declared.tolist(),
        item=of,
        unknown=f"Set {label} to -1",
        declare=f"also name it in the array {key}",
    )
    if doubt:
        raise DataError(f"{where}, {label} and {prefix}class_names: {doubt}")


def _features(arrays: Mapping[str, Array], where: str, *, is_set: bool) -> Tensor:
    """Return the features as float32, strided or sparse CSR; a set may have none."""
    sparse = [key for key in SPARSE_KEYS if key in arrays]
    if ("x" in arrays) == bool(sparse):
        raise DataError(
            f"{where}: expected features as x, or as {', '.join(SPARSE_KEYS)}; got "
            f"{'both' if sparse else 'neither'}."
        )
    values = arrays["x"] if not sparse else arrays.get("x_data", np.empty(0))
    if not np.issubdtype(values.dtype, np.floating):
        raise DataError(
            f"{where}: features must be floats, got {values.dtype}. Save "
            'x.astype("float64").'
        )
    names = [str(name) for name in np.ravel(arrays.get("feature_names", ())).tolist()]
    if sparse:
        matrix = _csr_matrix(arrays, where)
        check_whole_numbers(values, f"{where}: x_data", names, arrays["x_indices"])
        return csr_tensor(matrix)
    is_empty = 0 in values.shape[: 1 if is_set or "node_types" in arrays else 2]
    if values.ndim != 2 or is_empty:
        raise DataError(
            f"{where}: x must be (nodes, features), neither of them 0, got shape "
            f"{values.shape}."
        )
    check_whole_numbers(values, f"{where}: x", names)
    with np.errstate(over="ignore", invalid="ignore"):  # becomes inf, rejected later
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _csr_matrix(arrays: Mapping[str, Array], where: str) -> scipy.sparse.csr_matrix:
    """Build the SciPy matrix of sparse features and check its structure."""
    missing = [key for key in SPARSE_KEYS if key not in arrays]
    if missing:
        raise DataError(
            f"{where}: sparse features lack {', '.join(missing)}. Add the missing arrays."
        )
    indptr, indices, shape = (
        integers(arrays, key, where) for key in ("x_indptr", "x_indices", "x_shape")
    )
    with np.errstate(over="ignore", invalid="ignore"):  # becomes inf, rejected later
        data = arrays["x_data"].astype(np.float32, copy=False)
    fault = _csr_fault(indptr, indices, data, shape)
    if not fault:
        num_nodes, num_features = (int(size) for size in shape)
        matrix = scipy.sparse.csr_matrix(
            (data, indices, indptr), shape=(num_nodes, num_features)
        )
        matrix.sort_indices()
        if matrix.has_canonical_format:
            return matrix
        fault = "an entry is duplicate"
    raise DataError(
        f"{where}: x_indptr, x_indices, x_data and x_shape are not a valid CSR matrix: "
        f"{fault}."
    )


def _csr_fault(indptr: Array, indices: Array, data: Array, shape: Array) -> str:
    """Return what is wrong with the structure of a CSR matrix; empty if nothing."""
    if shape.shape != (2,) or int(shape.min()) < 1:
        return "x_shape must be (nodes, features), neither of them 0"
    num_nodes, num_features = (int(size) for size in shape)
    if num_features > MAX_FEATURES:
        return f"there are {num_features:,} features, the limit is {MAX_FEATURES:,}"
    if indptr.shape != (num_nodes + 1,):
        return (
            f"x_indptr must have {num_nodes + 1:,} entries, one more than nodes, got "
            f"shape {indptr.shape}"
        )
    if indices.shape != data.shape or data.ndim != 1:
        return f"x_indices has shape {indices.shape}, but x_data has {data.shape}"
    is_ascending = bool((indptr[1:] >= indptr[:-1]).all())
    if int(indptr[0]) != 0 or int(indptr[-1]) != len(data) or not is_ascending:
        return f"x_indptr must ascend from 0 to the {len(data):,} entries of x_data"
    if len(data) and not 0 <= int(indices.min()) <= int(indices.max()) < num_features:
        return (
            f"x_indices must be columns 0 to {num_features - 1}, got {indices.min()} to "
            f"{indices.max()}"
        )
    return ""


def _edge_index(arrays: Mapping[str, Array], where: str) -> Array:
    """Return the edges of the file, shape (2, M)."""
    if ("edge_index" in arrays) == ("edges" in arrays):
        raise DataError(
            f"{where}: expected either edge_index of shape (2, M) or edges of shape "
            f"(M, 2); got {'both' if 'edges' in arrays else 'neither'}."
        )
    if "edges" in arrays:
        edges = integers(arrays, "edges", where)
        if edges.ndim != 2 or edges.shape[1] != 2:
            raise DataError(f"{where}: edges must be (M, 2), got shape {edges.shape}.")
        return np.ascontiguousarray(edges.T)
    edge_index = integers(arrays, "edge_index", where)
    if edge_index.ndim != 2 or edge_index.shape[0] != 2:
        hint = " Rename it to edges." if edge_index.shape[1:] == (2,) else ""
        raise DataError(
            f"{where}: edge_index must be (2, M), got shape {edge_index.shape}.{hint}"
        )
    return edge_index


def _log_changes(
    given: Tensor, simple: Tensor, num_nodes: int, where: str, *, has_classes: bool
) -> None:
    """Log the edges that were dropped or added to make the graph undirected and simple."""
    row, col = given.numpy()
    keys = (row * num_nodes + col)[row != col]
    num_distinct = len(sorted_distinct(keys))
    loops, repeated = len(row) - len(keys), len(keys) - num_distinct
    one_way = simple.shape[1] - num_distinct
    if has_classes and (loops or repeated):
        log.info(
            "%s: all %d edges with their classes are kept. Messages pass over %d pairs of "
            "nodes, in both directions: %d edges from a node to itself and %d repeated "
            "edges between the same nodes add no pair.",
            where,
            len(row),
            simple.shape[1] // 2,
            loops,
            len(keys) - simple.shape[1] // 2,
        )
    elif not has_classes and (loops or repeated or one_way):
        log.info(
            "%s: %d edges; dropped %d self-loops and %d duplicate entries, added the "
            "other direction of %d edges.",
            where,
            simple.shape[1] // 2,
            loops,
            repeated,
            one_way,
        )


def read_masks(
    arrays: Mapping[str, Array],
    where: str,
    names: Sequence[str] = MASKS,
    prefix: str = "",
) -> dict[str, Tensor]:
    """Return the masks of the file by their names."""
    keys = {name: f"{prefix}{name}_mask" for name in names}
    return {n: _mask(arrays[k], k, where) for n, k in keys.items() if k in arrays}


def _mask(mask: Array, key: str, where: str) -> Tensor:
    """Return a mask as a tensor; the validation reports one that holds numbers."""
    if mask.dtype.kind not in "biuf":
        raise DataError(
            f"{where}: {key} must be bool, got {mask.dtype}. Convert it, e.g. with "
            f'{key} == "True" if it holds the texts True and False.'
        )
    dtype = {"b": np.bool_, "f": np.float64}.get(mask.dtype.kind, np.int64)
    return torch.from_numpy(mask.astype(dtype))


def read_prepared(
    arrays: Mapping[str, Array], where: str, schema: Schema | None
) -> str:
    """Return the hash of the recipe of a prepared file, else an empty text."""
    text, number = str(arrays.get("prepared", "")), len(schema.widths) if schema else 1
    form = "[0-9a-f]{64}" + f"( [0-9a-f]{{64}}){{{number - 1}}}"
    if text and not re.fullmatch(form, text):
        each = "" if schema is None else f" for each of {number} kinds of nodes"
        raise DataError(
            f"{where}: prepared must be a hash of 64 digits{each} as flower-fgl prepare "
            f'writes it, got "{clip(text)}". Remove it, or prepare the graph again.'
        )
    return text
