"""Differentiable products of sparse matrices (constant or learnable) and dense ones."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Protocol, TypeVar

import numpy as np
import scipy.sparse
import torch
from torch import Tensor, nn

__all__ = ["EdgeOperator", "EdgePattern", "Operator", "SparseOperator"]
__all__ += ["apply_function", "computed_once", "csr_matrix", "index_sum"]
__all__ += ["lay_out_for_sparse", "marked", "memo_bytes", "multiply", "narrow_csr"]
__all__ += ["quiet_csr", "with_slope"]

Key = TypeVar("Key")
Value = TypeVar("Value")
INT32_MAX = 2**31 - 1
HAS_MKL = bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
"""Whether torch multiplies CSR matrices on a CPU with MKL, which never reads the result's
memory if its factor is 0."""


SUMMED_WIDTH = 16
"""Columns of a dense float32 matrix from which sums of weighted rows, as of embeddings, are
faster on a CPU than MKL's product: 1.5 to 3 times with 64 columns."""


class Operator(Protocol):
    """A matrix that multiplies node representations from the left."""

    def matmul(self, dense: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply ``dense`` (N, p) to (M, p) and add ``bias`` (p,) to every row.

        Both may require grad.
        """


def csr_matrix(
    row: Tensor, column: Tensor, value: Tensor, shape: tuple[int, int]
) -> Tensor:
    """Sort entries (n,) into a CSR matrix with the narrowest index type that fits.

    Products add up entries at one position. The kernels of CPU (MKL) and GPU (cuSPARSE)
    accept int32 indices without conversion; these take a third less memory than int64.
    """
    order, start, column = _sorted_rows(row, column, shape)
    return narrow_csr(start, column, value[order], shape)


def _sorted_rows(
    row: Tensor, column: Tensor, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the order of entries by row and column, the rows' starts, the columns."""
    order = torch.argsort(row * shape[1] + column, stable=True)
    start = torch.zeros(shape[0] + 1, dtype=torch.int64, device=row.device)
    torch.cumsum(torch.bincount(row, minlength=shape[0]), 0, out=start[1:])
    index = _index_type(shape, len(order))
    return order, start.to(index), column[order].to(index)


def _index_type(shape: tuple[int, ...], count: int) -> torch.dtype:
    """Return int32 if it suffices for the indices of so many entries, else int64."""
    return torch.int32 if max(*shape, count) <= INT32_MAX else torch.int64


def _csr(
    start: Tensor, column: Tensor, value: Tensor, shape: tuple[int, ...]
) -> Tensor:
    """Build a CSR tensor with the narrowest index type that fits."""
    index = _index_type(shape, value.numel())
    return narrow_csr(start.to(index), column.to(index), value, shape)


def narrow_csr(
    start: Tensor, column: Tensor, value: Tensor, shape: tuple[int, ...]
) -> Tensor:
    """Build a CSR tensor (M, N) from its parts, without checks and copies.

    ``start`` (M + 1,) is the first entry of each row, and n; ``column`` (n,), of the
    same type, is the column of each entry.
    """
    _pass_beta_warning()
    return torch.sparse_csr_tensor(start, column, value, shape, check_invariants=False)


def transpose_csr(
    start: Tensor, column: Tensor, value: Tensor, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Transpose the parts of :func:`narrow_csr` on the CPU; those of the result are sorted.

    SciPy counts the entries of each column: linear time, a tenth of that of sorting.
    """
    parts = (value.numpy(), column.numpy(), start.numpy())
    turned = scipy.sparse.csr_array(parts, shape=shape).tocsc()
    arrays: tuple[np.ndarray, ...] = (turned.indptr, turned.indices, turned.data)
    first, second, third = (torch.from_numpy(array) for array in arrays)
    return first, second, third


@cache
def _pass_beta_warning() -> None:
    """Build a first CSR tensor, without the warnings that torch gives once per process.

    They say that CSR is in beta and, with torch 2.11, that its checks are off; users
    cannot act on that. A filter around each tensor would take ten times as long as the
    tensor.
    """
    with quiet_csr():
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)


@contextlib.contextmanager
def quiet_csr() -> Iterator[None]:
    """Suppress torch's warnings about CSR tensors on which users cannot act.

    The last one is given since torch 2.15 whenever ``torch.load`` checks a CSR tensor,
    which the files of torch-geometric's and OGB's loaders hold.
    """
    with warnings.catch_warnings():
        for start in (
            "Sparse CSR tensor support",
            "Sparse invariant checks are implicitly disabled",
            "Validating sparse tensor invariants because weights_only",
        ):
            warnings.filterwarnings("ignore", message=start)
        yield


class SparseOperator:
    """A constant sparse matrix (M, N), CSR, and its transpose for the backward pass.

    The first backward pass computes the transpose; torch's own backward of a CSR product
    transposes in every pass. A symmetric matrix is stored once.
    """

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = _csr(
            matrix.crow_indices(),
            matrix.col_indices(),
            matrix.values().detach(),
            tuple(matrix.shape),
        )
        self._transpose: Tensor | None = None

    @classmethod
    def from_entries(
        cls, row: Tensor, column: Tensor, value: Tensor, shape: tuple[int, int]
    ) -> SparseOperator:
        """Build from unsorted entries, see :func:`csr_matrix`."""
        return cls(csr_matrix(row, column, value, shape))

    @classmethod
    def from_rows(
        cls, start: Tensor, column: Tensor, value: Tensor, shape: tuple[int, int]
    ) -> SparseOperator:
        """Build from the parts of :func:`narrow_csr`, with columns in any order."""
        if column.device.type != "cpu":
            row = torch.repeat_interleave(start.diff().long())
            return cls.from_entries(row, column, value, shape)
        # a transpose has sorted rows, and so has the transpose of that
        across = transpose_csr(start.to(column.dtype), column, value, shape)
        return cls.from_sorted(transpose_csr(*across, shape[::-1]), across, shape)

    @classmethod
    def from_sorted(
        cls,
        rows: tuple[Tensor, Tensor, Tensor],
        columns: tuple[Tensor, Tensor, Tensor],
        shape: tuple[int, int],
    ) -> SparseOperator:
        """Build from the parts of a matrix and of its transpose, both sorted by row."""
        made = cls(_csr(*rows, shape))
        made._transpose = _csr(*columns, shape[::-1])
        return made

    @property
    def num_bytes(self) -> int:
        """Approximate memory of both matrices, in bytes: 8 per entry and direction."""
        return 2 * 8 * self.matrix.values().numel()

    @property
    def transpose(self) -> Tensor:
        """The transposed matrix, of shape (N, M), sparse CSR."""
        if self._transpose is None:
            self._transpose = self._transposed()
        return self._transpose

    def _transposed(self) -> Tensor:
        """Compute the transpose, or return the matrix itself if it is symmetric."""
        a = self.matrix
        rows, columns = a.shape
        if a.device.type == "cpu":
            parts = (a.crow_indices(), a.col_indices(), a.values())
            t = _csr(*transpose_csr(*parts, (rows, columns)), (columns, rows))
        else:
            start = a.crow_indices().long()
            row = torch.repeat_interleave(start.diff(), output_size=a.values().numel())
            t = csr_matrix(a.col_indices().long(), row, a.values(), (columns, rows))
        is_symmetric = (
            rows == columns
            and torch.equal(a.crow_indices(), t.crow_indices())
            and torch.equal(a.col_indices(), t.col_indices())
            and torch.equal(a.values(), t.values())
        )
        return a if is_symmetric else t

    def matmul(self, dense: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply ``dense`` (N, p) and add ``bias`` (p,); differentiable in both."""
        return apply_function(_Product, self, False, dense, bias)


class _Product(torch.autograd.Function):
    """``A @ dense + bias`` or ``Aᵀ @ dense + bias`` for a constant sparse ``A``."""

    @staticmethod
    def forward(
        ctx: Any,
        operator: SparseOperator,
        is_transposed: bool,
        dense: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.operator, ctx.is_transposed = operator, is_transposed
        matrix = operator.transpose if is_transposed else operator.matrix
        return multiply(matrix, dense, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # calling apply again makes second derivatives available for gradient matching
        to_dense = to_bias = None
        if ctx.needs_input_grad[2]:
            turned = not ctx.is_transposed
            to_dense = apply_function(_Product, ctx.operator, turned, grad, None)
        if ctx.needs_input_grad[3]:
            to_bias = grad.sum(0)
        return None, None, to_dense, to_bias


def multiply(matrix: Tensor, dense: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``matrix @ dense + bias`` for a CSR matrix, written once, without autograd."""
    if dense.device.type != "cpu" or not HAS_MKL:
        if bias is None:
            return torch.mm(matrix, dense)
        return torch.addmm(bias, matrix, dense)
    if (
        dense.shape[1] >= SUMMED_WIDTH
        and dense.stride(1) == 1
        and dense.dtype == matrix.dtype == torch.float32
    ):
        found = torch.embedding_bag(
            dense,
            matrix.col_indices(),
            matrix.crow_indices(),
            mode=0,  # the sum
            per_sample_weights=matrix.values(),
            include_last_offset=True,
        )[0]
        return found if bias is None else found.add_(bias)
    # torch.mm and torch.addmm first fill and copy a result of the same size
    out = dense.new_empty(matrix.shape[0], dense.shape[1])
    if bias is None:
        return out.addmm_(matrix, dense, beta=0)
    return out.copy_(bias).addmm_(matrix, dense)


class EdgePattern:
    """Positions of the entries of sparse matrices whose values change or train.

    ``row`` and ``column`` (n,) of matrices (M, N) are in any order; the values are sorted
    by both, and ``order`` (n,) is the given entry at each place. Products read the rows of
    the dense matrices in place and store no row per entry.
    """

    def __init__(self, row: Tensor, column: Tensor, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.order, self._start, self._column = _sorted_rows(row, column, shape)
        turned = (column[self.order], row[self.order], shape[::-1])
        self._across, self._turned_start, self._turned_column = _sorted_rows(*turned)

    def dot(self, left: Tensor, right: Tensor) -> Tensor:
        """Compute ``⟨left_row, right_column⟩`` for every entry, (n,) in sorted order."""
        return apply_function(_EdgeDots, self, left, right)

    def matmul(self, value: Tensor, dense: Tensor) -> Tensor:
        """Multiply the matrix of values (n,) in sorted order by ``dense`` (N, p)."""
        return apply_function(_EdgeSums, self, False, value, dense)

    def matrix(self, value: Tensor) -> Tensor:
        """Return the CSR matrix (M, N) of values in sorted order."""
        return narrow_csr(self._start, self._column, value, self.shape)

    def transposed(self, value: Tensor) -> Tensor:
        """Return the transposed CSR matrix (N, M) of values in sorted order."""
        value = value.index_select(0, self._across)
        return narrow_csr(
            self._turned_start, self._turned_column, value, self.shape[::-1]
        )


class _EdgeDots(torch.autograd.Function):
    """Inner products of the rows at a pattern's entries."""

    @staticmethod
    def forward(ctx: Any, pattern: EdgePattern, left: Tensor, right: Tensor) -> Tensor:
        ctx.pattern = pattern
        ctx.save_for_backward(left, right)
        at = pattern.matrix(left.new_zeros(len(pattern.order)))
        if len(pattern.order) > len(left) * len(right):  # torch refuses so many entries
            row = torch.repeat_interleave(at.crow_indices().long().diff())
            return (left[row] * right[at.col_indices().long()]).sum(1)
        found = torch.sparse.sampled_addmm(at, left, right.t(), beta=0.0)
        out: Tensor = found.values()
        return out

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        (grad,) = outputs
        to_left = to_right = None
        if ctx.needs_input_grad[1]:
            to_left = apply_function(_EdgeSums, ctx.pattern, False, grad, right)
        if ctx.needs_input_grad[2]:
            to_right = apply_function(_EdgeSums, ctx.pattern, True, grad, left)
        return None, to_left, to_right


class _EdgeSums(torch.autograd.Function):
    """``A @ dense`` or ``Aᵀ @ dense`` for a matrix given by a pattern and its values."""

    @staticmethod
    def forward(
        ctx: Any, pattern: EdgePattern, is_turned: bool, value: Tensor, dense: Tensor
    ) -> Tensor:
        ctx.pattern, ctx.is_turned = pattern, is_turned
        ctx.save_for_backward(value, dense)
        matrix = pattern.transposed(value) if is_turned else pattern.matrix(value)
        return multiply(matrix, dense, None)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        value, dense = ctx.saved_tensors
        (grad,) = outputs
        to_value = to_dense = None
        if ctx.needs_input_grad[2]:
            rows, columns = (dense, grad) if ctx.is_turned else (grad, dense)
            to_value = apply_function(_EdgeDots, ctx.pattern, rows, columns)
        if ctx.needs_input_grad[3]:
            turned = not ctx.is_turned
            to_dense = apply_function(_EdgeSums, ctx.pattern, turned, value, grad)
        return None, None, to_value, to_dense


class EdgeOperator:
    """A sparse matrix given by its entries (n,), differentiable in their values.

    Each product takes n·p floats of memory. Use it for small graphs with learnable weights,
    and :class:`SparseOperator` for constant matrices.
    """

    def __init__(
        self, row: Tensor, column: Tensor, value: Tensor, num_rows: int
    ) -> None:
        self.row, self.column, self.value = row, column, value
        self.num_rows = num_rows

    def matmul(self, dense: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply ``dense`` (N, p) and add ``bias`` (p,); differentiable in all."""
        messages = self.value[:, None] * dense.index_select(0, self.column)
        out = index_sum(messages, self.row, self.num_rows)
        return out if bias is None else out + bias


def marked(mask: Tensor) -> Tensor:
    """Return the positions of the true entries of a mask (n,), ascending, int64.

    ``x.index_select(0, marked(mask))`` takes a third of the time of ``x[mask]`` on a CPU.
    """
    if mask.device.type != "cpu":
        return mask.nonzero().squeeze(1)
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Call an autograd function that returns one tensor; torch does not type ``apply``."""
    out: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


def with_slope(value: Tensor, at: Tensor, slope: Tensor) -> Tensor:
    """Return ``value`` (...) with a known derivative ``slope`` (..., *) by ``at``.

    ``at`` has the shape of ``slope``. Derivatives that ``value`` has already are kept;
    the result is differentiable once.
    """
    return apply_function(_WithSlope, value, at, slope)


class _WithSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, at: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        inner = (1,) * (slope.dim() - grad.dim())
        return grad, grad.view(*grad.shape, *inner) * slope, None


def computed_once(
    table: dict[Key, Value], key: Key, compute: Callable[[], Value]
) -> Value:
    """Return an entry of a cache, which serves training even if evaluation creates it."""
    if key not in table:
        with torch.inference_mode(False), torch.no_grad():
            table[key] = compute()
    return table[key]


def memo_bytes(value: Any) -> int:
    """Add up the tensors in a memo, and objects with a ``num_bytes``."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return sum(map(memo_bytes, value))
    return int(getattr(value, "num_bytes", 0))


def index_sum(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Sum the rows of ``values`` that share an ``index``, which is their output row.

    The result (size, ...) is zero in rows that no index names.
    """
    if size == 1:
        return values.sum(0, keepdim=True, dtype=values.dtype)
    return values.new_zeros((size, *values.shape[1:])).index_add(0, index, values)


def lay_out_for_sparse(model: nn.Module, num_features: int) -> None:
    """Store the weights that multiply sparse features in column-major order, in place.

    A sparse matrix times a transposed weight, and its gradient, then need no transposing
    copy, which takes longer than the products with thousands of features. Call this before
    an optimizer is constructed: fused ones read tensors in memory order, so that moments
    and gradients set by hand must have the layout of their parameter. Entries of a
    ``ParameterDict`` are features of nodes, not weights, and keep their layout.
    """
    for module in model.modules():
        if isinstance(module, nn.ParameterDict):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 2 and parameter.shape[1] == num_features:
                parameter.data = parameter.data.t().contiguous().t()
