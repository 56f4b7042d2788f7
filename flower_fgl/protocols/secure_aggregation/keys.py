"""Key agreement, encryption of shares and mask streams, based on ``cryptography``.

X25519 (RFC 7748) agrees on a shared key, from which HKDF-SHA256 (RFC 5869) derives a key
per round, pair and purpose. AES-256-GCM encrypts shares. HMAC-SHA256 (RFC 2104)
authenticates what two clients have seen. AES-256 in counter mode generates mask streams;
each key is used for one stream, so the counter may start at zero.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping

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

__all__ = [
    "DIGEST_BYTES",
    "KEY_BYTES",
    "SEAL_BYTES",
    "TAG_BYTES",
    "KeyAgreement",
    "add_masks",
    "derive",
    "digest",
    "draw_secret",
    "is_tag",
    "mask_stream",
    "public_key",
    "seal",
    "tag",
    "unseal",
    "view_digest",
]

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

        ``first`` and ``second`` are the partition-ids of the pair, in the same order on
        both sides. An invalid public key raises a PayloadError.
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
