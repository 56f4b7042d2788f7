"""Payloads of pFedFSL: models of other clients down, a model and losses up."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.arrays import read_arrays
from flower_fgl.protocols.base import Shapes, TensorPayload

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
        layout: dict[str, Any] = {
            n: (torch.float32, "m", *s) for n, s in shapes.items()
        }
        found = cls(read_arrays(content, MODELS_RECORD, layout))
        if not 0 <= found.num_candidates <= limit:
            raise PayloadError(
                f'Record "{MODELS_RECORD}" must hold 1 to {1 + limit} models, got '
                f"{1 + found.num_candidates}."
            )
        return found

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
