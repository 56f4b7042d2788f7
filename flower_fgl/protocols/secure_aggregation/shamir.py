"""Shamir's secret sharing of 32-byte secrets over a prime field.

Shamir, "How to Share a Secret", Communications of the ACM 22 (11), 1979: the secret is the
constant term a_0 of a random polynomial of degree t - 1, a share is its value at x > 0. Any
t shares determine the secret; fewer reveal nothing about it.

Notes
-----
1. A 32-byte secret is a single Python integer, so a share costs t products. Python's
   integer arithmetic does not run in constant time.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

__all__ = ["PRIME", "SECRET_BYTES", "SHARE_BYTES", "combine", "split", "threshold"]

PRIME = 2**256 + 297
"""Smallest prime above 2^256, so that every 32-byte secret is a field element."""
SECRET_BYTES = 32
SHARE_BYTES = 33


def threshold(clients: int, share: float) -> int:
    """Return how many of n clients must stay: ⌈share · n⌉, and more than 2n/3.

    Two groups of more than 2n/3 clients have more than n/3 clients in common. If fewer
    than n/3 clients help the server, an honest client is in both groups, so the server
    cannot show two groups different lists (Bonawitz et al. 2017, Theorem 6.5).
    """
    return max(2 * clients // 3 + 1, math.ceil(share * clients - 1e-9))


def split(secret: bytes, *, threshold: int, points: Sequence[int]) -> list[bytes]:
    """Split a secret of 32 bytes into shares of 33, one per point, Shamir 1979.

    ``threshold`` shares reconstruct it. ``points`` are the x of the share holders,
    distinct and positive.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"secret must have {SECRET_BYTES} bytes, got {len(secret)}.")
    if not 1 <= threshold <= len(points):
        raise ValueError(
            f"threshold must lie in [1, {len(points)}], the number of holders, "
            f"got {threshold}."
        )
    if len(set(points)) < len(points) or min(points) < 1:
        raise ValueError(f"points must be distinct and positive, got {list(points)}.")
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients.append(int.from_bytes(secret, "big"))  # highest power first
    shares = []
    for x in points:
        y = 0
        for coefficient in coefficients:
            y = (y * x + coefficient) % PRIME
        shares.append(y.to_bytes(SHARE_BYTES, "big"))
    return shares


def combine(shares: Mapping[int, bytes]) -> bytes | None:
    """Reconstruct the secret from exactly ``threshold`` shares by x, Shamir 1979.

    ``None`` if no 32-byte secret has these shares. Too few shares or a wrong one give
    another secret: the caller must verify the result.
    """
    total = 0
    weights = _lagrange(tuple(sorted(shares)))
    for x, weight in weights.items():
        total += weight * int.from_bytes(shares[x], "big")
    total %= PRIME
    return total.to_bytes(SECRET_BYTES, "big") if total < 2**256 else None


@lru_cache(maxsize=64)
def _lagrange(points: tuple[int, ...]) -> dict[int, int]:
    """Return the Lagrange weights Π_{j≠i} x_j/(x_j - x_i) of the shares in a_0."""
    weights = {}
    for i in points:
        above, below = 1, 1
        for j in points:
            if j != i:
                above = above * j % PRIME
                below = below * (j - i) % PRIME
        weights[i] = above * pow(below, -1, PRIME) % PRIME
    return weights
