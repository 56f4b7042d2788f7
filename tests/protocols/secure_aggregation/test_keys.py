from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.secure_aggregation.keys import (
    PRIME,
    SEAL_BYTES,
    SHARE_BYTES,
    KeyAgreement,
    add_masks,
    combine,
    digest,
    draw_secret,
    mask_stream,
    public_key,
    seal,
    split,
    unseal,
)


def test_both_sides_agree_on_a_key() -> None:
    one, two = draw_secret(), draw_secret()
    key = KeyAgreement(one, 4).key(public_key(two), "mask", 0, 1)
    assert key == KeyAgreement(two, 4).key(public_key(one), "mask", 0, 1)
    assert len(key) == 32


def test_public_keys_are_those_of_rfc_7748() -> None:
    # section 5.2, the first of the iterated results: X25519(9, 9)
    expected = "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"
    assert public_key(bytes([9]) + bytes(31)).hex() == expected


@pytest.mark.parametrize(
    "other",
    [(5, "mask", 0, 1), (4, "share", 0, 1), (4, "mask", 1, 0), (4, "mask", 0, 2)],
)
def test_another_round_purpose_or_pair_has_another_key(
    other: tuple[int, str, int, int],
) -> None:
    secret, public = draw_secret(), public_key(draw_secret())
    base = KeyAgreement(secret, 4).key(public, "mask", 0, 1)
    number, *rest = other
    assert KeyAgreement(secret, number).key(public, *rest) != base  # type: ignore[arg-type]


def test_a_public_key_that_is_none_is_refused() -> None:
    with pytest.raises(PayloadError, match="no X25519 key"):
        KeyAgreement(draw_secret(), 1).key(bytes(32), "mask", 0, 1)


def test_what_is_sealed_opens_with_its_key_only() -> None:
    key = draw_secret()
    sealed = seal(key, b"a share")
    assert len(sealed) == len(b"a share") + SEAL_BYTES
    assert unseal(key, sealed) == b"a share"
    assert unseal(draw_secret(), sealed) is None
    assert unseal(key, sealed[:-1] + bytes([sealed[-1] ^ 1])) is None
    assert seal(key, b"a share") != sealed


def test_the_stream_is_aes_in_counter_mode_of_all_32_key_bytes() -> None:
    key = bytes(range(32))
    block = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    counters = bytes(16) + bytes(15) + b"\x01"
    expected = np.frombuffer(block.update(counters), dtype="<u8")
    assert np.array_equal(mask_stream(key, 4), expected)
    for place in range(32):
        other = bytearray(key)
        other[place] ^= 128
        assert not np.array_equal(mask_stream(bytes(other), 4), expected)


def test_pairwise_masks_cancel_in_the_sum() -> None:
    rng = np.random.default_rng(0)
    plain = rng.integers(0, 2**64, size=(4, 50), dtype=np.uint64)
    keys = {(i, j): draw_secret() for i in range(4) for j in range(4) if i < j}
    masked = plain.copy()
    for me in range(4):
        mine = {o: keys[min(me, o), max(me, o)] for o in range(4) if o != me}
        add_masks(masked[me], partition_id=me, pair_keys=mine)
        assert not np.array_equal(masked[me], plain[me])
    assert np.array_equal(masked.sum(axis=0), plain.sum(axis=0))


def test_a_digest_recognises_a_secret() -> None:
    secret = draw_secret()
    assert digest(secret) == digest(bytes(secret))
    assert digest(secret) != digest(draw_secret())
    assert len(digest(secret)) == 16


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
