"""Upload of FedNH: weights of the body, and class means with their counts."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.prototypes import LocalPrototypes

__all__ = ["ModelAndMeans"]


@dataclass(frozen=True)
class ModelAndMeans(Weights):
    """Weights of body and scale, and counted class means: 4·(P + M·(p + 1)) bytes.

    The M means are of shape (C, 1, p).
    """

    means: LocalPrototypes
    records = (*Weights.records, *LocalPrototypes.records)
    parts = MappingProxyType({"prototypes": LocalPrototypes})
