"""Shamir's secret sharing of 32-byte secrets over a prime field.

Shamir, "How to Share a Secret", Communications of the ACM 22 (11), 1979: the secret is the
constant term a_0 of a random polynomial of degree t - 1, a share is its value at x > 0. Any
t shares determine the secret; fewer reveal nothing about it.

Notes
-----
1. A 32-byte secret is a single Python integer, so a share costs t products. Python's
   integer arithmetic does not run in constant time.
"""

import hashlib
import hmac
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.secure_aggregation.quantization import Vector

__all__ = ["DIGEST_BYTES", "KEY_BYTES", "PRIME", "SEAL_BYTES", "SECRET_BYTES"]
__all__ += ["SHARE_BYTES", "TAG_BYTES", "KeyAgreement", "add_masks", "combine"]
__all__ += ["derive", "digest", "draw_secret", "is_tag", "mask_stream", "public_key"]
__all__ += ["seal", "split", "tag", "threshold", "unseal", "view_digest"]

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


KEY_BYTES = 32
DIGEST_BYTES = 16
NONCE_BYTES = 12
SEAL_BYTES = NONCE_BYTES + 16
"""Bytes that :func:`seal` adds: nonce and tag."""
TAG_BYTES = 16


def draw_secret() -> bytes:
    """Draw 32 unpredictable bytes from the operating system."""
    return os.urandom(KEY_BYTES)


def public_key(secret: bytes) -> bytes:
    """Return the X25519 public key (32 bytes) of a private key (32 bytes)."""
    private = X25519PrivateKey.from_private_bytes(secret)
    return private.public_key().public_bytes_raw()


class KeyAgreement:
    """Keys that a client, with a private key of 32 bytes, shares with each other client.

    Every key depends on the round, on its purpose, on the pair of clients, and on
    ``context``, what both clients must agree on.
    """

    def __init__(
        self, secret: bytes, server_round: int, *, context: bytes = b""
    ) -> None:
        self._private = X25519PrivateKey.from_private_bytes(secret)
        self._round = server_round
        self._context = context

    def key(self, public: bytes, purpose: str, first: int, second: int) -> bytes:
        """Return the key, 32 bytes, that is shared with the client of a public key.

        ``first`` and ``second`` are the pair's partition-ids, in the same order on both
        sides.
        """
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise PayloadError(
                f"The public key of client {first} or {second} is no X25519 key."
            ) from error
        name = f"flower-fgl/{purpose}/{self._round}/{first}/{second}"
        info = b"/".join((name.encode(), self._context))
        return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(shared)


def derive(key: bytes, purpose: str, sender: int, receiver: int) -> bytes:
    """Derive the key of one direction from the shared key of a pair, 32 bytes."""
    info = f"flower-fgl/{purpose}/{sender}/{receiver}".encode()
    return HKDFExpand(SHA256(), KEY_BYTES, info).derive(key)


def tag(key: bytes, message: bytes) -> bytes:
    """Return the message authentication code of a message, 16 bytes."""
    return hmac.digest(key, message, "sha256")[:TAG_BYTES]


def is_tag(key: bytes, message: bytes, found: bytes) -> bool:
    """Return whether ``found`` is the authentication code of a message."""
    return hmac.compare_digest(tag(key, message), found)


def view_digest(*parts: bytes) -> bytes:
    """Return a hash of 32 bytes of several byte strings; their lengths are included."""
    out = hashlib.sha256()
    for part in parts:
        out.update(len(part).to_bytes(8, "little"))
        out.update(part)
    return out.digest()


def seal(key: bytes, plain: bytes) -> bytes:
    """Encrypt and authenticate; the result is 28 bytes longer than ``plain``."""
    nonce = os.urandom(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, plain, None)


def unseal(key: bytes, sealed: bytes) -> bytes | None:
    """Invert :func:`seal`; ``None`` if the bytes do not authenticate."""
    try:
        return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], None)
    except InvalidTag:
        return None


def digest(secret: bytes) -> bytes:
    """Return a hash of 16 bytes that identifies a random secret without revealing it."""
    return hashlib.blake2b(secret, digest_size=DIGEST_BYTES).digest()


def mask_stream(key: bytes, length: int) -> Vector:
    """Return pseudo-random numbers modulo 2^64, uint64 of shape (length,)."""
    stream = Cipher(AES256(key), CTR(bytes(16))).encryptor()
    numbers: Vector = np.frombuffer(stream.update(bytes(8 * length)), dtype="<u8")
    return numbers


def add_masks(
    vector: Vector, *, partition_id: int, pair_keys: Mapping[int, bytes]
) -> None:
    """Add a client's pairwise masks to a vector in place, Bonawitz et al. 2017, Section 4.

    The stream shared with another client is added if this client has the lower
    partition-id, else subtracted, so that it cancels in the sum.
    """
    for other, key in pair_keys.items():
        stream = mask_stream(key, len(vector))
        if partition_id < other:
            vector += stream
        else:
            vector -= stream
