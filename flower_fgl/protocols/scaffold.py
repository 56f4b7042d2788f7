"""Download of SCAFFOLD: weights and the server's control variate.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from flower_fgl.protocols.base import TensorPayload

__all__ = ["ControlledWeights"]


@dataclass(frozen=True)
class ControlledWeights(TensorPayload):
    """Weights and control variate: 8·P bytes.

    Parameters
    ----------
    tensors : mapping of str to Tensor, float32
        x, by parameter name.
    control : mapping of str to Tensor, float32
        c, of the same names and shapes.
    """

    tensors: Mapping[str, Tensor]
    control: Mapping[str, Tensor]
    records = ("weights", "control")
