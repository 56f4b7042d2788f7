"""Sparse features for tests."""

from __future__ import annotations

from torch import Tensor

from flower_fgl.nn import SparseOperator


def sparse(x: Tensor) -> Tensor:
    """CSR form of a dense matrix, without torch's once-only beta warning."""
    row, column = x.nonzero(as_tuple=True)
    return SparseOperator.from_entries(row, column, x[row, column], x.shape).matrix
