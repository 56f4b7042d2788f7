"""Payload of FedKD: the student's weights, matrices as truncated factors."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.algorithms.fedkd import PARTS, restore
from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import Payload, Shapes, read_tensors, write_tensors

__all__ = ["FactoredWeights"]


@dataclass(frozen=True)
class FactoredWeights(Payload):
    """Weights of a model: 4·r(m + n + 1) bytes for an (m, n) matrix of rank r.

    A matrix whose factors would not be smaller is sent whole, as all vectors are: 4 bytes
    per number. ``factors`` are those of :func:`flower_fgl.algorithms.fedkd.compress`.
    """

    factors: Mapping[str, Tensor]
    records = ("weights",)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The weights by parameter name, multiplied out."""
        return restore(self.factors)

    def to_record(self) -> RecordDict:
        """Pack into the record ``weights``."""
        return RecordDict({"weights": write_tensors(self.factors)})

    @classmethod
    def from_record(cls, content: RecordDict, spec: Shapes) -> Self:
        """Unpack and check; ``spec`` holds the shapes of the whole weights."""
        found = read_tensors(content, "weights")
        kept: dict[str, Tensor] = {}
        for name, shape in spec.items():
            names = [name] if name in found else [f"{name}/{part}" for part in PARTS]
            missing = [n for n in names if n not in found]
            if missing:
                raise PayloadError(
                    f'Record "weights" must have "{name}" or its factors; missing: '
                    f"{missing}."
                )
            parts = [found.pop(n) for n in names]
            expected: list[tuple[int, ...]] = [tuple(shape)]
            if len(parts) > 1:
                rank = parts[1].numel()
                if len(shape) != 2 or not 1 <= rank <= min(shape):
                    raise PayloadError(
                        f'"weights/{name}" of shape {tuple(shape)} cannot have {rank} '
                        "singular values."
                    )
                expected = [(shape[0], rank), (rank,), (rank, shape[1])]
            shapes = [tuple(part.shape) for part in parts]
            if shapes != expected:
                raise PayloadError(
                    f'"weights/{name}" must have arrays of shapes {expected}, got '
                    f"{shapes}."
                )
            kept |= dict(zip(names, parts, strict=True))
        if found:
            raise PayloadError(
                f'Record "weights" has unexpected entries {sorted(found)}.'
            )
        return cls(kept)

    @property
    def num_bytes(self) -> int:
        """4 bytes per number."""
        return 4 * sum(tensor.numel() for tensor in self.factors.values())
