"""Payloads of the exchanges outside the rounds: the scale of numbers, and the calibration.

Before round 1 each client that predicts numbers sends the moments of its training values of
each target. All later messages to it carry the common scale, so that it need not store it.
Errors name no value: the server logs them. After the last round the aggregated model may be
calibrated by sums over the validation items of all clients.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.core.target_scale import Moments, TargetScale
from flower_fgl.protocols.base import (
    LARGEST,
    Payload,
    Shapes,
    TensorPayload,
    config_record,
)
from flower_fgl.protocols.secure_aggregation.additive import AdditivePayload

__all__ = ["CALIBRATE", "SCALE", "STATISTICS", "TARGETS", "AgreedScale"]
__all__ += ["CalibrationSums", "FinalModel", "TargetStatistics"]

TARGETS = "targets"
"""Action of the query with which clients report their statistics."""
STATISTICS = "target-statistics"
"""Name of the record with a client's statistics."""
SCALE = "target-scale"
"""Name of the record with the common scale."""


@dataclass(frozen=True)
class TargetStatistics(Payload):
    """Moments of a client's training values of T targets: 24·T bytes."""

    moments: tuple[Moments, ...]
    records = (STATISTICS,)

    def to_record(self) -> RecordDict:
        """Pack into the record ``target-statistics``."""
        values: dict[str, Any] = {
            name: [getattr(part, name) for part in self.moments]
            for name in ("count", "mean", "m2")
        }
        return RecordDict({STATISTICS: ConfigRecord(values)})

    @classmethod
    def from_record(cls, content: RecordDict, spec: tuple[int, int]) -> Self:
        """Unpack and check; ``spec`` is T and the client's number of training items."""
        width, most = spec
        means, m2s = (_numbers(content, STATISTICS, k, width) for k in ("mean", "m2"))
        counts: Any = config_record(content, STATISTICS).get("count")
        if (
            not isinstance(counts, list)
            or len(counts) != width
            or not all(type(n) is int and 0 <= n <= most for n in counts)
        ):
            raise PayloadError(f'"count" must be {width} integers from 0 to {most}.')
        found = tuple(map(Moments, counts, means, m2s))
        for part in found:
            largest = (part.count > 1) * part.count * LARGEST**2
            if not 0 <= part.m2 <= largest or (part.mean and not part.count):
                raise PayloadError(
                    '"mean" and "m2" cannot be those of as many values as "count".'
                )
        return cls(found)


@dataclass(frozen=True)
class AgreedScale(Payload):
    """Mean and standard deviation of T targets, the same for all clients: 16·T bytes."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    records = (SCALE,)

    @classmethod
    def of(cls, scale: TargetScale) -> Self:
        """Return the payload with a scale."""
        return cls(tuple(scale.mean.tolist()), tuple(scale.std.tolist()))

    def as_scale(self) -> TargetScale:
        """Return the scale of the payload."""
        mean, std = torch.tensor([self.mean, self.std], dtype=torch.float64)
        return TargetScale(mean, std)

    def to_record(self) -> RecordDict:
        """Pack into the record ``target-scale``."""
        values = {"mean": list(self.mean), "std": list(self.std)}
        return RecordDict({SCALE: ConfigRecord(values)})  # type: ignore[arg-type]

    @classmethod
    def from_record(cls, content: RecordDict, spec: int) -> Self:
        """Unpack and check; ``spec`` is T."""
        mean, std = (_numbers(content, SCALE, key, spec) for key in ("mean", "std"))
        if min(std) <= 0:
            raise PayloadError('"std" must be above 0.')
        return cls(mean, std)


def _numbers(
    content: RecordDict, record: str, key: str, width: int
) -> tuple[float, ...]:
    """Read the finite numbers of a record, one per target."""
    values: Any = config_record(content, record).get(key)
    if (
        not isinstance(values, list)
        or len(values) != width
        or not all(type(v) is float and math.isfinite(v) for v in values)
    ):
        raise PayloadError(f'"{key}" must be {width} finite numbers.')
    if key != "m2" and max(map(abs, values)) > LARGEST:
        raise PayloadError(f'"{key}" must lie within ±{LARGEST:g}.')
    return tuple(values)


CALIBRATE = "calibrate"
"""Query action: receive the aggregated model, and send sums over the validation items."""


@dataclass(frozen=True)
class FinalModel(TensorPayload):
    """Weights of the aggregated model: 4·P bytes for P numbers."""

    weights: Mapping[str, Tensor]
    records = ("global",)


@dataclass(frozen=True)
class CalibrationSums(TensorPayload, AdditivePayload):
    """Sums over a client's validation items, see ``algorithms/calibration.py``.

    Of classes 65 temperatures times 1 loss, 1 Brier score, 45 numbers of a reliability
    diagram and 512 counts of conformal scores: 290,688 bytes; of labels without the
    counts 24,448 bytes; of T numbers 8 + 2,576·T bytes. A client whose floors withhold
    numbers sends zeros.
    """

    sums: Mapping[str, Tensor]
    records = ("calibration",)
    types = MappingProxyType({"calibration": torch.float64})

    @classmethod
    def from_record(cls, content: RecordDict, spec: tuple[Shapes, int, int]) -> Self:
        """Unpack by shapes, number of validation items, and labels of one (1: classes).

        Sums must be positive, and counts not above the number of items; the bins of a
        reliability diagram count the labels of all items.
        """
        shapes, most, labels = spec
        found = super().from_record(content, shapes)
        limits = {"nll": LARGEST, "bins": most * labels}
        for name, tensor in found.sums.items():
            limit = limits.get(name, most)
            if bool((tensor < 0).any()) or bool((tensor > limit).any()):
                where = f"{cls.records[0]}/{name}"
                raise PayloadError(f'"{where}" must lie from 0 to {limit:g}.')
        return found

    def summands(self, weight: float) -> Mapping[str, Tensor]:
        """Return the sums; ``weight`` does not count."""
        return self.sums

    @classmethod
    def summand_shapes(cls, spec: tuple[Shapes, int, int]) -> Shapes:
        """Return the shapes of the sums."""
        return spec[0]
