"""Upload of FedNH: weights of the body, and class means with their counts.

Dai et al., "Tackling Data Heterogeneity in Federated Learning with Class Prototypes",
AAAI 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from flwr.app import RecordDict

from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.prototypes import LocalPrototypes

__all__ = ["ModelAndMeans"]


@dataclass(frozen=True)
class ModelAndMeans(Weights):
    """Weights and counted class means: 4·(P + M·(p + 1)) bytes for M means.

    Parameters
    ----------
    tensors : mapping of str to Tensor, float32
        Weights of the body and the scale, by parameter name.
    means : LocalPrototypes
        Means of the classes (C, 1, p), with the number of nodes behind each.
    """

    means: LocalPrototypes
    records = (*Weights.records, *LocalPrototypes.records)

    def to_record(self) -> RecordDict:
        """Pack into the records ``weights`` and ``prototypes``."""
        return RecordDict({**super().to_record(), **self.means.to_record()})

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any) -> Self:
        """Unpack; ``spec`` = (shapes of the weights, expected means)."""
        shapes, table = spec
        weights = Weights.from_record(content, shapes)
        return cls(weights.tensors, LocalPrototypes.from_record(content, table))

    @property
    def num_bytes(self) -> int:
        """4·(P + M·(p + 1))."""
        return super().num_bytes + self.means.num_bytes
