"""Download of FedGen: weights, the generator, and the distribution of the classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import Shapes, TensorPayload

__all__ = ["GeneratorDownload"]


@dataclass(frozen=True)
class GeneratorDownload(TensorPayload):
    """Weights, generator and class distribution: 4·(P + P_G + C) bytes.

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
