"""Payloads of class prototypes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.core.flower_internals import plain_content
from flower_fgl.protocols.base import (
    PRESENT,
    Payload,
    check_tensor,
    pack_bits,
    read_tensors,
    unpack_bits,
    write_tensors,
)

__all__ = ["CountedTable", "LocalPrototypes", "Prototypes", "no_prototypes"]

RECORD = "prototypes"
VALUES = "values"
COUNTS = "counts"

Table = tuple[int, int, int]
"""Expected number of classes C, hops H and width p of a payload."""


class CountedTable(NamedTuple):
    """Expected content of :class:`LocalPrototypes`: (C, H, p), and nodes of the client.

    Each of the ``most`` nodes (or graphs) that the client described stands behind at most
    one prototype of a hop.
    """

    table: Table
    most: int


@dataclass(frozen=True)
class Prototypes(Payload):
    """Prototypes of some classes and hops: 4·M·p bytes for M prototypes.

    Missing prototypes are not sent. A bitmap marks those that are present, ⌈C·H/8⌉ bytes
    of record overhead. ``values`` (C, H, p) are zero where ``present`` (C, H) is not.
    """

    values: Tensor
    present: Tensor
    records = (RECORD,)

    def to_record(self) -> RecordDict:
        """Pack into the record ``prototypes``."""
        return RecordDict({RECORD: write_tensors(_packed(self.values, self.present))})

    @classmethod
    def from_record(cls, content: RecordDict, spec: Table) -> Self:
        """Unpack; ``spec`` = (C, H, p)."""
        return cls(*_read(_arrays(content, VALUES, PRESENT), spec))

    def withhold(self, shared: Tensor, min_count: int) -> Self:
        """Remove classes that are not shared."""
        kept = shared[:, None] & self.present
        return replace(self, values=self.values * kept[..., None], present=kept)


@dataclass(frozen=True)
class LocalPrototypes(Payload):
    """Prototypes of a client with their counts: 4·M·(p + 1) bytes for M prototypes.

    ``counts`` (C, H), int64, is the number of nodes of each prototype, below 2³¹; 0 marks
    a missing one, whose ``values`` (C, H, p) are zero.
    """

    values: Tensor
    counts: Tensor
    records = (RECORD,)

    def to_record(self) -> RecordDict:
        """Pack into the record ``prototypes``, counts as int32."""
        present = self.counts > 0
        tensors = _packed(self.values, present)
        tensors[COUNTS] = self.counts[present].to(torch.int32)
        return RecordDict({RECORD: write_tensors(tensors)})

    @classmethod
    def from_record(cls, content: RecordDict, spec: CountedTable) -> Self:
        """Unpack; the counts must not exceed what the client described."""
        tensors = _arrays(content, VALUES, PRESENT, COUNTS)
        values, present = _read(tensors, spec.table)
        marked = present.numpy()
        number = int(marked.sum())
        kept = check_tensor(
            f"{RECORD}/{COUNTS}", tensors[COUNTS], shape=(number,), dtype=torch.int32
        ).numpy()
        if number and int(kept.min()) < 1:
            raise PayloadError(
                f'"{RECORD}/{COUNTS}" must be positive, got {int(kept.min())}.'
            )
        counts = np.zeros(spec.table[:2], dtype=np.int64)
        counts[marked] = kept
        largest = int(counts.sum(axis=0).max(initial=0))
        if largest > spec.most:
            raise PayloadError(
                f'"{RECORD}/{COUNTS}" adds up to {largest} nodes in a hop, but the client '
                f"described {spec.most}."
            )
        return cls(values, torch.from_numpy(counts))

    @staticmethod
    def stacked_records(values: Tensor, counts: Tensor) -> list[RecordDict]:
        """Pack prototypes (K, C, H, p) as :meth:`to_record` packs those of a client."""
        present = counts > 0
        number = present.flatten(1).sum(1).tolist()
        bits = torch.from_numpy(np.packbits(present.flatten(1).numpy(), axis=1))
        parts = zip(
            torch.split(values.detach()[present], number),
            bits,
            torch.split(counts[present].to(torch.int32), number),
            strict=True,
        )
        names = (VALUES, PRESENT, COUNTS)
        return [
            plain_content({RECORD: write_tensors(dict(zip(names, part, strict=True)))})
            for part in parts
        ]

    @staticmethod
    def stack(payloads: Iterable[LocalPrototypes]) -> tuple[Tensor, Tensor]:
        """Stack the values (K, C, H, p) and the counts (K, C, H) of K clients."""
        pairs = [(one.values, one.counts) for one in payloads]
        values, counts = zip(*pairs, strict=True)
        return torch.stack(values), torch.stack(counts)

    def withhold(self, shared: Tensor, min_count: int) -> Self:
        """Remove classes that are not shared, and prototypes of too few nodes."""
        kept = shared[:, None] & (self.counts >= min_count)
        return replace(
            self, values=self.values * kept[..., None], counts=self.counts * kept
        )


def no_prototypes(table: Table) -> Prototypes:
    """Return a payload without any prototype: 0 bytes."""
    return Prototypes(torch.zeros(table), torch.zeros(table[:2], dtype=torch.bool))


def _packed(values: Tensor, present: Tensor) -> dict[str, Tensor]:
    """Return the prototypes that are present, and the bitmap that marks them."""
    marked = present.cpu().numpy()
    kept = torch.from_numpy(values.detach().cpu().numpy()[marked])
    return {VALUES: kept, PRESENT: pack_bits(present)}


def _arrays(content: RecordDict, *names: str) -> dict[str, Tensor]:
    """Read the record ``prototypes``; it must have exactly the entries ``names``."""
    return read_tensors(content, RECORD, dict.fromkeys(names, ()), is_checked=False)


def _read(tensors: Mapping[str, Tensor], table: Table) -> tuple[Tensor, Tensor]:
    """Read ``values`` (C, H, p) and ``present`` (C, H)."""
    classes, hops, width = table
    bits = unpack_bits(f"{RECORD}/{PRESENT}", tensors[PRESENT], classes * hops)
    # numpy selects a few rows in a fraction of torch's time
    marked = bits.numpy()
    shape = (int(marked.sum()), width)
    kept = check_tensor(f"{RECORD}/{VALUES}", tensors[VALUES], shape=shape)
    values = np.zeros((classes * hops, width), dtype=np.float32)
    values[marked] = kept.numpy()
    return torch.from_numpy(values).view(table), bits.view(classes, hops)
