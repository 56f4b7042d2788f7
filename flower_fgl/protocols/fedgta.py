"""Upload of FedGTA: weights, moments of the propagated labels, and a confidence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from flower_fgl.protocols.fedavg import DescribedWeights

__all__ = ["MomentWeights"]


@dataclass(frozen=True)
class MomentWeights(DescribedWeights):
    """Weights, moments and confidence: 4·(P + 2nC + 1) bytes for n orders.

    With raw or central moments alone the bytes are 4·(P + nC + 1). The descriptor holds
    ``moments`` (2n, C) and ``confidence`` (1,).
    """

    def withhold(self, shared: Tensor, min_count: int) -> Self:
        """Set the moments of classes that are not shared to 0.

        A node's labels sum to 1, so the moments of a single class would follow from the
        others: the next class is then withheld too.
        """
        if int((~shared).sum()) == 1:
            shared = shared & shared.roll(1)
        kept = self.descriptor["moments"] * shared
        return replace(self, descriptor={**self.descriptor, "moments": kept})

    def in_range(self) -> Self:
        """Clamp a noisy confidence to at least 0."""
        kept = self.descriptor["confidence"].clamp(min=0)
        return replace(self, descriptor={**self.descriptor, "confidence": kept})
