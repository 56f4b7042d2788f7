"""Upload of FedLIT: weights, centroids of the types of edges, and sizes of the types."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import (
    Payload,
    Shapes,
    check_tensor,
    read_tensors,
    write_tensors,
)

__all__ = ["TypedWeights"]

SIZES = "sizes"


@dataclass(frozen=True)
class TypedWeights(Payload):
    """Weights and types of a client: 4·(P + 2pM) + 8·M bytes for M types.

    ``tensors`` are the P weights by name, and the ``centroids`` (M, 2p). ``sizes`` (M,
    2), int32, has the number of edges of each type, and 1 if one of them ends at a
    training node, else 0. Both are 0 for a type that is withheld.
    """

    tensors: Mapping[str, Tensor]
    sizes: Tensor
    records = ("weights", SIZES)

    def to_record(self) -> RecordDict:
        """Pack into the records ``weights`` and ``sizes``."""
        sizes = write_tensors({SIZES: self.sizes})
        return RecordDict({"weights": write_tensors(self.tensors), SIZES: sizes})

    @classmethod
    def from_record(cls, content: RecordDict, spec: tuple[Shapes, int]) -> Self:
        """Unpack; ``spec`` has the shapes of the tensors, and the client's edges."""
        shapes, most = spec
        tensors = read_tensors(content, "weights", shapes)
        found = read_tensors(content, SIZES, {SIZES: ()}, is_checked=False)[SIZES]
        shape = (shapes["centroids"][0], 2)
        sizes = check_tensor(SIZES, found, shape=shape, dtype=torch.int32)
        edges, marks = sizes.long().unbind(1)
        is_odd = (marks != 0) & (marks != 1) | (marks > edges) | (edges < 0)
        if int(edges.sum()) > most or bool(is_odd.any()):
            raise PayloadError(
                f'"{SIZES}" must count at most the {most} edges that the client described, '
                f"and mark types with edges by 1 or 0, got {sizes.tolist()}."
            )
        return cls(tensors, sizes)
