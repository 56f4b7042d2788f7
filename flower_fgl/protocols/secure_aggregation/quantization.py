"""Fixed point: real numbers as integers modulo 2^64, whose sums are exact.

A number v becomes round(v · 2^f), f fractional bits; a step is 2^-f. With n summands each
may take (2^63 - 1)/n steps either way, so that no sum can wrap around.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import Shapes

__all__ = ["Vector", "decode", "encode", "largest_steps", "num_entries"]

Vector: TypeAlias = NDArray[np.uint64]
"""Integers modulo 2^64, negative ones as two's complement."""


def largest_steps(summands: int) -> float:
    """Return the largest magnitude of a summand, in steps.

    Parameters
    ----------
    summands : int, at least 1
        How many are added.

    Returns
    -------
    float
        Exactly representable and at most (2^63 - 1)/summands.
    """
    exact = (2**63 - 1) // summands
    steps = float(exact)
    return steps if int(steps) <= exact else float(np.nextafter(steps, 0.0))


def num_entries(shapes: Shapes) -> int:
    """Count the numbers in tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes.values())


def encode(
    tensors: Mapping[str, Tensor], *, fraction_bits: int, summands: int
) -> Vector:
    """Lay tensors end to end in fixed point, in the order of their names.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        Real numbers of any type.
    fraction_bits : int
        f; numbers are rounded to the nearest multiple of 2^-f.
    summands : int
        How many such vectors are added at most.

    Returns
    -------
    ndarray of shape (L,), uint64

    Raises
    ------
    PayloadError
        If a number is not finite, or so large that the sum could wrap around; nothing
        is ever clipped.
    """
    limit = largest_steps(summands)
    out = np.empty(sum(t.numel() for t in tensors.values()), dtype=np.int64)
    start = 0
    for name in sorted(tensors):
        values = tensors[name].detach().cpu().to(torch.float64).reshape(-1)
        # a product with a power of two is exact
        steps = torch.round(values * 2.0**fraction_bits)
        _check_range(name, values, steps, limit, fraction_bits, summands)
        out[start : start + len(values)] = steps.numpy().astype(np.int64)
        start += len(values)
    return out.view(np.uint64)


def _check_range(
    name: str,
    values: Tensor,
    steps: Tensor,
    limit: float,
    fraction_bits: int,
    summands: int,
) -> None:
    """Refuse what has no exact place among the integers."""
    bad = int((~values.isfinite()).sum())
    if bad:
        raise PayloadError(f'"{name}" has {bad} non-finite numbers.')
    outside = steps.abs() > limit
    if outside.any():
        worst = float(values[values.abs().argmax()])
        bound = limit * 2.0**-fraction_bits
        raise PayloadError(
            f'"{name}" holds {worst:.9g}, but with {fraction_bits} fractional bits and '
            f"{summands} clients numbers must lie in [-{bound:.9g}, {bound:.9g}]. Lower "
            "secure-fraction-bits, or find out why the number is so large."
        )


def decode(total: Vector, shapes: Shapes, *, fraction_bits: int) -> dict[str, Tensor]:
    """Turn a sum of encoded vectors back into tensors.

    Parameters
    ----------
    total : ndarray of shape (L,), uint64
        The sum modulo 2^64.
    shapes : mapping of str to tuple of int
        Names and shapes of the tensors given to :func:`encode`.
    fraction_bits : int
        f as given to :func:`encode`.

    Returns
    -------
    dict of str to Tensor, float64
        Off the sum of the n plain numbers by at most n/2 steps, beside the rounding of
        float64 where a sum has more than 2^53 steps.

    Raises
    ------
    ValueError
        If the length is not that of the layout.
    """
    if total.shape != (num_entries(shapes),):
        raise ValueError(
            f"total must have shape ({num_entries(shapes)},), got {total.shape}."
        )
    flat = torch.from_numpy(total.view(np.int64).astype(np.float64))
    flat *= 2.0**-fraction_bits
    names = sorted(shapes)
    parts = torch.split(flat, [math.prod(shapes[name]) for name in names])
    return {
        name: part.reshape(shapes[name])
        for name, part in zip(names, parts, strict=True)
    }
