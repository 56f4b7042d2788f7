"""Codes of identifiers that only all owners together can compute from an identifier.

Owner k of K draws a secret s_k. A chain of X25519 operations (RFC 7748), one by each owner,
turns the identifier v into the code s_1 · … · s_K · H(v), which does not depend on the
order. Each set of identifiers starts at its owner and passes all others, as points whose
identifiers they cannot tell; its code is equal wherever v occurs. Meadows, "A more
efficient cryptographic matchmaking protocol", S&P 1986, has the idea for two parties.
"""

import hashlib
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.arrays import ArrayPayload

__all__ = ["BLIND", "CODES", "MULTIPLY", "POINT", "Points"]
__all__ += ["codes_of", "hashed_points", "is_on_curve", "multiply"]

BLIND = "blind_ids"
"""Query action: send the own identifiers as points times the own secret."""
MULTIPLY = "multiply_ids"
"""Query action: multiply another owner's points by the own secret."""
CODES = "id_codes"
"""Query action: receive the own points times all secrets."""
POINT = 32
"""Bytes of a point."""
PRIME = 2**255 - 19
"""Coordinates u of Curve25519 are modulo this number."""


@dataclass(frozen=True)
class Points(ArrayPayload):
    """Points (m, 32), uint8, of m identifiers: 32·m bytes."""

    points: Annotated[Tensor, torch.uint8, "m", POINT]
    records = ("points",)


def hashed_points(ids: Tensor) -> Tensor:
    """Map identifiers (m,), int64, to points H(v) (m, 32), uint8, of the curve.

    About half of all hashes are on the curve, the others on its twist. A product is on
    the same one as its point, and so would tell a bit of the hash of an identifier.
    """
    rows = ids.numpy().astype("<i8").view(np.uint8).reshape(-1, 8)
    return _tensor([_point_of(data) for data in _rows(rows)])


def _point_of(data: bytes) -> bytes:
    """Return the first hash of some bytes that is on the curve."""
    for attempt in range(256):
        text = b"flower-fgl id point" + bytes([attempt]) + data
        point = hashlib.sha256(text).digest()
        if is_on_curve(point):
            return point
    raise AssertionError("no hash is on the curve")  # with a probability of 2⁻²⁵⁶


def is_on_curve(point: bytes) -> bool:
    """Return whether v² = u³ + 486662 u² + u has a solution for the coordinate u."""
    u = int.from_bytes(point, "little") % 2**255
    square = u * (u * (u + 486662) + 1) % PRIME
    return pow(square, (PRIME - 1) // 2, PRIME) == 1


def multiply(points: Tensor, secret: bytes) -> Tensor:
    """Multiply points (m, 32) by a secret of 32 bytes.

    PayloadError if a product is zero, which needs a point that is no hash.
    """
    private = X25519PrivateKey.from_private_bytes(secret)
    try:
        found = [
            private.exchange(X25519PublicKey.from_public_bytes(data))
            for data in _rows(points.numpy())
        ]
    except ValueError as error:
        raise PayloadError("a point of an identifier is zero") from error
    return _tensor(found)


def codes_of(points: Tensor) -> Tensor:
    """Return the codes (m,), int64 >= 0, of points (m, 32): 63 bits of their hashes."""
    hashes = [hashlib.sha256(data).digest()[:8] for data in _rows(points.numpy())]
    codes = np.frombuffer(b"".join(hashes), dtype="<i8").astype(np.int64)
    return torch.from_numpy(codes & np.int64(2**63 - 1))


def _rows(points: np.ndarray) -> list[bytes]:
    """Return the rows of a matrix of bytes."""
    return [row.tobytes() for row in np.ascontiguousarray(points)]


def _tensor(rows: list[bytes]) -> Tensor:
    """Return rows of 32 bytes as a matrix."""
    joined = np.frombuffer(bytearray(b"".join(rows)), dtype=np.uint8)
    return torch.from_numpy(joined.reshape(-1, POINT))
