"""Canonical form of graphs: undirected, simple, float32, sparse if mostly zero."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from flower_fgl.nn.sparse import quiet_csr

__all__ = [
    "SPARSE_BELOW",
    "SPARSE_WIDTH",
    "compact_features",
    "csr_tensor",
    "scipy_csr",
    "sorted_distinct",
    "stack_rows",
    "undirected_simple",
]

Ints = np.ndarray[Any, np.dtype[np.int64]]

SPARSE_BELOW = 0.15
"""Features are stored as sparse CSR below this share of non-zero entries. At PubMed's
share of 0.1002 a product with CSR takes half the time of a dense one."""
SPARSE_WIDTH = 64
"""Minimum width of sparse features: below it, CSR saves no memory."""


def undirected_simple(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Make a graph undirected and simple, with sorted edges.

    The result (2, 2E) holds both directions of each of the E distinct edges of any list
    ``edge_index`` (2, M), no self-loops, sorted by (row, column). N is below 3·10⁹ so that
    the code ``row · N + column`` of a pair fits 63 bits. This takes two sorts, and
    temporarily about 50 bytes per entry of ``edge_index``.
    """
    if edge_index.numel() == 0:
        return torch.empty((2, 0), dtype=torch.int64)
    row, col = edge_index.numpy()
    low, high = np.minimum(row, col), np.maximum(row, col)
    one_way = low * num_nodes + high
    one_way = sorted_distinct(one_way[low != high])
    low, high = np.divmod(one_way, num_nodes)
    both_ways = np.concatenate([one_way, high * num_nodes + low])
    del low, high, one_way  # each takes a gigabyte for a hundred million edges
    both_ways.sort()
    simple = np.empty((2, len(both_ways)), dtype=np.int64)
    np.divmod(both_ways, num_nodes, out=(simple[0], simple[1]))
    return torch.from_numpy(simple)


def sorted_distinct(values: Ints) -> Ints:
    """Return the distinct values in ascending order.

    ``numpy.unique`` uses a hash table since NumPy 2.3. It takes 13 s for twelve million
    edges; this function takes 0.2 s.
    """
    ordered = np.sort(values)
    is_first = np.ones(len(ordered), dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]


def csr_tensor(matrix: scipy.sparse.csr_matrix) -> Tensor:
    """Convert a SciPy CSR matrix to a torch tensor, float32 with int64 indices.

    The matrix has no duplicate entries. Its indices are sorted in place.
    """
    matrix.sort_indices()
    with quiet_csr():
        return torch.sparse_csr_tensor(
            torch.from_numpy(matrix.indptr.astype(np.int64, copy=False)),
            torch.from_numpy(matrix.indices.astype(np.int64, copy=False)),
            torch.from_numpy(matrix.data.astype(np.float32, copy=False)),
            size=matrix.shape,
            check_invariants=True,
        )


def scipy_csr(x: Tensor) -> scipy.sparse.csr_matrix:
    """Return features (N, d) as a SciPy matrix, of a sparse CSR tensor a view."""
    if x.layout != torch.sparse_csr:
        return scipy.sparse.csr_matrix(x.numpy())
    return scipy.sparse.csr_matrix(
        (x.values().numpy(), x.col_indices().numpy(), x.crow_indices().numpy()),
        shape=tuple(x.shape),
    )


def stack_rows(parts: Sequence[Tensor]) -> Tensor:
    """Stack features (n_i, d), all strided or all sparse CSR, in their layout."""
    if parts[0].layout != torch.sparse_csr:
        return torch.cat(list(parts))
    return csr_tensor(scipy.sparse.vstack([scipy_csr(x) for x in parts], format="csr"))


def compact_features(x: Tensor) -> Tensor:
    """Convert numeric features (N, d) to float32, and to the smaller of two layouts.

    The result is sparse CSR if ``d >= 64`` and less than 15 % of the entries are
    non-zero, else strided.
    """
    present = x.values() if x.layout == torch.sparse_csr else x
    num_present = int(present.count_nonzero())
    keep_sparse = x.shape[1] >= SPARSE_WIDTH and num_present < SPARSE_BELOW * x.numel()
    if not keep_sparse:
        return x.to_dense().to(torch.float32).contiguous()
    matrix = scipy_csr(x).copy()
    matrix.eliminate_zeros()
    return csr_tensor(matrix)
