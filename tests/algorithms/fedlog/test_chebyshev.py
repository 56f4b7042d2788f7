from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.fedlog import branches
from flower_fgl.algorithms.fedlog.branches import (
    Branch,
    PairLayer,
    interpolate,
    is_resolved,
    place_points,
)

E, P, N = 16, 40, 7


def rows(scale: float = 1.0, *, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """h_v, n_v and prototypes, with gradient."""
    generator = torch.Generator().manual_seed(3)
    draw = [torch.randn(n, E, generator=generator) for n in (N, N, P)]
    draw[1], draw[2] = draw[1] * 0.5, draw[2] * scale
    return [x.to(dtype).requires_grad_() for x in draw]


def loud(**options: bool) -> PairLayer:
    """Build a layer whose MLP_trans returns numbers large enough to change results."""
    torch.manual_seed(0)
    layer = PairLayer(E, **options)
    torch.nn.init.normal_(layer.scale.weight)
    return layer


def results(
    layer: PairLayer | Branch, inputs: list[Tensor], *more: int
) -> list[Tensor]:
    """Output and all gradients of a weighted sum of it."""
    out = layer(*inputs, *more)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    wanted = [*inputs, *(p for p in layer.parameters() if p.requires_grad)]
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), wanted)]


def directly(
    layer: PairLayer | Branch,
    inputs: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
    *more: int,
) -> list[Tensor]:
    """Results with the MLPs run once per pair."""
    with monkeypatch.context() as patch:
        patch.setattr(branches, "POINTS", {})
        return results(layer, inputs, *more)


def test_a_polynomial_below_degree_k_and_its_slope_are_exact() -> None:
    x = torch.tensor([[-1.0, 0.5, 3.0], [2.0, 2.0, 7.0]], dtype=torch.float64)
    x.requires_grad_()
    points = place_points(x, 4, least_half=1e-3)
    out = interpolate(points.at**3 - 2 * points.at, x, points)
    torch.testing.assert_close(out, x**3 - 2 * x)
    (slope,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(slope, 3 * x**2 - 2)


def test_four_points_are_those_of_the_textbook() -> None:
    # cos(π/8) = .92388 and cos(3π/8) = .38268, of the interval [0, 4]
    points = place_points(torch.tensor([[0.0, 4.0, 1.0]]), 4, least_half=0.1)
    found = points.at[0].sort().values
    expected = [2 - 2 * 0.92388, 2 - 2 * 0.38268, 2 + 2 * 0.38268, 2 + 2 * 0.92388]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-4, rtol=0)


def test_gradcheck_in_values_and_arguments() -> None:
    x = torch.rand(3, 5, dtype=torch.float64) * 4
    points = place_points(x, 6, least_half=0.1)
    values = torch.rand(3, 6, dtype=torch.float64, requires_grad=True)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda v, a: interpolate(v, a, points), (values, x))


def test_the_ends_of_an_interval_keep_their_slope() -> None:
    x = torch.tensor([[0.1, 0.7, 0.3]], requires_grad=True)
    points = place_points(x, 8, least_half=0.01)
    out = interpolate(points.at.sin(), x, points)
    (slope,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(slope, x.detach().cos(), atol=1e-4, rtol=0)


def test_equal_arguments_have_a_slope_without_rounding_noise() -> None:
    x = torch.full((1, 4), 100.0, requires_grad=True)
    points = place_points(x, 8, least_half=5.0)
    out = interpolate((points.at / 50).sin(), x, points)
    (slope,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(slope, (x.detach() / 50).cos() / 50, atol=1e-6, rtol=0)


def test_too_few_points_and_values_that_are_not_finite_are_not_resolved() -> None:
    x = torch.linspace(-1, 1, 50)[None]
    for count, is_enough in ((8, False), (24, True)):
        at = place_points(x, count, least_half=0.1).at
        assert is_resolved((4 * at).sin(), 1e-5) == is_enough
    assert not is_resolved(torch.tensor([[1.0, math.nan, 0.0, 0.0]]), 1e-5)


@pytest.mark.parametrize("neighbours_only", [False, True])
@pytest.mark.parametrize("second_silu", [False, True])
@pytest.mark.parametrize("scale", [0.03, 0.1, 0.3])
def test_a_layer_and_its_gradients_equal_the_direct_form_in_float64(
    scale: float,
    neighbours_only: bool,
    second_silu: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = loud(neighbours_only=neighbours_only, second_silu=second_silu).double()
    inputs = rows(scale)
    direct = directly(layer, inputs, monkeypatch)
    used: list[int] = []
    monkeypatch.setattr(
        branches,
        "interpolate",
        lambda *a: used.append(a[0].shape[1]) or interpolate(*a),
    )
    found = results(layer, inputs)
    assert used  # not the fall-back
    for a, b in zip(found, direct, strict=True):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()
    assert any(not torch.equal(a, b) for a, b in zip(found, direct, strict=True))


@pytest.mark.thorough
def test_gradcheck_of_a_layer() -> None:
    layer, inputs = loud().double(), rows(0.05)
    assert next(layer.points(torch.rand(N, P)))
    small = [inputs[0][:2], inputs[1][:2], inputs[2]]
    small = [x.detach().requires_grad_() for x in small]
    assert torch.autograd.gradcheck(layer, small, atol=1e-5)


def test_float32_gradients_of_weights_are_as_close_to_float64_as_in_the_direct_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, inputs = loud(), rows(0.1, dtype=torch.float32)
    found, direct = results(layer, inputs), directly(layer, inputs, monkeypatch)
    exact = directly(layer.double(), rows(0.1), monkeypatch)
    # output, h_v, n_v, h_j, then the weights
    for number, (a, b, truth) in enumerate(zip(found, direct, exact, strict=True)):
        size = truth.abs().max()
        mine, theirs = (float((x - truth).abs().max() / size) for x in (a, b))
        limit = 2e-5 if 1 <= number <= 3 else 4 * theirs + 3e-7  # a slope in d_vj
        assert mine <= limit


def test_points_grow_with_the_range_and_a_large_range_runs_the_direct_form() -> None:
    layer = loud()
    layer.first.weight.data[:, -1] = 0.5
    counts = []
    for spread in (1.0, 3.5, 11.0, 20.0, 30.0):  # change: a quarter of the spread
        placed = layer.points(torch.linspace(0, spread, P)[None])
        counts.append([points.at.shape[1] for points in placed])
    assert counts == [[6, 8, 12, 20], [8, 12, 20], [12, 20], [20], []]
    assert not [*layer.points(torch.tensor([[0.0, math.nan] * 20]))]
    assert not [*layer.points(torch.rand(2, 11))]  # fewer than 2 · 6 prototypes
    assert not [*layer.points(torch.rand(0, P))]


def test_functions_that_the_points_do_not_resolve_run_the_direct_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, inputs = loud().double(), rows(0.1)
    for linear in (layer.second, layer.trans[0], layer.trans[2]):
        linear.weight.data *= 60  # steep, although d_vj has small weights
    found, direct = results(layer, inputs), directly(layer, inputs, monkeypatch)
    for a, b in zip(found, direct, strict=True):
        assert torch.equal(a, b)


def test_a_branch_predicts_the_same_as_with_the_direct_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(1)
    branch, inputs = Branch(E), rows(0.2, dtype=torch.float32)
    found, direct = results(branch, inputs, 4), directly(branch, inputs, monkeypatch, 4)
    torch.testing.assert_close(found[0], direct[0], atol=2e-5, rtol=1e-5)


def test_without_the_second_silu_the_last_two_maps_are_one() -> None:
    layer, (h, around, prototypes) = loud(second_silu=False), rows(0.2)
    layer = layer.double()
    start, distance = torch.randn(2, E).double(), torch.rand(2, 3).double()
    m = start[:, None] + distance[..., None] * layer.first.weight[:, -1]
    for linear in (layer.second, layer.trans[0]):
        m = linear(m * m.sigmoid())
    m = m * m.sigmoid()
    weight = layer.scale.weight @ layer.trans[2].weight
    bias = layer.scale.weight @ layer.trans[2].bias
    torch.testing.assert_close(
        layer.pair_scalars(start, distance), (m @ weight.T + bias).squeeze(-1)
    )
    both = loud().double()
    both.load_state_dict(layer.state_dict())  # the same parameters
    assert not torch.allclose(both(h, around, prototypes), layer(h, around, prototypes))
