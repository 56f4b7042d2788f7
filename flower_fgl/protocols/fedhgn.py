"""Payload of FedHGN: shared weights, and coefficients of relations without names."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

import torch
from torch import Tensor

from flower_fgl.protocols.arrays import ANY, ArrayPayload
from flower_fgl.protocols.base import TensorPayload

__all__ = ["AlignedWeights", "Coefficients"]


@dataclass(frozen=True)
class Coefficients(ArrayPayload):
    """Coefficients a_r of relations in L layers: 4·L·R·B bytes.

    ``rows`` are (L, R, B); R is 0 without alignment.
    """

    rows: Annotated[Tensor, torch.float32, "layers", ANY, "bases"]
    records = ("coefficients",)


@dataclass(frozen=True)
class AlignedWeights(TensorPayload):
    """Weights that no schema names, and coefficients: 4·(P_s + L·R·B) bytes.

    ``tensors`` are bases, root weights, biases and head: P_s parameters. Up, the
    coefficients are those of the client's R relations, both directions; down, those of
    all other clients, in an order that is drawn anew in each round.
    """

    tensors: Mapping[str, Tensor]
    coefficients: Coefficients
    records = ("weights", "coefficients")
    parts = MappingProxyType({"coefficients": Coefficients})
