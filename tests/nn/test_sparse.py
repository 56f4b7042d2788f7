from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flower_fgl.nn import sparse as module
from flower_fgl.nn.sparse import (
    EdgeOperator,
    EdgePattern,
    SparseOperator,
    csr_matrix,
    index_sum,
    lay_out_for_sparse,
    transpose_csr,
)


def entries(
    rows: int,
    columns: int,
    count: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    if rows * columns == 0:
        count = 0
    row = torch.randint(0, max(rows, 1), (count,), generator=g)
    column = torch.randint(0, max(columns, 1), (count,), generator=g)
    return row, column, torch.randn(count, generator=g, dtype=dtype)


def dense_of(
    row: Tensor, column: Tensor, value: Tensor, shape: tuple[int, int]
) -> Tensor:
    out = torch.zeros(shape, dtype=value.dtype)
    for r, c, v in zip(row, column, value, strict=True):
        out[r, c] += v
    return out


sizes = st.integers(1, 7)


@settings(deadline=None)
@given(rows=sizes, columns=sizes, count=st.integers(0, 30), seed=st.integers(0, 99))
def test_a_csr_matrix_holds_the_sum_of_its_entries(
    rows: int, columns: int, count: int, seed: int
) -> None:
    row, column, value = entries(rows, columns, count, seed)
    matrix = csr_matrix(row, column, value, (rows, columns))
    product = matrix @ torch.eye(columns)
    torch.testing.assert_close(product, dense_of(row, column, value, (rows, columns)))
    start = matrix.crow_indices()
    assert start.dtype == torch.int32
    for r in range(rows):
        columns_of_row = matrix.col_indices()[start[r] : start[r + 1]]
        assert columns_of_row.tolist() == sorted(column[row == r].tolist())


@settings(deadline=None)
@given(
    rows=sizes,
    columns=sizes,
    width=sizes,
    count=st.integers(0, 30),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_and_their_gradients_equal_the_dense_ones(
    rows: int, columns: int, width: int, count: int, has_bias: bool, seed: int
) -> None:
    row, column, value = entries(rows, columns, count, seed)
    matrix = dense_of(row, column, value, (rows, columns))
    operator = SparseOperator.from_entries(row, column, value, (rows, columns))
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(columns, width, generator=g, requires_grad=True)
    bias = torch.randn(width, generator=g, requires_grad=True) if has_bias else None
    weight = torch.randn(rows, width, generator=g)
    leaves = [h] if bias is None else [h, bias]
    expected = matrix @ h if bias is None else matrix @ h + bias
    out = operator.matmul(h, bias)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad((out * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
    )


def test_the_product_passes_first_and_second_gradient_checks() -> None:
    operator = SparseOperator.from_entries(
        *entries(4, 3, 7, dtype=torch.float64), shape=(4, 3)
    )
    h = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def squared(h: Tensor, bias: Tensor) -> Tensor:
        return operator.matmul(h, bias).square()

    assert torch.autograd.gradcheck(squared, (h, bias))
    assert torch.autograd.gradgradcheck(squared, (h, bias))


def test_a_linear_map_of_sparse_features_has_the_gradient_of_the_dense_map() -> None:
    x = dense_of(*entries(6, 5, 9, dtype=torch.float64), shape=(6, 5))
    row, column = x.nonzero(as_tuple=True)
    features = SparseOperator.from_entries(row, column, x[row, column], (6, 5))
    weight = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    target = torch.randn(6, 3, dtype=torch.float64)
    of_sparse = (features.matmul(weight.t()) - target).square().sum()
    of_dense = (x @ weight.t() - target).square().sum()
    (got,) = torch.autograd.grad(of_sparse, weight)
    (expected,) = torch.autograd.grad(of_dense, weight)
    torch.testing.assert_close(got, expected)


def test_a_gradient_that_is_an_expanded_view_is_accepted() -> None:
    operator = SparseOperator.from_entries(*entries(4, 3, 7), shape=(4, 3))
    h = torch.randn(3, 2, requires_grad=True)
    operator.matmul(h).sum().backward()
    expected = operator.matrix.to_dense().sum(0)[:, None].expand(3, 2)
    torch.testing.assert_close(h.grad, expected)


def test_a_symmetric_matrix_is_its_own_transpose_in_memory() -> None:
    row, column = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    value = torch.tensor([2.0, 2.0, 3.0, 3.0])
    symmetric = SparseOperator.from_entries(row, column, value, (3, 3))
    assert symmetric.transpose is symmetric.matrix
    other = SparseOperator.from_entries(row, column, torch.arange(4.0), (3, 3))
    assert other.transpose is not other.matrix
    torch.testing.assert_close(
        other.transpose.to_dense(), other.matrix.to_dense().t().contiguous()
    )


def test_the_transpose_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = SparseOperator.from_entries(*entries(4, 3, 7), shape=(4, 3))
    sorts = []
    original = module.transpose_csr

    def counted(*args: object) -> tuple[Tensor, Tensor, Tensor]:
        sorts.append(1)
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "transpose_csr", counted)
    h = torch.randn(3, 2, requires_grad=True)
    for _ in range(3):
        operator.matmul(h).sum().backward()
    assert len(sorts) == 1


@pytest.mark.parametrize(("rows", "entries"), [(1, 0), (1, 3), (70, 40), (900, 30_000)])
@pytest.mark.parametrize("width", [1, 7, 64])
def test_a_product_never_reads_the_memory_of_its_result(
    rows: int, entries: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, value = torch.randint(rows * 60, (entries,)), torch.randn(entries)
    matrix = csr_matrix(place // 60, place % 60, value, (rows, 60))
    dense, bias = torch.randn(60, width), torch.randn(width)

    def dirty(self: Tensor, *shape: int) -> Tensor:
        return torch.full(shape, float("nan"))

    for added in (None, bias):
        expected = matrix.to_dense() @ dense + (0 if added is None else added)
        with monkeypatch.context() as patched:
            patched.setattr(Tensor, "new_empty", dirty)
            found = SparseOperator(matrix).matmul(dense, added)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_matrix_without_entries_gives_the_bias() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    operator = SparseOperator.from_entries(nothing, nothing, torch.zeros(0), (3, 2))
    h = torch.ones(2, 4, requires_grad=True)
    out = operator.matmul(h, torch.arange(4.0))
    torch.testing.assert_close(out, torch.arange(4.0).expand(3, 4))
    out.sum().backward()
    torch.testing.assert_close(h.grad, torch.zeros(2, 4))


def test_an_edge_operator_equals_the_constant_one_and_passes_gradient_checks() -> None:
    row, column, value = entries(4, 3, 7, dtype=torch.float64)
    constant = SparseOperator.from_entries(row, column, value, (4, 3))
    h = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def run(value: Tensor, h: Tensor, bias: Tensor) -> Tensor:
        return EdgeOperator(row, column, value, 4).matmul(h, bias).square()

    value.requires_grad_()
    torch.testing.assert_close(run(value, h, bias), constant.matmul(h, bias).square())
    assert torch.autograd.gradcheck(run, (value, h, bias))
    assert torch.autograd.gradgradcheck(run, (value, h, bias))


def test_index_sum_adds_the_rows_of_each_index() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    out = index_sum(values, torch.tensor([2, 0, 2]), 4)
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0], [0.0, 0.0]])
    torch.testing.assert_close(out, expected)


def test_products_are_the_same_bit_for_bit_each_time() -> None:
    operator = SparseOperator.from_entries(*entries(50, 50, 900), shape=(50, 50))
    h = torch.randn(50, 16, requires_grad=True)
    runs = []
    for _ in range(2):
        out = operator.matmul(h)
        runs.append((out, *torch.autograd.grad(out.square().sum(), h)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert runs[0][0].abs().sum() > 0


def test_a_matrix_given_with_its_transpose_multiplies_both_ways() -> None:
    rows = torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1]), torch.tensor([1.0, 2, 3])
    columns = (
        torch.tensor([0, 1, 2, 3]),
        torch.tensor([0, 1, 0]),
        torch.tensor([1.0, 3, 2]),
    )
    operator = SparseOperator.from_sorted(rows, columns, (2, 3))
    dense = torch.tensor([[1.0], [10.0], [100.0]], requires_grad=True)
    out = operator.matmul(dense)
    assert out.tolist() == [[201.0], [30.0]]
    out.backward(torch.tensor([[1.0], [10.0]]))
    assert dense.grad.tolist() == [[1.0], [30.0], [2.0]]


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_weights_laid_out_by_columns_train_as_before(name: str) -> None:
    row, column, value = entries(30, 50, 200)
    x = SparseOperator.from_entries(row, column, value, (30, 50))
    found = []
    for is_laid_out in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(50, 8), torch.nn.Linear(8, 3))
        if is_laid_out:
            lay_out_for_sparse(model, 50)
            assert model[0].weight.t().is_contiguous()
            assert model[1].weight.is_contiguous()
        options = {"lr": 0.1, "weight_decay": 0.01, "fused": True}
        optimizer = getattr(torch.optim, name)(model.parameters(), **options)
        for _ in range(4):
            optimizer.zero_grad()
            h = x.matmul(model[0].weight.t(), model[0].bias)
            model[1](h).square().mean().backward()
            optimizer.step()
        if is_laid_out:  # no copy was made
            assert model[0].weight.grad.stride() == model[0].weight.stride()
        found.append({n: t.contiguous() for n, t in model.state_dict().items()})
    for key, tensor in found[0].items():
        assert torch.equal(tensor, found[1][key])


def test_learnable_features_keep_their_layout_while_weights_are_turned() -> None:
    model = torch.nn.Module()
    model.layer = torch.nn.Linear(50, 8)
    model.nodes = torch.nn.ParameterDict({"head": torch.rand(7, 50)})
    lay_out_for_sparse(model, 50)
    assert model.layer.weight.t().is_contiguous()
    assert model.nodes["head"].is_contiguous()


@pytest.mark.parametrize("width", [1, 15, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_any_width_equal_dense_ones(width: int, dtype: torch.dtype) -> None:
    row, column, value = entries(30, 50, 200)
    row[row == 7] = 8  # an empty row
    value = value.to(dtype)
    operator = SparseOperator.from_entries(row, column, value, (30, 50))
    matrix = torch.zeros(30, 50, dtype=dtype)
    matrix.index_put_((row, column), value, accumulate=True)
    draw = torch.Generator().manual_seed(2)
    dense = torch.randn(50, width, generator=draw, dtype=dtype)
    bias = torch.randn(width, generator=draw, dtype=dtype)
    for rows in (dense, dense.t().contiguous().t(), dense.repeat(1, 2)[:, :width]):
        rows = rows.detach().requires_grad_()
        for shift in (None, bias):
            out = operator.matmul(rows, shift)
            expected = matrix @ rows + (0 if shift is None else shift)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
            pull = torch.randn(out.shape, generator=draw, dtype=dtype)
            mine, theirs = (
                torch.autograd.grad(o, rows, pull)[0] for o in (out, expected)
            )
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_linear_transpose_equals_the_sorted_one_to_the_bit() -> None:
    row, column, value = entries(30, 20, 200)
    sorted_one = csr_matrix(row, column, value, (30, 20))
    parts = (
        sorted_one.crow_indices(),
        sorted_one.col_indices(),
        sorted_one.values(),
    )
    expected = csr_matrix(column, row, value, (20, 30))
    start, other, kept = transpose_csr(*parts, (30, 20))
    assert torch.equal(start.int(), expected.crow_indices())
    assert torch.equal(other.int(), expected.col_indices())
    assert torch.equal(kept, expected.values())


def test_rows_in_any_order_are_sorted_as_entries_are() -> None:
    row, column, value = entries(30, 20, 200)
    order = row.argsort(stable=True)  # rows sorted, columns in any order
    start = torch.zeros(31, dtype=torch.int64)
    start[1:] = torch.bincount(row, minlength=30).cumsum(0)
    made = SparseOperator.from_rows(start, column[order], value[order], (30, 20))
    expected = SparseOperator.from_entries(row, column, value, (30, 20))
    for one, other in (
        (made.matrix, expected.matrix),
        (made.transpose, expected.transpose),
    ):
        assert torch.equal(one.crow_indices(), other.crow_indices())
        assert torch.equal(one.col_indices(), other.col_indices())
        assert torch.equal(one.values(), other.values())


@settings(deadline=None)
@given(
    rows=sizes,
    columns=sizes,
    count=st.integers(0, 30),
    width=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_products_of_a_pattern_equal_a_loop_over_its_entries(
    rows: int, columns: int, count: int, width: int, seed: int
) -> None:
    row, column, value = entries(rows, columns, count, seed, torch.float64)
    pattern = EdgePattern(row, column, (rows, columns))
    row, column = row[pattern.order], column[pattern.order]
    assert (row * columns + column).tolist() == sorted(
        (row * columns + column).tolist()
    )
    g = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, width, generator=g, dtype=torch.float64)
    right = torch.randn(columns, width, generator=g, dtype=torch.float64)
    dots = [(left[r] * right[c]).sum().item() for r, c in zip(row, column, strict=True)]
    torch.testing.assert_close(
        pattern.dot(left, right), torch.tensor(dots, dtype=torch.float64)
    )
    matrix = dense_of(row, column, value, (rows, columns))
    torch.testing.assert_close(pattern.matmul(value, right), matrix @ right)
    torch.testing.assert_close(pattern.transposed(value).to_dense(), matrix.T)


def test_gradients_of_a_pattern_are_right_twice() -> None:
    row, column, value = entries(4, 5, 9, dtype=torch.float64)
    pattern = EdgePattern(row, column, (4, 5))
    g = torch.Generator().manual_seed(1)
    left = torch.randn(4, 3, generator=g, dtype=torch.float64).requires_grad_()
    right = torch.randn(5, 3, generator=g, dtype=torch.float64).requires_grad_()
    dots, sums = (pattern.dot, (left, right)), (pattern.matmul, (value, right))
    value.requires_grad_()
    for function, inputs in (dots, sums):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)
