"""A client's share of the noise in a secure sum.

The sum must have Gaussian noise of standard deviation z·S (``upload-noise`` times
``upload-clip``). Each client adds a discrete Gaussian share of variance (z·S)²/t, where t
is the threshold. A sum has at least t clients, so its noise has at least the variance
(z·S)².

Kairouz, Liu & Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning
with Secure Aggregation", ICML 2021.

Notes
-----
1. The change of a client is clipped to S as integers, after rounding. The paper bounds the
   effect of rounding on the norm instead.
2. The sum of t shares, each of width s steps, is a randomized rounding of a continuous
   Gaussian of variance t·s² − 64, up to a factor of at most 1 ± 10^-200 per outcome, if
   s is at least 12 (Peikert, "An Efficient and Parallel Gaussian Sampler for Lattices",
   CRYPTO 2010, Theorem 3.1, with width 8). The shares are larger by these 64 squared
   steps, so that the ε of the continuous Gaussian mechanism holds for the sum.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.secure_aggregation.discrete_gaussian import (
    MAX_SIGMA,
    Integers,
    discrete_gaussian,
)
from flower_fgl.protocols.secure_aggregation.quantization import WITNESS, Vector, encode

__all__ = ["NoiseShare", "add_noise_share", "clip_steps", "share_width"]

ROUNDING = 64
"""Squared steps by which the variance of the sum exceeds (z·S)², see Note 2."""
MIN_WIDTH = 12
HEADROOM = 40
"""A share beyond 40 standard deviations has a probability below 10^-340."""


@dataclass(frozen=True)
class NoiseShare:
    """What a client needs to add its share of the noise: S, z, and what is public.

    The difference to ``origin``, the summands of an upload that equals the download, is
    clipped. Summands in ``public`` are known to the server anyway and get no noise.
    """

    clip: float
    noise: float
    origin: Mapping[str, Tensor]
    public: frozenset[str]

    @property
    def terms(self) -> tuple[float, float]:
        """What all clients must have in common."""
        return self.clip, self.noise


def share_width(
    clip: float, noise: float, *, fraction_bits: int, threshold: int
) -> int:
    """Return the width of a client's share in steps, ⌈√((z²S²·4^f + 64)/t)⌉.

    f is ``fraction_bits`` (a step is 2^-f), t the smallest number of clients in a sum.
    """
    variance = (Fraction(noise) * Fraction(clip) * 2**fraction_bits) ** 2 + ROUNDING
    width = math.isqrt(math.ceil(variance / threshold) - 1) + 1
    if not MIN_WIDTH <= width <= MAX_SIGMA:
        raise PayloadError(
            f"upload-noise = {noise:g} times upload-clip = {clip:g} gives shares of "
            f"{width} steps with secure-fraction-bits = {fraction_bits}; they must have "
            f"{MIN_WIDTH} to 2^56. {'Raise' if width < MIN_WIDTH else 'Lower'} "
            "secure-fraction-bits."
        )
    return width


def add_noise_share(
    summands: Mapping[str, Tensor],
    share: NoiseShare,
    *,
    fraction_bits: int,
    clients: int,
    threshold: int,
) -> Vector:
    """Encode summands, clip their distance to the origin, and add a share of the noise.

    The summands include the check entry. ``clients`` and ``threshold`` are the largest
    and smallest number of vectors in a sum.

    Raises a PayloadError if a number is not finite, or is so large that the sum with
    its noise could wrap around; if the clipping norm is below a step; or if the noise
    does not fit.
    """
    width = share_width(
        share.clip, share.noise, fraction_bits=fraction_bits, threshold=threshold
    )
    noised = {name: t for name, t in summands.items() if name not in share.public}
    noised.pop(WITNESS, None)
    limit = {"fraction_bits": fraction_bits, "summands": clients}
    # numbers, origin, and clipped numbers lie within S of each other
    room = HEADROOM * width + math.ceil(share.clip * 2**fraction_bits)
    own = encode(noised, headroom=room, **limit).view(np.int64)
    start = encode(
        {name: share.origin[name] for name in noised}, headroom=room, **limit
    ).view(np.int64)
    change = clip_steps(own - start, Fraction(share.clip) * 2**fraction_bits)
    drawn = discrete_gaussian(width, len(change))
    if len(drawn) and int(np.abs(drawn).max()) > HEADROOM * width:
        raise PayloadError("a share of the noise lies beyond 40 standard deviations")
    values = (start + change + drawn).view(np.uint64)
    ends = np.cumsum([noised[name].numel() for name in sorted(noised)], dtype=int)
    parts = dict(zip(sorted(noised), np.split(values, ends), strict=False))
    return np.concatenate(
        [
            parts[name] if name in parts else encode({name: summands[name]}, **limit)
            for name in sorted(summands)
        ]
    )


def clip_steps(change: Integers, bound: Fraction) -> Integers:
    """Scale int64 steps towards zero until their L2 norm is at most ``bound``, exactly."""
    if bound < 1:
        raise PayloadError(
            f"upload-clip is {float(bound):.3g} steps: raise secure-fraction-bits."
        )
    factor = 1.0
    clipped = change
    while True:
        norm = _square_norm(clipped)
        if norm <= bound**2:
            return clipped
        # a little less, for the rounding of the product
        factor *= float(bound) / math.sqrt(norm) * (1 - 2.0**-40)
        clipped = np.trunc(change * factor).astype(np.int64)


def _square_norm(values: Integers) -> int:
    """Return the exact sum of squares."""
    listed = values.tolist()
    return sum(map(operator.mul, listed, listed))
