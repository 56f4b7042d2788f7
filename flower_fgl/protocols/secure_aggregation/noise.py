"""Exact samples of the discrete Gaussian distribution, in integer arithmetic.

Canonne, Kamath & Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020.
Random bits come from the operating system. No floating-point number is involved, so no low
bits of one can leak.

Notes
-----
1. The paper's Algorithm 3 draws from a discrete Laplace distribution of scale ⌊σ⌋ + 1 and
   accepts with probability exp(−(|y| − σ²/t)²/2σ²). Here σ is an integer and the scale t is
   σ, which gives exp(−r²/2) with r = ||y|/σ − 1|. Any scale gives the same distribution.
2. With r = m + f, m an integer: exp(−r²/2) = exp(−1/2)^(m²) · exp(−f)^m · exp(−f²/2). All
   three factors need only comparisons of random integers below σ.
3. Every step works on an array: an entry leaves the array when its outcome is decided.
"""

import math
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.secure_aggregation.quantization import WITNESS, Vector, encode

__all__ = ["MAX_SIGMA", "NoiseShare", "add_noise_share", "clip_steps"]
__all__ += ["discrete_gaussian", "share_width"]

MAX_SIGMA = 2**56
"""Largest standard deviation; 64 times it still fits in 63 bits."""

Integers: TypeAlias = NDArray[np.int64]
Bits: TypeAlias = NDArray[np.bool_]


def discrete_gaussian(sigma: int, size: int) -> Integers:
    """Draw integers x with probability proportional to exp(−x²/2σ²), Algorithm 3.

    σ, 1 to 2^56, is the standard deviation of the continuous Gaussian of the same shape.
    """
    if not 1 <= sigma <= MAX_SIGMA:
        raise ValueError(f"sigma must lie in [1, 2^56], got {sigma}.")
    out = np.empty(size, dtype=np.int64)
    missing = np.arange(size)
    while len(missing):
        drawn = _discrete_laplace(sigma, len(missing))
        whole, part = np.divmod(np.abs(np.abs(drawn) - sigma), sigma)
        kept = _accept(whole, part, sigma)
        out[missing[kept]] = drawn[kept]
        missing = missing[~kept]
    return out


def _accept(whole: Integers, part: Integers, sigma: int) -> Bits:
    """Return True with probability exp(−r²/2), r = whole + part/sigma."""
    kept = _repeat(whole * whole, lambda i: _bernoulli_exp(len(i), _half))
    places = np.flatnonzero(kept)

    def fraction(index: Integers) -> Bits:
        some = part[places[index]]
        return _bernoulli_exp(len(index), lambda j, k: _is_below(some[j], sigma))

    kept[places] = _repeat(whole[places], fraction)
    index = np.flatnonzero(kept)
    some = part[index]
    kept[index] = _bernoulli_exp(
        len(index),
        lambda j, k: (
            _is_below(some[j], sigma) & _is_below(some[j], sigma) & _half(j, k)
        ),
    )
    return kept


def _repeat(times: Integers, draw: Callable[[Integers], Bits]) -> Bits:
    """Return whether ``times`` draws of an entry are all True."""
    out = np.ones(len(times), dtype=np.bool_)
    index, done = np.flatnonzero(times), 0
    while len(index):
        won = draw(index)
        out[index[~won]] = False
        index, done = index[won], done + 1
        index = index[times[index] > done]
    return out


def _half(index: Integers, number: int) -> Bits:
    """Return True with probability 1/2."""
    out: Bits = _uniform(2, len(index)) == 0
    return out


def _is_below(numerator: Integers, denominator: int) -> Bits:
    """Return True with probability ``numerator / denominator``."""
    out: Bits = _uniform(denominator, len(numerator)) < numerator
    return out


def _bernoulli_exp(size: int, draw: Callable[[Integers, int], Bits]) -> Bits:
    """Return True with probability exp(−γ), Algorithm 1.

    ``draw(index, k)`` must return True with probability γ ≤ 1 for the entries ``index``.
    """
    out = np.ones(size, dtype=np.bool_)
    index, number = np.arange(size), 1
    while len(index):
        # probability γ/k: both must succeed
        goes_on = draw(index, number)
        if number > 1:
            goes_on &= _uniform(number, len(index)) == 0
        # the entry stops at k; exp(−γ) is the probability that k is odd
        out[index[~goes_on]] = number % 2 == 1
        index, number = index[goes_on], number + 1
    return out


def _discrete_laplace(scale: int, size: int) -> Integers:
    """Draw integers with probability proportional to exp(−|x|/scale), Algorithm 2."""
    out = np.empty(size, dtype=np.int64)
    missing = np.arange(size)
    while len(missing):
        low = _uniform(scale, len(missing))
        kept = _bernoulli_exp(
            len(low),
            lambda j, k, low=low: _is_below(low[j], scale),  # type: ignore[misc]
        )
        high = _geometric(int(kept.sum()))
        found = low[kept] + scale * high
        is_negative = _uniform(2, len(found)) == 1
        # zero would count twice
        is_valid = ~(is_negative & (found == 0))
        place = missing[kept][is_valid]
        out[place] = np.where(is_negative, -found, found)[is_valid]
        left = np.ones(len(missing), dtype=np.bool_)
        left[np.flatnonzero(kept)[is_valid]] = False
        missing = missing[left]
    return out


def _geometric(size: int) -> Integers:
    """Count the successes with probability exp(−1) before the first failure."""
    out = np.zeros(size, dtype=np.int64)
    index = np.arange(size)
    while len(index):
        won = _bernoulli_exp(len(index), lambda j, k: np.ones(len(j), dtype=np.bool_))
        index = index[won]
        out[index] += 1
    return out


def _uniform(bound: int, size: int) -> Integers:
    """Draw integers from 0 to ``bound`` − 1 with bits of the operating system."""
    width = max(1, (bound - 1).bit_length())
    kind = np.dtype(
        next(t for t in ("<u1", "<u2", "<u4", "<u8") if width <= 8 * int(t[2]))
    )
    mask = kind.type((1 << width) - 1)
    out = np.empty(size, dtype=np.int64)
    filled = 0
    while filled < size:
        wanted = size - filled
        drawn = np.frombuffer(os.urandom(wanted * kind.itemsize), dtype=kind) & mask
        drawn = drawn[drawn < bound]
        out[filled : filled + len(drawn)] = drawn
        filled += len(drawn)
    return out


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
        listed = clipped.tolist()
        norm = sum(map(operator.mul, listed, listed))  # exact
        if norm <= bound**2:
            return clipped
        # a little less, for the rounding of the product
        factor *= float(bound) / math.sqrt(norm) * (1 - 2.0**-40)
        clipped = np.trunc(change * factor).astype(np.int64)
