"""Payload of FGGP: weights and prototypes, in both directions."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.prototypes import Prototypes

__all__ = ["ModelAndPrototypes"]


@dataclass(frozen=True)
class ModelAndPrototypes(Weights):
    """A model and class prototypes: 4·(P + M·p) bytes.

    An upload has one prototype per class (C, 1, p), M ≤ C; a download one per cluster of
    a class (C, K, p), for K clients.
    """

    prototypes: Prototypes
    records = (*Weights.records, *Prototypes.records)
    parts = MappingProxyType({"prototypes": Prototypes})
