"""Random numbers that hide something: from the operating system, not from a seed.

A generator of torch on the CPU has a state of 32 bits of its seed. Who knows the rest of
an upload could try all of them and subtract the noise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["hidden_normal", "hidden_uniform"]


def hidden_normal(
    shape: Sequence[int],
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw standard normal numbers, without a generator from the operating system.

    On the CPU, by inversion of a half of the distribution with 52 bits, and a sign.
    """
    if generator is not None:
        return torch.randn(tuple(shape), generator=generator, dtype=dtype)
    bits = _bits(shape)
    tail = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-53
    sign = np.where(bits & np.uint64(1), -1.0, 1.0)
    lower = torch.special.ndtri(torch.from_numpy(tail))
    values: Tensor = (lower * torch.from_numpy(sign)).reshape(tuple(shape))
    return values.to(dtype)


def hidden_uniform(
    shape: Sequence[int], *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw float64 numbers between 0 and 1, see :func:`hidden_normal`."""
    if generator is not None:
        return torch.rand(tuple(shape), generator=generator, dtype=torch.float64)
    values = (_bits(shape) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.from_numpy(values).reshape(tuple(shape))


def _bits(shape: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return 64 random bits for each element."""
    return np.frombuffer(os.urandom(8 * math.prod(shape)), dtype=np.uint64)
