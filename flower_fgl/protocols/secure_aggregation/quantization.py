"""Fixed-point encoding of real numbers as integers modulo 2^64, whose sums are exact.

With f fractional bits a number v becomes round(v · 2^f); a step is 2^-f. Each of n summands
may have at most (2^63 - 1)/n steps in absolute value, so that no sum can wrap around.
"""

import math
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import Shapes

__all__ = ["WITNESS", "Vector", "decode", "encode", "largest_steps", "num_entries"]
__all__ += ["with_witness"]

WITNESS = "witness"
"""Summand that every client sets to 1; its sum must be the number of clients."""

Vector: TypeAlias = NDArray[np.uint64]
"""Integers modulo 2^64; negative numbers are in two's complement."""


def with_witness(summands: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the summand ``witness`` that counts clients."""
    return {WITNESS: torch.ones(()), **summands}


def largest_steps(summands: int) -> float:
    """Return the largest size of a summand in steps: at most (2^63 - 1)/summands."""
    exact = (2**63 - 1) // summands
    steps = float(exact)
    return steps if int(steps) <= exact else float(np.nextafter(steps, 0.0))


def num_entries(shapes: Shapes) -> int:
    """Count the numbers in tensors of the given shapes."""
    return sum(math.prod(shape) for shape in shapes.values())


def encode(
    tensors: Mapping[str, Tensor],
    *,
    fraction_bits: int,
    summands: int,
    headroom: int = 0,
) -> Vector:
    """Encode real tensors in fixed point as one vector, sorted by name.

    Numbers are rounded to multiples of 2^-f, f = ``fraction_bits``, and never clipped.
    Each of at most ``summands`` vectors in a sum may grow by ``headroom`` steps
    afterwards.
    """
    limit = largest_steps(summands) - headroom
    out = np.empty(sum(t.numel() for t in tensors.values()), dtype=np.int64)
    start = 0
    for name in sorted(tensors):
        values = tensors[name].detach().cpu().to(torch.float64).reshape(-1)
        # multiplication by a power of two is exact
        steps = torch.round(values * 2.0**fraction_bits)
        # the server reads these errors: they name none of the client's numbers
        if not bool(values.isfinite().all()):
            raise PayloadError(f'"{name}" has non-finite numbers.')
        if (steps.abs() > limit).any():
            bound = max(0.0, limit) * 2.0**-fraction_bits
            raise PayloadError(
                f'"{name}" holds a number outside [-{bound:.9g}, {bound:.9g}], the range '
                f"with {fraction_bits} fractional bits and {summands} clients. Lower "
                "secure-fraction-bits, or check why the number is so large."
            )
        out[start : start + len(values)] = steps.numpy().astype(np.int64)
        start += len(values)
    return out.view(np.uint64)


def decode(total: Vector, shapes: Shapes, *, fraction_bits: int) -> dict[str, Tensor]:
    """Decode a sum of encoded vectors modulo 2^64 into float64 tensors of the given shapes.

    They are exact but for the rounding of each number, n/2 steps, and of sums above 2^53
    steps.
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
