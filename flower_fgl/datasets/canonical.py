"""The one form all graphs take here: undirected, simple, float32, sparse where sparse.

What this form is: ``NodeDataset`` and ``GraphDataset`` in ``client_graph.py``.
"""

from __future__ import annotations

import warnings

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from flower_fgl.datasets.client_graph import GraphDataset, NodeDataset
from flower_fgl.errors import DataError

__all__ = [
    "compact_features",
    "csr_tensor",
    "scipy_csr",
    "undirected_simple",
    "validate_graph_dataset",
    "validate_node_dataset",
]

SPARSE_BELOW = 0.1
"""Share of non-zero features below which they are kept as sparse CSR."""

SPARSE_WIDTH = 64
"""Feature width from which features may be sparse: below it, CSR saves nothing."""


def undirected_simple(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Make a graph undirected and simple, in the order all graphs are kept in.

    Parameters
    ----------
    edge_index : Tensor of shape (2, M), int64, entries in [0, num_nodes)
        Any list of edges: directed, with self-loops, with duplicates.
    num_nodes : int
        Number of nodes N, below 3·10⁹ so that N² fits 63 bits.

    Returns
    -------
    Tensor of shape (2, 2E), int64
        Both directions of each of the E distinct edges, no self-loops, sorted by
        (row, column).

    Notes
    -----
    1. Each pair becomes the number ``row · N + column``: two sorts, and about 50 bytes
       per entry of ``edge_index`` while it runs.
    """
    if edge_index.numel() == 0:
        return torch.empty((2, 0), dtype=torch.int64)
    row, col = edge_index.numpy()
    low, high = np.minimum(row, col), np.maximum(row, col)
    one_way = low * num_nodes + high
    one_way = np.unique(one_way[low != high])
    low, high = np.divmod(one_way, num_nodes)
    both_ways = np.concatenate([one_way, high * num_nodes + low])
    del low, high, one_way  # a hundred million edges are a gigabyte each
    both_ways.sort()
    simple = np.empty((2, len(both_ways)), dtype=np.int64)
    np.divmod(both_ways, num_nodes, out=(simple[0], simple[1]))
    return torch.from_numpy(simple)


def csr_tensor(matrix: scipy.sparse.csr_matrix) -> Tensor:
    """Turn a SciPy CSR matrix into a torch one, float32 with int64 indices.

    Parameters
    ----------
    matrix : scipy.sparse.csr_matrix of shape (N, d)
        Its indices are sorted in place; it must hold no entry twice.

    Returns
    -------
    Tensor of shape (N, d), float32, sparse CSR
    """
    matrix.sort_indices()
    with warnings.catch_warnings():
        # torch says once per process that CSR is in beta; nothing a user can act on
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        return torch.sparse_csr_tensor(
            torch.from_numpy(matrix.indptr.astype(np.int64)),
            torch.from_numpy(matrix.indices.astype(np.int64)),
            torch.from_numpy(matrix.data.astype(np.float32)),
            size=matrix.shape,
        )


def scipy_csr(x: Tensor) -> scipy.sparse.csr_matrix:
    """Return the SciPy view of a sparse CSR tensor, sharing its memory.

    Parameters
    ----------
    x : Tensor of shape (N, d), sparse CSR

    Returns
    -------
    scipy.sparse.csr_matrix of shape (N, d)
    """
    return scipy.sparse.csr_matrix(
        (x.values().numpy(), x.col_indices().numpy(), x.crow_indices().numpy()),
        shape=tuple(x.shape),
    )


def compact_features(x: Tensor) -> Tensor:
    """Keep features as float32, and as sparse CSR where that is smaller.

    Parameters
    ----------
    x : Tensor of shape (N, d), strided or sparse CSR
        Features of any numeric dtype.

    Returns
    -------
    Tensor of shape (N, d), float32
        Sparse CSR if ``d >= 64`` and less than 10 % of the entries are not zero,
        strided otherwise.
    """
    is_sparse = x.layout == torch.sparse_csr
    present = x.values() if is_sparse else x
    num_present = int(present.count_nonzero())
    keep_sparse = x.shape[1] >= SPARSE_WIDTH and num_present < SPARSE_BELOW * x.numel()
    if not keep_sparse:
        return (x.to_dense() if is_sparse else x).to(torch.float32).contiguous()
    if not is_sparse:
        return csr_tensor(scipy.sparse.csr_matrix(x.numpy()))
    matrix = scipy_csr(x).copy()
    matrix.eliminate_zeros()
    return csr_tensor(matrix)


def validate_node_dataset(dataset: NodeDataset) -> None:
    """Check that a graph keeps the promises of :class:`NodeDataset`.

    Parameters
    ----------
    dataset : NodeDataset
        The graph, of any source.

    Raises
    ------
    DataError
        If a shape or dtype is wrong, a feature is not finite, a label is outside
        [-1, C), or the edges are out of range, unsorted, doubled, self-loops or
        one-way.
    """
    num_nodes, name = dataset.num_nodes, dataset.name
    _check_features(dataset.x, num_nodes, name)
    _check_labels(dataset.y, dataset.num_classes, name, lowest=-1)
    _check_edges(dataset.edge_index, num_nodes, name)
    for mask, member in dataset.masks.items():
        if member.dtype != torch.bool or member.shape != (num_nodes,):
            raise DataError(
                f'{name}: mask "{mask}" must be bool of shape ({num_nodes},), got '
                f"{member.dtype} of shape {tuple(member.shape)}."
            )
    network = dataset.network
    if network is not None and network.shape != (num_nodes,):
        raise DataError(
            f"{name}: network must name one network per node, shape ({num_nodes},), "
            f"got {tuple(network.shape)}."
        )


def validate_graph_dataset(dataset: GraphDataset) -> None:
    """Check that a set of graphs keeps the promises of :class:`GraphDataset`.

    Parameters
    ----------
    dataset : GraphDataset
        The graphs as one disjoint union.

    Raises
    ------
    DataError
        As :func:`validate_node_dataset`, or if ``batch`` does not number the graphs in
        ascending order, or an edge joins two graphs.
    """
    batch, name = dataset.batch, dataset.name
    _check_features(dataset.x, batch.numel(), name)
    _check_labels(dataset.y, dataset.num_classes, name, lowest=0)
    _check_edges(dataset.edge_index, batch.numel(), name)
    is_ascending = batch.numel() == 0 or bool((batch.diff() >= 0).all())
    out_of_range = bool(((batch < 0) | (batch >= dataset.num_graphs)).any())
    if not is_ascending or out_of_range:
        raise DataError(
            f"{name}: batch must give each node its graph, ascending and in "
            f"[0, {dataset.num_graphs})."
        )
    row, col = dataset.edge_index
    if bool((batch[row] != batch[col]).any()):
        raise DataError(f"{name}: an edge joins nodes of two graphs.")


def _check_features(x: Tensor, num_nodes: int, name: str) -> None:
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[0] != num_nodes:
        raise DataError(
            f"{name}: features must be float32 of shape ({num_nodes}, d), got "
            f"{x.dtype} of shape {tuple(x.shape)}."
        )
    values = x.values() if x.layout == torch.sparse_csr else x
    if bool(values.isfinite().all()):
        return
    if x.layout == torch.sparse_csr:
        entry = int((~values.isfinite()).nonzero()[0, 0])
        node = int(torch.searchsorted(x.crow_indices(), entry, right=True)) - 1
        column = int(x.col_indices()[entry])
    else:
        node, column = (int(i) for i in (~values.isfinite()).nonzero()[0])
    bad = int((~values.isfinite()).sum())
    raise DataError(
        f"{name}: {bad:,} feature values are NaN or infinite, the first at node "
        f"{node}, column {column}. Impute or drop them."
    )


def _check_labels(y: Tensor, num_classes: int, name: str, *, lowest: int) -> None:
    if y.dtype != torch.int64 or y.dim() != 1:
        raise DataError(
            f"{name}: labels must be one int64 each, got {y.dtype} of shape "
            f"{tuple(y.shape)}."
        )
    wrong = ((y < lowest) | (y >= num_classes)).nonzero()
    if wrong.numel():
        first = int(wrong[0, 0])
        raise DataError(
            f"{name}: {len(wrong):,} labels are outside [{lowest}, {num_classes}), the "
            f"first is y[{first}] = {int(y[first])}. There are {num_classes} classes"
            + (" and -1 means unknown." if lowest < 0 else ".")
        )


def _check_edges(edge_index: Tensor, num_nodes: int, name: str) -> None:
    if (
        edge_index.dtype != torch.int64
        or edge_index.dim() != 2
        or edge_index.shape[0] != 2
    ):
        raise DataError(
            f"{name}: edge_index must be int64 of shape (2, 2E), got "
            f"{edge_index.dtype} of shape {tuple(edge_index.shape)}."
        )
    if edge_index.numel() == 0:
        return
    row, col = edge_index
    if int(edge_index.min()) < 0 or int(edge_index.max()) >= num_nodes:
        raise DataError(
            f"{name}: edges name nodes {int(edge_index.min())} to "
            f"{int(edge_index.max())}, but the nodes are 0 to {num_nodes - 1}."
        )
    is_sorted = bool(((row * num_nodes + col).diff() > 0).all())
    is_two_way = torch.equal(
        torch.bincount(row, minlength=num_nodes),
        torch.bincount(col, minlength=num_nodes),
    )
    if not is_sorted or not is_two_way or bool((row == col).any()):
        raise DataError(
            f"{name}: edges must be undirected and simple: both directions, sorted by "
            "(row, column), no self-loop, none twice. Pass them through "
            "undirected_simple()."
        )
