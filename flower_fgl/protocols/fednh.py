"""Upload of FedNH: weights of the body, and class means with their counts.

Dai et al., "Tackling Data Heterogeneity in Federated Learning with Class Prototypes",
AAAI 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

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
    parts = MappingProxyType({"prototypes": LocalPrototypes})
