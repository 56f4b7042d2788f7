"""Payload of FGGP: weights and prototypes, in both directions.

Wan, Huang and Ye, "Federated Graph Learning under Domain Shift with Generalizable
Prototypes", AAAI 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from flwr.app import RecordDict

from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.prototypes import Prototypes

__all__ = ["ModelAndPrototypes"]


@dataclass(frozen=True)
class ModelAndPrototypes(Weights):
    """A model and class prototypes: 4·(P + M·p) bytes.

    An upload has one prototype per class, M ≤ C; a download one per cluster of a class.

    Parameters
    ----------
    tensors : mapping of str to Tensor, float32
        State of the model, by parameter name.
    prototypes : Prototypes
        Prototypes of the classes (C, 1, p), or of the clusters (C, K, p) for K clients.
    """

    prototypes: Prototypes
    records = (*Weights.records, *Prototypes.records)

    def to_record(self) -> RecordDict:
        """Pack into the records ``weights`` and ``prototypes``."""
        both = {**super().to_record(), **self.prototypes.to_record()}
        return RecordDict(both)

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any) -> Self:
        """Unpack; ``spec`` = (shapes of the weights, table of the prototypes)."""
        shapes, table = spec
        weights = Weights.from_record(content, shapes)
        return cls(weights.tensors, Prototypes.from_record(content, table))

    @property
    def num_bytes(self) -> int:
        """4·(P + M·p)."""
        return super().num_bytes + self.prototypes.num_bytes
