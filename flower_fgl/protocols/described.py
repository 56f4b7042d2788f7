"""Upload of weights with a description, by which the server compares the clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from flower_fgl.protocols.base import TensorPayload

__all__ = ["DescribedWeights"]


@dataclass(frozen=True)
class DescribedWeights(TensorPayload):
    """Weights of a client and its description: 4·(P + v) bytes for v numbers.

    ``tensors`` holds θ_i, the P weights, and ``descriptor`` the v numbers, both by name.
    """

    tensors: Mapping[str, Tensor]
    descriptor: Mapping[str, Tensor]
    records = ("weights", "descriptor")
