"""Named NumPy arrays of a graph, from an ``.npz`` file to a checked ``NodeDataset``.

Which names there are: see ``files.py``.
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
    """Return the content of a graph file, or of a part of one.

    Raises
    ------
    DataError
        If it is missing or cannot be read.
    """
    refuse_missing(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from error


def refuse_missing(path: Path) -> None:
    """Raise DataError where there is no file."""
    if not path.is_file():
        raise DataError(
            f"No graph file at {path}. Give an .npz file, or a folder with nodes.csv "
            "and edges.csv."
        )


def read_arrays(path: Path, is_known: Callable[[str], bool]) -> dict[str, Array]:
    """Read all arrays of an ``.npz`` file without ever unpickling.

    Parameters
    ----------
    path : Path
        The file.
    is_known : callable from str to bool
        Which names may stand in it.

    Returns
    -------
    dict of str to array

    Raises
    ------
    DataError
        If the file is missing, empty, truncated, no ``.npz`` file, holds pickled
        objects or a name that is not known.
    """
    refuse_missing(path)
    name = ""
    try:
        with open(path, "rb") as stream:  # np.load leaves a damaged file open
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise DataError(f"{path} holds a single array; expected an .npz file.")
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
            what = f': array "{name}" is no plain array' if name else " is no .npz file"
            raise DataError(
                f"{path}{what}. Pickled objects are refused, because reading them can "
                "run any program. Save numbers and text only, with numpy.savez."
            ) from error
        raise DataError(
            f"{path} is empty, truncated or not an .npz file ({error}). Write it "
            "again, with numpy.savez."
        ) from error


def node_dataset(
    arrays: Mapping[str, Array], where: str, class_names: tuple[str, ...]
) -> NodeDataset:
    """Build one graph from its arrays and check it.

    Parameters
    ----------
    arrays, where, class_names
        As in :func:`try_node_dataset`.

    Returns
    -------
    NodeDataset

    Raises
    ------
    DataError
        If an array is missing, of the wrong dtype or shape, or does not fit the others.
    """
    dataset = try_node_dataset(arrays, where, class_names, ErrorCollector())
    assert dataset is not None  # a problem was raised
    return dataset


def try_node_dataset(
    arrays: Mapping[str, Array],
    where: str,
    class_names: tuple[str, ...],
    attempt: ErrorCollector,
) -> NodeDataset | None:
    """Build one graph from its arrays and check it.

    Parameters
    ----------
    arrays : mapping of str to array
        Arrays named as in ``GRAPH_KEYS``; others are not looked at.
    where : str
        The file, for messages.
    class_names : tuple of str
        Length C.
    attempt : Attempts
        Raises the first problem, or keeps all.

    Returns
    -------
    NodeDataset or None
        Undirected and simple; a log line says what was dropped. ``None`` after a problem
        that was kept.

    Raises
    ------
    DataError
        If an array is missing, of the wrong dtype or shape, or does not fit the others.
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
        # what could not be read counts as empty while the rest is checked
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
        attempt(_refuse, f"{where}: {problem}")
    is_whole = not (found.problems or y is None or edge_index is None or masks is None)
    return dataset if is_whole else None


def _refuse(problem: str) -> None:
    raise DataError(problem)


def _labels(arrays: Mapping[str, Array], num_nodes: int, where: str) -> Tensor:
    y = torch.from_numpy(integers(arrays, "y", where))
    if y.shape != (num_nodes,):
        raise DataError(
            f"{where}: y must have one label per row of x, shape ({num_nodes},), got "
            f"{tuple(y.shape)}."
        )
    return y


def _simple_edges(arrays: Mapping[str, Array], num_nodes: int, where: str) -> Tensor:
    edge_index = torch.from_numpy(_edge_index(arrays, where))
    if edge_index.numel():
        low, high = int(edge_index.min()), int(edge_index.max())
        if low < 0 or high >= num_nodes:
            raise DataError(
                f"{where}: edges name nodes {low} to {high}, but x has the rows 0 to "
                f"{num_nodes - 1}. Edges are row numbers of x, not ids."
            )
    simple = undirected_simple(edge_index, num_nodes)
    _tell_dropped(edge_index, simple, num_nodes, where)
    return simple


def _features(arrays: Mapping[str, Array], where: str) -> Tensor:
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
            f"{where}: x must be (nodes, features), neither 0, got shape "
            f"{values.shape}."
        )
    with np.errstate(
        over="ignore"
    ):  # float64 beyond float32 becomes inf: refused later
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _csr_matrix(arrays: Mapping[str, Array], where: str) -> scipy.sparse.csr_matrix:
    missing = [key for key in SPARSE_KEYS if key not in arrays]
    if missing:
        raise DataError(f"{where}: sparse features lack {', '.join(missing)}.")
    indptr, indices, shape = (
        integers(arrays, key, where) for key in ("x_indptr", "x_indices", "x_shape")
    )
    try:
        with np.errstate(over="ignore"):  # becomes inf: refused later
            data = arrays["x_data"].astype(np.float32)
        matrix = scipy.sparse.csr_matrix((data, indices, indptr), shape=tuple(shape))
        matrix.check_format(full_check=True)
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"shape {tuple(shape)} has no nodes or no features")
        if not matrix.has_canonical_format:
            matrix.sort_indices()
            if not matrix.has_canonical_format:
                raise ValueError("an entry is given twice")
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{where}: x_indptr, x_indices, x_data and x_shape are no CSR matrix: "
            f"{error}."
        ) from error
    return matrix


def _edge_index(arrays: Mapping[str, Array], where: str) -> Array:
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
        hint = " Name it edges." if edge_index.shape[1:] == (2,) else ""
        raise DataError(
            f"{where}: edge_index must be (2, M), got shape {edge_index.shape}.{hint}"
        )
    return edge_index


def _tell_dropped(given: Tensor, simple: Tensor, num_nodes: int, where: str) -> None:
    """Log what making the graph undirected and simple has changed."""
    row, col = given.numpy()
    keys = (row * num_nodes + col)[row != col]
    num_distinct = len(sorted_distinct(keys))
    loops, repeated = len(row) - len(keys), len(keys) - num_distinct
    one_way = simple.shape[1] - num_distinct
    if loops or repeated or one_way:
        log.info(
            "%s: %d edges; dropped %d self-loops and %d repeated entries, added the "
            "other direction of %d edges.",
            where,
            simple.shape[1] // 2,
            loops,
            repeated,
            one_way,
        )


def _masks(arrays: Mapping[str, Array], where: str) -> dict[str, Tensor]:
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
        Which one.
    where : str
        The file, for messages.

    Returns
    -------
    array of int64, of the shape it has

    Raises
    ------
    DataError
        If it is missing or holds no integers.
    """
    if key not in arrays:
        raise DataError(f"{where}: array {key} is missing.")
    array = arrays[key]
    if not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"{where}: {key} must hold integers, got {array.dtype}.")
    return array.astype(np.int64)
