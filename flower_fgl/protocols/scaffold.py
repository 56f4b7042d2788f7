"""Download of SCAFFOLD: weights and the server's control variate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from flower_fgl.protocols.base import TensorPayload

__all__ = ["ControlledWeights"]


@dataclass(frozen=True)
class ControlledWeights(TensorPayload):
    """Weights x and control variate c, of the same names and shapes: 8·P bytes."""

    tensors: Mapping[str, Tensor]
    control: Mapping[str, Tensor]
    records = ("weights", "control")
