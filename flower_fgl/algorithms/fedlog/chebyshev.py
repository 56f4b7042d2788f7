"""Chebyshev interpolation of one smooth function per row, at many points of the row."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.polynomial import chebyshev
from torch import Tensor

from flower_fgl.nn.sparse import apply_function

__all__ = ["Points", "interpolate", "is_resolved", "place_points"]


class Points(NamedTuple):
    """Chebyshev points of one interval per row, all constant.

    ``at`` (n, K) are the points, where the caller evaluates its function; ``middle`` and
    ``half`` (n, 1) the middle of each interval, and half its length, positive.
    """

    at: Tensor
    middle: Tensor
    half: Tensor


def place_points(arguments: Tensor, count: int, *, least_half: float) -> Points:
    """Place K Chebyshev points in the range of each row of arguments (n, P), P at least 1.

    Intervals are at least twice as long as ``least_half``, around the middle of the
    range. A slope is a difference of values over the interval's length, so in a short
    interval it is mostly rounding error.
    """
    with torch.no_grad():
        low, high = arguments.aminmax(dim=1, keepdim=True)
        middle, half = (low + high) / 2, ((high - low) / 2).clamp(min=least_half)
        nodes = torch.from_numpy(chebyshev.chebpts1(count)).to(arguments)
        return Points(middle + half * nodes, middle, half)


def interpolate(values: Tensor, arguments: Tensor, points: Points) -> Tensor:
    """Interpolate each row's function from its values at Chebyshev points: (n, P).

    Differentiable once in ``values`` (n, K) and ``arguments`` (n, P). The slope of the
    interpolating polynomial is computed exactly. Points and bounds of the intervals are
    constants: the function that they sample does not depend on them. Outside its
    interval, if only by rounding, an argument is extrapolated, so that its slope is
    right.

    A function that is analytic in the ellipse with foci at the interval's ends and half
    axes that add up to ρ half lengths has an error of the order ρ⁻ᴷ (Trefethen,
    "Approximation Theory and Approximation Practice", Theorem 8.2).
    """
    return apply_function(_Interpolation, values, arguments, points)


@torch.no_grad()
def is_resolved(values: Tensor, tolerance: float) -> bool:
    """Return whether K points suffice for values (n, K).

    Then the last two coefficients are at most a share ``tolerance`` of the largest
    coefficient of all rows. False if a value is not finite.
    """
    matrix, _ = _matrices(values.shape[1], values.dtype, values.device)
    sizes = (values @ matrix.T).abs()
    return bool(sizes[:, -2:].max() <= tolerance * sizes.max())  # NaN: False


class _Interpolation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, arguments: Tensor, points: Points) -> Tensor:
        matrix, derivative = _matrices(values.shape[1], values.dtype, values.device)
        basis = _basis((arguments - points.middle) / points.half, values.shape[1])
        coefficients = values @ matrix.T
        if ctx.needs_input_grad[1]:
            slopes = coefficients @ derivative.T / points.half
            both = torch.stack([coefficients, slopes], dim=1)
            out, slope = torch.bmm(both, basis).unbind(1)  # (n, 2, P)
            ctx.save_for_backward(basis, slope)
        else:
            out = torch.bmm(coefficients[:, None], basis).squeeze(1)
            ctx.save_for_backward(basis, None)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        basis, slope = ctx.saved_tensors
        to_values = to_arguments = None
        if ctx.needs_input_grad[0]:
            matrix, _ = _matrices(basis.shape[1], basis.dtype, basis.device)
            to_values = torch.bmm(basis, grad[..., None]).squeeze(2) @ matrix
        if ctx.needs_input_grad[1]:
            to_arguments = grad * slope
        return to_values, to_arguments, None


def _basis(u: Tensor, count: int) -> Tensor:
    """Return T_0(u) … T_(K−1)(u) of each row: (n, K, P)."""
    basis = u.new_empty((len(u), count, u.shape[1]))
    basis[:, 0], basis[:, 1] = 1, u
    twice = 2 * u
    for k in range(2, count):
        torch.mul(twice, basis[:, k - 1], out=basis[:, k])
        basis[:, k] -= basis[:, k - 2]
    return basis


@lru_cache(maxsize=32)
def _matrices(
    count: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Map values at the K points to coefficients, and these to those of the slope."""
    matrix = np.linalg.inv(chebyshev.chebvander(chebyshev.chebpts1(count), count - 1))
    derivative = np.zeros((count, count))
    derivative[:-1] = chebyshev.chebder(np.eye(count))
    first, second = (
        torch.from_numpy(m).to(device, dtype) for m in (matrix, derivative)
    )
    return first, second
