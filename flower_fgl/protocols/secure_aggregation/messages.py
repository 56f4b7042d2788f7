"""What crosses the wire for secure aggregation; everything is of fixed size.

Letters: n clients asked, m of them sent shares, s of them are in the sum, L numbers summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import (
    Payload,
    check_tensor,
    read_tensors,
    write_tensors,
)
from flower_fgl.protocols.secure_aggregation.keys import (
    DIGEST_BYTES,
    KEY_BYTES,
    SEAL_BYTES,
)
from flower_fgl.protocols.secure_aggregation.shamir import SHARE_BYTES

__all__ = [
    "KEYS",
    "SEALED_BYTES",
    "SHARES",
    "UNMASK",
    "MaskedUpload",
    "Offer",
    "Peers",
    "PublicKey",
    "Reveal",
    "Roster",
    "Survivors",
    "from_bytes",
    "to_bytes",
]

KEYS = "secure_keys"
"""Action by which owners of graphs, once they have a number, are asked for their key."""
SHARES = "secure_shares"
"""Action of the exchange in which shares are sent."""
UNMASK = "secure_unmask"
"""Action of the exchange in which shares are revealed."""
SEALED_BYTES = 2 * SHARE_BYTES + SEAL_BYTES
"""A share of the seed and one of the mask key, sealed."""

Field = tuple[tuple[int, ...], torch.dtype]


def from_bytes(rows: list[bytes]) -> Tensor:
    """Stack byte strings of one length into a uint8 tensor of shape (rows, length)."""
    flat = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
    return flat.reshape(len(rows), -1)


def to_bytes(row: Tensor) -> bytes:
    """Return the bytes of a uint8 tensor."""
    return bytes(row.numpy().tobytes())


class _Arrays(Payload):
    """A payload whose fields are tensors in one array record."""

    record: ClassVar[str]

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return dict(vars(self))

    @classmethod
    def _fields(cls, spec: Any, tensors: Mapping[str, Tensor]) -> dict[str, Field]:
        """Return shape and type that each field must have."""
        raise NotImplementedError

    def to_record(self) -> RecordDict:
        """Pack into one record."""
        return RecordDict({self.record: write_tensors(self._tensors)})

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any = None) -> Self:
        """Unpack, checking names, shapes and types.

        Raises
        ------
        PayloadError
            If the record or an entry is missing, unexpected or malformed, or
            partition-ids are not ascending.
        """
        tensors = read_tensors(content, cls.record, is_checked=False)
        names = list(cls.__dataclass_fields__)  # type: ignore[attr-defined]
        if set(names) != set(tensors):
            raise PayloadError(
                f'Record "{cls.record}" must have exactly the entries {names}, '
                f"got {sorted(tensors)}."
            )
        for name, (shape, dtype) in cls._fields(spec, tensors).items():
            check_tensor(
                f"{cls.record}/{name}", tensors[name], shape=shape, dtype=dtype
            )
        if "ids" in tensors and not (tensors["ids"].diff() > 0).all():
            raise PayloadError(f'"{cls.record}/ids" must ascend.')
        return cls(**tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all fields."""
        return sum(t.numel() * t.element_size() for t in self._tensors.values())


@dataclass(frozen=True)
class PublicKey(_Arrays):
    """The key of a run to which shares are sealed.

    Parameters
    ----------
    bytes_ : Tensor of shape (32,), uint8
    """

    bytes_: Tensor
    record = "secure-key"
    records = (record,)

    @property
    def key(self) -> bytes:
        """The key as bytes."""
        return to_bytes(self.bytes_)

    @classmethod
    def of(cls, key: bytes) -> Self:
        """Wrap a key."""
        return cls(from_bytes([key])[0])

    @classmethod
    def _fields(cls, spec: Any, tensors: Mapping[str, Tensor]) -> dict[str, Field]:
        return {"bytes_": ((KEY_BYTES,), torch.uint8)}


@dataclass(frozen=True)
class Roster(_Arrays):
    """Who is asked, with the keys that seal shares: 40·n bytes down.

    Parameters
    ----------
    ids : Tensor of shape (n,), int64
        Partition-ids, ascending.
    keys : Tensor of shape (n, 32), uint8
        Their public keys of the describe exchange.
    """

    ids: Tensor
    keys: Tensor
    record = "secure-roster"
    records = (record,)

    @classmethod
    def _fields(cls, spec: Any, tensors: Mapping[str, Tensor]) -> dict[str, Field]:
        count = tensors["ids"].numel()
        return {
            "ids": ((count,), torch.int64),
            "keys": ((count, KEY_BYTES), torch.uint8),
        }


@dataclass(frozen=True)
class Offer(_Arrays):
    """A client's mask key and the shares of its secrets: 48 + 126·n bytes up.

    Parameters
    ----------
    mask_key : Tensor of shape (32,), uint8
        Public key of this round's pairwise masks.
    seed_digest : Tensor of shape (16,), uint8
        Digest of the seed of its own mask.
    sealed : Tensor of shape (n, 94), uint8
        Shares of seed and mask key, one row sealed to each client of the roster.
    digests : Tensor of shape (n, 2, 16), uint8
        Digests of both shares, by which the server recognises a wrong one.
    """

    mask_key: Tensor
    seed_digest: Tensor
    sealed: Tensor
    digests: Tensor
    record = "secure-offer"
    records = (record,)

    @classmethod
    def _fields(cls, spec: int, tensors: Mapping[str, Tensor]) -> dict[str, Field]:
        return {
            "mask_key": ((KEY_BYTES,), torch.uint8),
            "seed_digest": ((DIGEST_BYTES,), torch.uint8),
            "sealed": ((spec, SEALED_BYTES), torch.uint8),
            "digests": ((spec, 2, DIGEST_BYTES), torch.uint8),
        }


@dataclass(frozen=True)
class Peers(_Arrays):
    """With whom to mask, and the shares to keep for them: 134·m bytes down.

    Parameters
    ----------
    ids : Tensor of shape (m,), int64
        Clients that sent shares, ascending.
    mask_keys : Tensor of shape (m, 32), uint8
        Their mask keys.
    sealed : Tensor of shape (m, 94), uint8
        What each of them sealed to the receiver.
    """

    ids: Tensor
    mask_keys: Tensor
    sealed: Tensor
    record = "secure-peers"
    records = (record,)

    @classmethod
    def _fields(cls, spec: Any, tensors: Mapping[str, Tensor]) -> dict[str, Field]:
        count = tensors["ids"].numel()
        return {
            "ids": ((count,), torch.int64),
            "mask_keys": ((count, KEY_BYTES), torch.uint8),
            "sealed": ((count, SEALED_BYTES), torch.uint8),
        }


@dataclass(frozen=True)
class MaskedUpload(_Arrays):
    """A masked vector: 8·L bytes up for the L numbers summed, one of them the witness.

    Parameters
    ----------
    vector : Tensor of shape (L,), int64
        Integers modulo 2^64, uniformly distributed to whoever knows no mask.
    """

    vector: Tensor
    record = "secure-sum"
    records = (record,)

    @classmethod
    def _fields(cls, spec: int, tensors: Mapping[str, Tensor]) -> dict[str, Field]:
        return {"vector": ((spec,), torch.int64)}


@dataclass(frozen=True)
class Survivors(_Arrays):
    """Who is in the sum: 8·s bytes down.

    Parameters
    ----------
    ids : Tensor of shape (s,), int64
        Clients whose masked vector came, ascending.
    """

    ids: Tensor
    record = "secure-survivors"
    records = (record,)

    @classmethod
    def _fields(cls, spec: Any, tensors: Mapping[str, Tensor]) -> dict[str, Field]:
        return {"ids": ((tensors["ids"].numel(),), torch.int64)}


@dataclass(frozen=True)
class Reveal(_Arrays):
    """One share for each client that sent shares, of one secret only: 33·m bytes up.

    Parameters
    ----------
    shares : Tensor of shape (m, 33), uint8
        In the order of the clients of :class:`Peers`: of the seed of those in the sum, of
        the mask key of those that were lost. 255 throughout where it could not be opened.
    """

    shares: Tensor
    record = "secure-reveal"
    records = (record,)

    @classmethod
    def _fields(cls, spec: int, tensors: Mapping[str, Tensor]) -> dict[str, Field]:
        return {"shares": ((spec, SHARE_BYTES), torch.uint8)}
