"""Upload of FedTAD: weights, and the reliability of every class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from flower_fgl.protocols.fedavg import DescribedWeights

__all__ = ["ReliableWeights"]


@dataclass(frozen=True)
class ReliableWeights(DescribedWeights):
    """Weights and class reliabilities: 4·(P + C) bytes.

    The descriptor holds ``reliability`` (C,), 0 for classes without training nodes.
    """

    def withhold(self, shared: Tensor, min_count: int) -> Self:
        """Set the reliability of classes that are not shared to 0."""
        kept = self.descriptor["reliability"] * shared
        return replace(self, descriptor={"reliability": kept})

    def in_range(self) -> Self:
        """Clamp noisy reliabilities to at least 0."""
        kept = self.descriptor["reliability"].clamp(min=0)
        return replace(self, descriptor={"reliability": kept})
