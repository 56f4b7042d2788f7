from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_fgl.protocols.secure_aggregation.shamir import (
    PRIME,
    SHARE_BYTES,
    combine,
    split,
)

SECRET = bytes(range(32))


def shares_of(secret: bytes, threshold: int, points: list[int]) -> dict[int, bytes]:
    shares = split(secret, threshold=threshold, points=points)
    return dict(zip(points, shares, strict=True))


def test_the_modulus_is_prime() -> None:
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7, 11, 13))
    assert PRIME > 2**256


def test_any_threshold_of_the_shares_gives_the_secret_back() -> None:
    shares = shares_of(SECRET, 3, [1, 2, 5, 9, 10])
    for points in itertools.combinations(shares, 3):
        assert combine({x: shares[x] for x in points}) == SECRET


@given(
    secret=st.binary(min_size=32, max_size=32),
    counts=st.integers(1, 12).flatmap(
        lambda n: st.tuples(st.integers(1, n), st.just(n))
    ),
)
@settings(max_examples=30)
def test_every_secret_survives(secret: bytes, counts: tuple[int, int]) -> None:
    threshold, number = counts
    shares = shares_of(secret, threshold, list(range(1, number + 1)))
    some = dict(list(shares.items())[-threshold:])
    assert combine(some) == secret


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32])
def test_the_extreme_secrets_survive(secret: bytes) -> None:
    shares = shares_of(secret, 2, [1, 2, 3])
    assert combine({1: shares[1], 3: shares[3]}) == secret


def test_one_share_too_few_gives_another_secret() -> None:
    shares = shares_of(SECRET, 3, [1, 2, 3, 4])
    assert combine({1: shares[1], 2: shares[2]}) != SECRET


def test_a_share_too_few_fits_every_secret() -> None:
    # with t - 1 shares there is, for each candidate secret, a share that leads to it:
    # a line through (1, y) and (0, s) exists for every s
    y = int.from_bytes(shares_of(SECRET, 2, [1, 2])[1], "big")
    for candidate in (0, 1, int.from_bytes(os.urandom(32), "big")):
        at_two = (2 * y - candidate) % PRIME
        fake = {
            1: y.to_bytes(SHARE_BYTES, "big"),
            2: at_two.to_bytes(SHARE_BYTES, "big"),
        }
        assert combine(fake) == candidate.to_bytes(32, "big")


def test_a_tampered_share_gives_another_secret() -> None:
    shares = shares_of(SECRET, 2, [1, 2, 3])
    bad = bytes([shares[1][0], shares[1][1] ^ 1]) + shares[1][2:]
    assert combine({1: bad, 2: shares[2]}) != SECRET


@pytest.mark.parametrize(
    ("secret", "threshold", "points", "match"),
    [
        (b"short", 1, [1], "32 bytes"),
        (SECRET, 3, [1, 2], r"\[1, 2\]"),
        (SECRET, 0, [1, 2], r"\[1, 2\]"),
        (SECRET, 1, [1, 1], "distinct"),
        (SECRET, 1, [0, 1], "positive"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    secret: bytes, threshold: int, points: list[int], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        split(secret, threshold=threshold, points=points)
