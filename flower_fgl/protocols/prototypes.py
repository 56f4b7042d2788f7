"""Payloads of class prototypes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import Payload, check_tensor

__all__ = ["LocalPrototypes", "Prototypes", "no_prototypes"]

RECORD = "prototypes"
VALUES = "values"
PRESENT = "present"
COUNTS = "counts"

LARGEST = 1e15
"""Largest accepted number. Squares of larger ones can overflow float32, and a single one
would make the server's prototypes, and then those of all clients, NaN permanently."""

Table = tuple[int, int, int]
"""Expected number of classes C, hops H and width p of a payload."""


@dataclass(frozen=True)
class Prototypes(Payload):
    """Prototypes of some classes and hops: 4·M·p bytes for M prototypes.

    Missing prototypes are not sent. A bitmap marks those that are present, ⌈C·H/8⌉ bytes
    of record overhead.

    Parameters
    ----------
    values : Tensor of shape (C, H, p), float32
        Zero where missing.
    present : Tensor of shape (C, H), bool
        True where there is a prototype.
    """

    values: Tensor
    present: Tensor
    records = (RECORD,)

    def to_record(self) -> RecordDict:
        """Pack into the record ``prototypes``."""
        bits = np.packbits(self.present.cpu().numpy().reshape(-1))
        kept = self.values.detach().cpu()[self.present.cpu()].numpy()
        record = ArrayRecord({VALUES: Array(kept), PRESENT: Array(bits)})
        return RecordDict({RECORD: record})

    @classmethod
    def from_record(cls, content: RecordDict, spec: Table) -> Self:
        """Unpack; ``spec`` = (C, H, p).

        Raises
        ------
        PayloadError
            If an array is missing or unexpected, or has the wrong type or shape; if a
            number is not finite or above ``LARGEST``.
        """
        return cls(*_read(_record(content, [VALUES, PRESENT]), spec))

    def withhold(self, shared: Tensor, min_count: int) -> Self:
        """Remove classes that are not shared."""
        kept = shared[:, None] & self.present
        return replace(self, values=self.values * kept[..., None], present=kept)

    @property
    def num_bytes(self) -> int:
        """4·M·p."""
        return 4 * int(self.present.sum()) * self.values.shape[-1]


@dataclass(frozen=True)
class LocalPrototypes(Payload):
    """Prototypes of a client with their counts: 4·M·(p + 1) bytes for M prototypes.

    Parameters
    ----------
    values : Tensor of shape (C, H, p), float32
        Zero where missing.
    counts : Tensor of shape (C, H), int64
        Number of nodes of each prototype, below 2³¹; 0 marks a missing one.
    """

    values: Tensor
    counts: Tensor
    records = (RECORD,)

    def to_record(self) -> RecordDict:
        """Pack into the record ``prototypes``, counts as int32."""
        present = self.counts > 0
        content = Prototypes(self.values, present).to_record()
        kept = self.counts[present].to(torch.int32).cpu().numpy()
        record = content.array_records[RECORD]
        return RecordDict({RECORD: ArrayRecord({**record, COUNTS: Array(kept)})})

    @classmethod
    def from_record(cls, content: RecordDict, spec: Table) -> Self:
        """Unpack; ``spec`` = (C, H, p).

        Raises
        ------
        PayloadError
            If an array is missing or unexpected, or has the wrong type or shape; if a
            number is not finite or above ``LARGEST``, or a count is not positive.
        """
        record = _record(content, [VALUES, PRESENT, COUNTS])
        values, present = _read(record, spec)
        number = int(present.sum())
        kept = check_tensor(
            f"{RECORD}/{COUNTS}",
            _tensor(record, COUNTS),
            shape=(number,),
            dtype=torch.int32,
        )
        if number and int(kept.min()) < 1:
            raise PayloadError(
                f'"{RECORD}/{COUNTS}" must be positive, got {int(kept.min())}.'
            )
        counts = torch.zeros(spec[:2], dtype=torch.int64)
        counts[present] = kept.long()
        return cls(values, counts)

    def withhold(self, shared: Tensor, min_count: int) -> Self:
        """Remove classes that are not shared, and prototypes of too few nodes."""
        kept = shared[:, None] & (self.counts >= min_count)
        return replace(
            self, values=self.values * kept[..., None], counts=self.counts * kept
        )

    @property
    def num_bytes(self) -> int:
        """4·M·(p + 1)."""
        return 4 * int((self.counts > 0).sum()) * (self.values.shape[-1] + 1)


def no_prototypes(table: Table) -> Prototypes:
    """Return a payload without any prototype: 0 bytes."""
    return Prototypes(torch.zeros(table), torch.zeros(table[:2], dtype=torch.bool))


def _record(content: RecordDict, names: list[str]) -> ArrayRecord:
    """Return the record ``prototypes``; it must have exactly the entries ``names``."""
    record = content.array_records.get(RECORD)
    if record is None:
        raise PayloadError(
            f'The message has no array record "{RECORD}", only {sorted(content)}.'
        )
    if set(record) != set(names):
        raise PayloadError(
            f'Record "{RECORD}" must have exactly the entries {sorted(names)}, '
            f"got {sorted(record)}."
        )
    return record


def _tensor(record: ArrayRecord, name: str) -> Tensor:
    """Read one array without pickle into a tensor that owns its memory."""
    try:
        return torch.from_numpy(record[name].numpy().copy())
    except (ValueError, TypeError, OSError, EOFError, AttributeError) as error:
        raise PayloadError(
            f'"{RECORD}/{name}" holds no plain array: {error}.'
        ) from error


def _read(record: ArrayRecord, table: Table) -> tuple[Tensor, Tensor]:
    """Read ``values`` (C, H, p) and ``present`` (C, H)."""
    classes, hops, width = table
    size = classes * hops
    bits = check_tensor(
        f"{RECORD}/{PRESENT}",
        _tensor(record, PRESENT),
        shape=(-(-size // 8),),
        dtype=torch.uint8,
    )
    flat = np.unpackbits(bits.numpy())
    if flat[size:].any():
        raise PayloadError(
            f'"{RECORD}/{PRESENT}" marks prototypes beyond the {classes} classes and '
            f"{hops} hops agreed on."
        )
    present = torch.from_numpy(flat[:size].astype(bool)).view(classes, hops)
    kept = check_tensor(
        f"{RECORD}/{VALUES}",
        _tensor(record, VALUES),
        shape=(int(present.sum()), width),
    )
    largest = float(kept.abs().max()) if kept.numel() else 0.0
    if largest > LARGEST:
        raise PayloadError(
            f'"{RECORD}/{VALUES}" has a number of size {largest:.2g}, expected '
            f"{LARGEST:.0e} at most. Training diverged: use a smaller learning rate."
        )
    values = torch.zeros(table)
    values[present] = kept
    return values, present
