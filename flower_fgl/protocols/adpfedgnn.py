"""Payloads of ADPFedGNN: masked weights up, full weights down."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.nn.sparse import marked
from flower_fgl.protocols.arrays import ANY, Layout, read_arrays
from flower_fgl.protocols.base import (
    Payload,
    Shapes,
    TensorPayload,
    check_tensor,
    pack_bits,
    read_tensors,
    unpack_bits,
    write_tensors,
)

__all__ = ["MaskedWeights", "SharedWeights", "Sizes"]

WEIGHTS, MASKED, NETWORKS = "weights", "masked", "networks"
VALUES, BITS, WEIGHT = "values", "bits", "num-examples"
MASKED_LAYOUT: Layout = {
    VALUES: (torch.float32, ANY),
    BITS: (torch.uint8, ANY),
    WEIGHT: (torch.int32, 1),
}


class Sizes(NamedTuple):
    """Shapes of θ, of agent and estimator, and n_i, the client's weight in the average."""

    weights: Shapes
    networks: Shapes
    weight: float = 0.0

    @property
    def num_weights(self) -> int:
        """P, the number of weights in θ."""
        return sum(math.prod(shape) for shape in self.weights.values())


@dataclass(frozen=True)
class SharedWeights(TensorPayload):
    """All global weights: 4·(P + P_mi + P_q) bytes.

    ``weights`` is θ^global; ``networks`` are θ_μ and θ_σ (P_mi) and θ_q (P_q), those that
    the settings use.
    """

    weights: Mapping[str, Tensor]
    networks: Mapping[str, Tensor]
    records = (WEIGHTS, NETWORKS)

    @classmethod
    def from_record(cls, content: RecordDict, spec: Sizes) -> Self:
        """Unpack; the tensors must have exactly the shapes of ``spec``."""
        return super().from_record(content, (spec.weights, spec.networks))


@dataclass(frozen=True)
class MaskedWeights(Payload):
    """A client's masked weights: 4·M + ⌈P/8⌉ + 4·(P_mi + P_q) + 4 bytes.

    M ≤ ⌊qP⌋ of the P weights are sent. A mask of ones only (first round, or no
    decoupling) is omitted: 4·P + 4·(P_mi + P_q) + 4 bytes. ``values`` (P,) is θ_i, zero
    outside ``mask`` M^g_i (P,); ``weight`` is n_i, which the server already knows.
    """

    values: Tensor
    mask: Tensor
    networks: Mapping[str, Tensor]
    weight: int
    records = (MASKED, NETWORKS)

    @property
    def _bits(self) -> Tensor:
        if bool(self.mask.all()):
            return torch.empty(0, dtype=torch.uint8)
        return pack_bits(self.mask)

    def to_record(self) -> RecordDict:
        """Pack into the records ``masked`` and ``networks``."""
        masked = {
            VALUES: self.values.index_select(0, marked(self.mask)),
            BITS: self._bits,
            WEIGHT: torch.tensor([self.weight], dtype=torch.int32),
        }
        return RecordDict(
            {MASKED: write_tensors(masked), NETWORKS: write_tensors(self.networks)}
        )

    @classmethod
    def from_record(cls, content: RecordDict, spec: Sizes) -> Self:
        """Unpack; the mask must cover the weights of ``spec``."""
        masked = read_arrays(content, MASKED, MASKED_LAYOUT)
        size, bits = spec.num_weights, masked[BITS]
        mask = torch.ones(size, dtype=torch.bool)
        if bits.numel():
            mask = unpack_bits(f"{MASKED}/{BITS}", bits, size)
        kept = check_tensor(
            f"{MASKED}/{VALUES}", masked[VALUES], shape=(int(mask.sum()),)
        )
        weight = masked[WEIGHT].item()
        if weight != spec.weight:
            raise PayloadError(
                f'"{MASKED}/{WEIGHT}" must be {spec.weight:g}, as in the client\'s '
                f"description before round 1, got {weight:g}."
            )
        values = torch.zeros(size)
        values.index_copy_(0, marked(mask), kept)
        networks = read_tensors(content, NETWORKS, spec.networks)
        return cls(values, mask, networks, int(weight))
