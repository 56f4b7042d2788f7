"""Payloads of secure aggregation; all fields have fixed sizes.

Letters: n sampled clients, of which m sent shares and s are in the sum; L numbers summed.
The size N of a payload is the number of its ``ids``; without them the receiver knows it.
"""

from dataclasses import dataclass
from typing import Annotated, Self

import torch
from torch import Tensor

from flower_fgl.protocols.arrays import ArrayPayload, check_ascending
from flower_fgl.protocols.secure_aggregation.identities import CARD_BYTES
from flower_fgl.protocols.secure_aggregation.keys import (
    DIGEST_BYTES,
    KEY_BYTES,
    SEAL_BYTES,
    SHARE_BYTES,
    TAG_BYTES,
)

__all__ = ["CHECK", "KEYS", "SEALED_BYTES", "SHARES", "UNMASK", "Confirmations"]
__all__ += ["MaskedUpload", "Offer", "Peers", "PublicKey", "Reveal", "Roster"]
__all__ += ["Survivors", "Tags", "from_bytes", "to_bytes"]

KEYS = "secure_keys"
"""Action that requests the keys of data owners, once they have partition-ids."""
SHARES = "secure_shares"
"""Action of the message in which clients send encrypted shares."""
CHECK = "secure_check"
"""Action of the message in which clients confirm to each other what they have seen."""
UNMASK = "secure_unmask"
"""Action of the message in which clients reveal shares to the server."""
SEALED_BYTES = 2 * SHARE_BYTES + KEY_BYTES + SEAL_BYTES
"""Bytes of the shares of seed and mask key and the public mask key, encrypted together."""

KEY_WIDTHS = (KEY_BYTES, CARD_BYTES)
"""Bytes of a public key, without and with an identity."""


def from_bytes(rows: list[bytes]) -> Tensor:
    """Stack byte strings of equal length into a uint8 tensor of shape (rows, length)."""
    flat = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
    return flat.reshape(len(rows), -1)


def to_bytes(row: Tensor) -> bytes:
    """Return the bytes of a uint8 tensor."""
    return bytes(row.numpy().tobytes())


@dataclass(frozen=True)
class PublicKey(ArrayPayload):
    """The key, 32 bytes, with which others encrypt shares to a client.

    A data owner with an identity sends :meth:`.identities.Identity.card`, 128 bytes.
    """

    bytes_: Annotated[Tensor, torch.uint8, KEY_WIDTHS]
    records = ("secure-key",)

    @property
    def key(self) -> bytes:
        """The key as bytes."""
        return to_bytes(self.bytes_)

    @classmethod
    def of(cls, key: bytes) -> Self:
        """Wrap a key."""
        return cls(from_bytes([key])[0])


@dataclass(frozen=True)
class Roster(ArrayPayload):
    """The sampled clients and their keys: 40·n bytes down, 136·n with identities.

    The clients are ascending. With an identity of any client all keys have 128 bytes,
    filled up with zeros.
    """

    ids: Annotated[Tensor, torch.int64, "N", check_ascending]
    keys: Annotated[Tensor, torch.uint8, "N", KEY_WIDTHS]
    records = ("secure-roster",)


@dataclass(frozen=True)
class Offer(ArrayPayload):
    """Mask key of a client and the shares of its secrets: 48 + 158·n bytes up.

    ``sealed`` has one row encrypted to each client of the roster: shares of seed and mask
    key, and the public mask key. By the digests the server detects a wrong share or seed.
    """

    mask_key: Annotated[Tensor, torch.uint8, KEY_BYTES]
    seed_digest: Annotated[Tensor, torch.uint8, DIGEST_BYTES]
    sealed: Annotated[Tensor, torch.uint8, "N", SEALED_BYTES]
    digests: Annotated[Tensor, torch.uint8, "N", 2, DIGEST_BYTES]
    records = ("secure-offer",)


@dataclass(frozen=True)
class Peers(ArrayPayload):
    """Clients that sent shares, and their shares for the receiver: 134·m bytes down."""

    ids: Annotated[Tensor, torch.int64, "N", check_ascending]
    sealed: Annotated[Tensor, torch.uint8, "N", SEALED_BYTES]
    records = ("secure-peers",)


@dataclass(frozen=True)
class MaskedUpload(ArrayPayload):
    """A masked vector: 8·L bytes up for L numbers modulo 2^64, one of them the witness."""

    vector: Annotated[Tensor, torch.int64, "N"]
    records = ("secure-sum",)


@dataclass(frozen=True)
class Survivors(ArrayPayload):
    """The clients whose masked vectors are in the sum: 8·s bytes down."""

    ids: Annotated[Tensor, torch.int64, "N", check_ascending]
    records = ("secure-survivors",)


@dataclass(frozen=True)
class Tags(ArrayPayload):
    """Authentication codes of what a client has seen, one per survivor: 16·s bytes up."""

    tags: Annotated[Tensor, torch.uint8, "N", TAG_BYTES]
    records = ("secure-tags",)


@dataclass(frozen=True)
class Confirmations(ArrayPayload):
    """The codes that the c clients ``ids`` made for the receiver: 24·c bytes down."""

    ids: Annotated[Tensor, torch.int64, "N", check_ascending]
    tags: Annotated[Tensor, torch.uint8, "N", TAG_BYTES]
    records = ("secure-confirmations",)


@dataclass(frozen=True)
class Reveal(ArrayPayload):
    """One share per client of :class:`Peers`: 33·m bytes up.

    It is of the seed for clients in the sum, of the mask key for clients that dropped out.
    """

    shares: Annotated[Tensor, torch.uint8, "N", SHARE_BYTES]
    records = ("secure-reveal",)
