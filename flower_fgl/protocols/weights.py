"""Payloads of methods that send weights and something else with them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import Shapes, TensorPayload
from flower_fgl.protocols.fedavg import DescribedWeights, Weights
from flower_fgl.protocols.prototypes import LocalPrototypes, Prototypes

__all__ = ["ControlledWeights", "GeneratorDownload", "ModelAndMeans"]
__all__ += ["ModelAndPrototypes", "MomentWeights", "ReliableWeights"]


@dataclass(frozen=True)
class ControlledWeights(TensorPayload):
    """SCAFFOLD and FedDC: weights x and control variate c, of one shape: 8·P bytes."""

    tensors: Mapping[str, Tensor]
    control: Mapping[str, Tensor]
    records = ("weights", "control")


@dataclass(frozen=True)
class ReliableWeights(DescribedWeights):
    """FedTAD: weights and class reliabilities, 4·(P + C) bytes.

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


@dataclass(frozen=True)
class MomentWeights(DescribedWeights):
    """FedGTA: weights, moments and confidence, 4·(P + 2nC + 1) bytes for n orders.

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


@dataclass(frozen=True)
class ModelAndMeans(Weights):
    """FedNH, FedSpray: weights, and counted class means, 4·(P + M·(p + 1)) bytes.

    The M means are of shape (C, 1, p).
    """

    means: LocalPrototypes
    records = (*Weights.records, *LocalPrototypes.records)
    parts = MappingProxyType({"prototypes": LocalPrototypes})


@dataclass(frozen=True)
class ModelAndPrototypes(Weights):
    """FGGP and FPL: a model and class prototypes, 4·(P + M·p) bytes.

    An upload has one prototype per class (C, 1, p), M ≤ C; a download one per cluster of
    a class (C, K, p), for K clients.
    """

    prototypes: Prototypes
    records = (*Weights.records, *Prototypes.records)
    parts = MappingProxyType({"prototypes": Prototypes})


@dataclass(frozen=True)
class GeneratorDownload(TensorPayload):
    """FedGen: weights, generator and class distribution, 4·(P + P_G + C) bytes.

    ``classes`` (C,) are the probabilities with which clients draw each class; all 0
    before the generator has been trained.
    """

    tensors: Mapping[str, Tensor]
    generator: Mapping[str, Tensor]
    classes: Tensor
    records = ("weights", "generator", "classes")
    entries = MappingProxyType({"classes": "probability"})

    @classmethod
    def from_record(cls, content: RecordDict, spec: tuple[Shapes, Shapes, int]) -> Self:
        """Unpack; ``spec`` = (shapes of the weights, of the generator, C)."""
        weights, generator, number = spec
        found = super().from_record(content, (weights, generator, (number,)))
        if float(found.classes.min()) < 0:
            raise PayloadError('"classes/probability" must not hold negative numbers.')
        return found
