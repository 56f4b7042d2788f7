"""Payloads of pFedFSL: models of other clients down, a model and losses up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import Shapes, TensorPayload, read_tensors

__all__ = ["CandidateModels", "ScoredModel"]

MODELS_RECORD, WEIGHTS, LOSSES = "models", "weights", "losses"


@dataclass(frozen=True)
class CandidateModels(TensorPayload):
    """A client's initial model, and m candidates after it: 4·P·(1 + m) bytes."""

    tensors: Mapping[str, Tensor]
    records = (MODELS_RECORD,)

    @classmethod
    def from_record(cls, content: RecordDict, spec: tuple[Shapes, int]) -> Self:
        """Unpack; ``spec`` = (shapes of one model, largest number of candidates q)."""
        shapes, limit = spec
        tensors = read_tensors(content, MODELS_RECORD)
        if set(tensors) != set(shapes):
            odd = sorted(set(tensors) ^ set(shapes))
            raise PayloadError(
                f'Record "{MODELS_RECORD}": missing or unexpected entries {odd}.'
            )
        counts = {len(tensor) if tensor.dim() else 0 for tensor in tensors.values()}
        number = counts.pop()
        if counts or not 1 <= number <= 1 + limit:
            raise PayloadError(
                f'Record "{MODELS_RECORD}" must hold 1 to {1 + limit} models, the same '
                f"number of each tensor, got {sorted({number, *counts})}."
            )
        for name, shape in shapes.items():
            if tuple(tensors[name].shape) != (number, *shape):
                raise PayloadError(
                    f'"{MODELS_RECORD}/{name}" must have shape {(number, *shape)}, got '
                    f"{tuple(tensors[name].shape)}."
                )
        return cls({name: tensors[name] for name in shapes})

    def model(self, number: int) -> dict[str, Tensor]:
        """Return the weights of one model; 0 is the initial model."""
        return {name: tensor[number] for name, tensor in self.tensors.items()}

    @property
    def num_candidates(self) -> int:
        """Number of candidates m."""
        return len(next(iter(self.tensors.values()))) - 1


@dataclass(frozen=True)
class ScoredModel(TensorPayload):
    """A trained model, and the losses of it and of m candidates: 4·(P + 1 + m) bytes.

    The losses are those on the client's training nodes.
    """

    tensors: Mapping[str, Tensor]
    losses: Tensor
    records = (WEIGHTS, LOSSES)
