"""Conversion of the arrays of an ``.npz`` file to a validated ``NodeDataset``.

``graph_file.py`` documents the array names.
"""

from __future__ import annotations

import logging
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.datasets.graph_files.problems import ErrorCollector
from flower_fgl.datasets.graph_files.validate import validate_node_dataset
from flower_fgl.datasets.transforms.canonical import (
    csr_tensor,
    sorted_distinct,
    undirected_simple,
)

__all__ = [
    "GRAPH_KEYS",
    "MASKS",
    "Array",
    "integers",
    "node_dataset",
    "read_arrays",
    "try_node_dataset",
]

Array = np.ndarray[Any, np.dtype[Any]]

MASKS = ("train", "val", "test", "unseen", "missing", "new_client")
SPARSE_KEYS = ("x_indptr", "x_indices", "x_data", "x_shape")
GRAPH_KEYS = {
    "x",
    *SPARSE_KEYS,
    "edge_index",
    "edges",
    "y",
    *(f"{m}_mask" for m in MASKS),
}

log = logging.getLogger(__name__)


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file; raise ``DataError`` if it cannot be read."""
    _check_exists(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"Cannot read {path}: {error.strerror}. Check the permissions of the file."
        ) from error


def _check_exists(path: Path) -> None:
    """Raise ``DataError`` if there is no file."""
    if not path.is_file():
        raise DataError(
            f"No graph file at {path}. Provide an .npz file, or a folder with nodes.csv "
            "and edges.csv."
        )


def read_arrays(path: Path, is_known: Callable[[str], bool]) -> dict[str, Array]:
    """Read all arrays of an ``.npz`` file without unpickling.

    Parameters
    ----------
    path : Path
        File to read.
    is_known : callable from str to bool
        Returns whether an array name is allowed.

    Raises
    ------
    DataError
        If the file is missing, empty, truncated or not an ``.npz`` file, or contains
        pickled objects or an unknown name.
    """
    _check_exists(path)
    name = ""
    try:
        with open(path, "rb") as stream:  # np.load does not close a damaged file
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise DataError(
                    f"{path} holds a single array; expected an .npz file. Write it with "
                    "numpy.savez."
                )
            for name in file.files:
                if not is_known(name):
                    raise DataError(
                        f'{path}: unknown array "{name}". Known: '
                        f"{', '.join(sorted(GRAPH_KEYS))}, class_names, node_ids."
                    )
            arrays = {}
            for name in file.files:
                arrays[name] = file[name]
            return arrays
    except DataError:
        raise
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        if "allow_pickle" in str(error) or "pickled" in str(error):
            what = f': array "{name}" is pickled' if name else " is not an .npz file"
            raise DataError(
                f"{path}{what}. Pickled objects are rejected, because reading them can "
                "run any code. Save only numbers and text, with numpy.savez."
            ) from error
        raise DataError(
            f"{path} is empty, truncated or not an .npz file ({error}). Write it "
            "again, with numpy.savez."
        ) from error


def node_dataset(
    arrays: Mapping[str, Array], where: str, class_names: tuple[str, ...]
) -> NodeDataset:
    """Build one graph from its arrays and validate it.

    Parameters
    ----------
    arrays, where, class_names
        As in :func:`try_node_dataset`.

    Raises
    ------
    DataError
        If an array is missing, has the wrong dtype or shape, or does not fit the others.
    """
    dataset = try_node_dataset(arrays, where, class_names, ErrorCollector())
    assert dataset is not None  # the collector raises the first error
    return dataset


def try_node_dataset(
    arrays: Mapping[str, Array],
    where: str,
    class_names: tuple[str, ...],
    attempt: ErrorCollector,
) -> NodeDataset | None:
    """Build one graph from its arrays and validate it, with a collector of errors.

    Parameters
    ----------
    arrays : mapping of str to array
        Arrays named as in ``GRAPH_KEYS``; others are ignored.
    where : str
        File name for messages.
    class_names : tuple of str
        Length C.
    attempt : ErrorCollector
        Raises the first error, or collects all.

    Returns
    -------
    NodeDataset or None
        Undirected and simple; the log counts dropped and added edges. ``None`` if an error
        was collected.

    Raises
    ------
    DataError
        If an array is missing, has the wrong dtype or shape, or does not fit the others.
    """
    x = attempt(_features, arrays, where)
    if x is None:
        attempt(integers, arrays, "y", where)
        attempt(_edge_index, arrays, where)
        attempt(_masks, arrays, where)
        return None
    num_nodes = x.shape[0]
    y = attempt(_labels, arrays, num_nodes, where)
    edge_index = attempt(_simple_edges, arrays, num_nodes, where)
    masks = attempt(_masks, arrays, where)
    dataset = NodeDataset(
        name=Path(where).stem,
        x=x,
        # unreadable edges count as empty so that the rest can be validated
        edge_index=torch.empty(2, 0, dtype=torch.int64)
        if edge_index is None
        else edge_index,
        y=torch.full((num_nodes,), -1) if y is None else y,
        class_names=class_names,
        masks=masks or {},
    )
    found = ErrorCollector(collect=True)
    validate_node_dataset(dataset, found)
    for problem in found.problems:
        attempt(_raise_error, f"{where}: {problem}")
    is_valid = not (found.problems or y is None or edge_index is None or masks is None)
    return dataset if is_valid else None


def _raise_error(problem: str) -> None:
    """Raise a problem as a ``DataError``."""
    raise DataError(problem)


def _labels(arrays: Mapping[str, Array], num_nodes: int, where: str) -> Tensor:
    """Return the labels, shape (N,)."""
    y = torch.from_numpy(integers(arrays, "y", where))
    if y.shape != (num_nodes,):
        raise DataError(
            f"{where}: y must have one label per row of x, shape ({num_nodes},), got "
            f"{tuple(y.shape)}."
        )
    return y


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
    _log_changes(edge_index, simple, num_nodes, where)
    return simple


def _features(arrays: Mapping[str, Array], where: str) -> Tensor:
    """Return the features as float32, strided or sparse CSR."""
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
            'x.astype("float32").'
        )
    if sparse:
        return csr_tensor(_csr_matrix(arrays, where))
    if values.ndim != 2 or 0 in values.shape:
        raise DataError(
            f"{where}: x must be (nodes, features), neither of them 0, got shape "
            f"{values.shape}."
        )
    with np.errstate(over="ignore"):  # values beyond float32 become inf, rejected later
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
    try:
        with np.errstate(over="ignore"):  # becomes inf, rejected later
            data = arrays["x_data"].astype(np.float32)
        matrix = scipy.sparse.csr_matrix((data, indices, indptr), shape=tuple(shape))
        matrix.check_format(full_check=True)
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"shape {tuple(shape)} has no nodes or no features")
        if not matrix.has_canonical_format:
            matrix.sort_indices()
            if not matrix.has_canonical_format:
                raise ValueError("an entry is duplicate")
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{where}: x_indptr, x_indices, x_data and x_shape are not a valid CSR matrix: "
            f"{error}."
        ) from error
    return matrix


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


def _log_changes(given: Tensor, simple: Tensor, num_nodes: int, where: str) -> None:
    """Log the edges that were dropped or added to make the graph undirected and simple."""
    row, col = given.numpy()
    keys = (row * num_nodes + col)[row != col]
    num_distinct = len(sorted_distinct(keys))
    loops, repeated = len(row) - len(keys), len(keys) - num_distinct
    one_way = simple.shape[1] - num_distinct
    if loops or repeated or one_way:
        log.info(
            "%s: %d edges; dropped %d self-loops and %d duplicate entries, added the "
            "other direction of %d edges.",
            where,
            simple.shape[1] // 2,
            loops,
            repeated,
            one_way,
        )


def _masks(arrays: Mapping[str, Array], where: str) -> dict[str, Tensor]:
    """Return the masks of the file by their names."""
    masks = {}
    for name in MASKS:
        mask = arrays.get(f"{name}_mask")
        if mask is None:
            continue
        if mask.dtype != np.bool_:
            raise DataError(f"{where}: {name}_mask must be bool, got {mask.dtype}.")
        masks[name] = torch.from_numpy(mask)
    return masks


def integers(arrays: Mapping[str, Array], key: str, where: str) -> Array:
    """Return one array of integers as int64.

    Parameters
    ----------
    arrays : mapping of str to array
        Arrays by name.
    key : str
        Name of the array.
    where : str
        File name for messages.

    Returns
    -------
    array of int64
        In its original shape.

    Raises
    ------
    DataError
        If the array is missing or does not hold integers.
    """
    if key not in arrays:
        raise DataError(f"{where}: array {key} is missing. Add it to the file.")
    array = arrays[key]
    if not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"{where}: {key} must hold integers, got {array.dtype}.")
    return array.astype(np.int64)
