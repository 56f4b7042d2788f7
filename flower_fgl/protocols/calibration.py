"""Payloads of the exchange after the last round that calibrates the aggregated model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import (
    LARGEST,
    Shapes,
    TensorPayload,
    check_tensor,
    read_tensors,
    write_tensors,
)
from flower_fgl.protocols.secure_aggregation.additive import AdditivePayload

__all__ = ["CALIBRATE", "CalibrationSums", "FinalModel"]

CALIBRATE = "calibrate"
"""Query action: receive the aggregated model, and send sums over the validation items."""


@dataclass(frozen=True)
class FinalModel(TensorPayload):
    """Weights of the aggregated model: 4·P bytes for P numbers."""

    weights: Mapping[str, Tensor]
    records = ("global",)


@dataclass(frozen=True)
class CalibrationSums(AdditivePayload):
    """Sums over a client's validation items, see ``algorithms/calibration.py``.

    Of classes 65 temperatures times 1 loss, 1 Brier score, 45 numbers of a reliability
    diagram and 512 counts of conformal scores: 290,688 bytes; of labels without the
    counts 24,448 bytes; of T numbers 8 + 2,576·T bytes. A client whose floors withhold
    numbers sends zeros.
    """

    sums: Mapping[str, Tensor]
    records = ("calibration",)

    def to_record(self) -> RecordDict:
        """Pack into the record ``calibration``."""
        return RecordDict({self.records[0]: write_tensors(self.sums)})

    @classmethod
    def from_record(cls, content: RecordDict, spec: tuple[Shapes, int]) -> Self:
        """Unpack; ``spec`` has the shapes, and the number of validation items described.

        Sums must be positive, and counts not above the number of items.
        """
        shapes, most = spec
        found = read_tensors(content, cls.records[0], shapes, is_checked=False)
        for name, tensor in found.items():
            where = f"{cls.records[0]}/{name}"
            check_tensor(where, tensor, shape=shapes[name], dtype=torch.float64)
            limit = LARGEST if name == "nll" else most
            if bool((tensor < 0).any()) or bool((tensor > limit).any()):
                raise PayloadError(f'"{where}" must lie from 0 to {limit:g}.')
        return cls(found)

    def summands(self, weight: float) -> Mapping[str, Tensor]:
        """Return the sums; ``weight`` does not count."""
        return self.sums

    @classmethod
    def summand_shapes(cls, spec: tuple[Shapes, int]) -> Shapes:
        """Return the shapes of the sums."""
        return spec[0]

    @property
    def num_bytes(self) -> int:
        """8 bytes per number."""
        return sum(tensor.nbytes for tensor in self.sums.values())
