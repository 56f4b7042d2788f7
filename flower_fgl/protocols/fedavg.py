"""What both halves of FedAvg and its kin agree on: weights up, weights down.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.options import option
from flower_fgl.protocols.base import Payload, Shapes, read_tensors, write_tensors

__all__ = ["FedAvgSettings", "Weights"]


@dataclass(frozen=True)
class FedAvgSettings:
    """Settings of FedAvg."""

    finetune_epochs: int = option(
        0,
        "local epochs after the last round, the best by validation kept; 0: none",
        ge=0,
    )


@dataclass(frozen=True)
class Weights(Payload):
    """All weights of a model: 4·P bytes for its P parameters, up and down.

    Parameters
    ----------
    tensors : mapping of str to Tensor, float32
        The model's state, by parameter name.
    """

    tensors: Mapping[str, Tensor]
    records = ("weights",)

    def to_record(self) -> RecordDict:
        """Pack into the record ``weights``."""
        return RecordDict({"weights": write_tensors(self.tensors)})

    @classmethod
    def from_record(cls, content: RecordDict, spec: Shapes) -> Self:
        """Unpack, expecting exactly the names and shapes of ``spec``.

        Raises
        ------
        PayloadError
            If a tensor is missing, unexpected, of the wrong shape, or not finite.
        """
        return cls(read_tensors(content, "weights", spec))

    @property
    def num_bytes(self) -> int:
        """4·P."""
        return 4 * sum(tensor.numel() for tensor in self.tensors.values())
