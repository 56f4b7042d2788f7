"""Upload of weights with a description, by which the server compares the clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.protocols.base import Payload, Shapes, read_tensors, write_tensors

__all__ = ["DescribedWeights"]


@dataclass(frozen=True)
class DescribedWeights(Payload):
    """Weights of a client and its description: 4·(P + v) bytes for v numbers.

    Parameters
    ----------
    tensors : mapping of str to Tensor, float32
        θ_i, the P weights, by parameter name.
    descriptor : mapping of str to Tensor, float32
        The v numbers of the description, by name.
    """

    tensors: Mapping[str, Tensor]
    descriptor: Mapping[str, Tensor]
    records = ("weights", "descriptor")

    def to_record(self) -> RecordDict:
        """Pack into the records ``weights`` and ``descriptor``."""
        return RecordDict(
            {
                "weights": write_tensors(self.tensors),
                "descriptor": write_tensors(self.descriptor),
            }
        )

    @classmethod
    def from_record(cls, content: RecordDict, spec: tuple[Shapes, Shapes]) -> Self:
        """Unpack; ``spec`` = (shapes of the weights, shapes of the description)."""
        shapes, described = spec
        descriptor = read_tensors(content, "descriptor", described)
        return cls(read_tensors(content, "weights", shapes), descriptor)

    @property
    def num_bytes(self) -> int:
        """4·(P + v)."""
        groups = (self.tensors, self.descriptor)
        return 4 * sum(t.numel() for group in groups for t in group.values())
