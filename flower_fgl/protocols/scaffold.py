"""Download of SCAFFOLD: weights and the server's control variate.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.protocols.base import Payload, Shapes, read_tensors, write_tensors

__all__ = ["ControlledWeights"]


@dataclass(frozen=True)
class ControlledWeights(Payload):
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

    def to_record(self) -> RecordDict:
        """Pack into the records ``weights`` and ``control``."""
        return RecordDict(
            {
                "weights": write_tensors(self.tensors),
                "control": write_tensors(self.control),
            }
        )

    @classmethod
    def from_record(cls, content: RecordDict, spec: Shapes) -> Self:
        """Unpack; ``spec`` holds the shapes of the weights."""
        control = read_tensors(content, "control", spec)
        return cls(read_tensors(content, "weights", spec), control)

    @property
    def num_bytes(self) -> int:
        """8·P."""
        return 8 * sum(tensor.numel() for tensor in self.tensors.values())
