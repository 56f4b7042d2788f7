"""Payload of FGGP: weights and prototypes, in both directions.

Wan, Huang and Ye, "Federated Graph Learning under Domain Shift with Generalizable
Prototypes", AAAI 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

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
    parts = MappingProxyType({"prototypes": Prototypes})
