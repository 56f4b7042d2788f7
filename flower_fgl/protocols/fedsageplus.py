"""What both halves of FedSage+ agree on: generators of neighbours beside the weights.

Zhang et al., "Subgraph Federated Learning with Missing Neighbor Generation", NeurIPS
2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.methods.fedsageplus import FedSagePlusSettings
from flower_fgl.protocols.base import (
    Payload,
    Shapes,
    check_tensor,
    read_tensors,
    write_tensors,
)

__all__ = ["GENERATE", "JUDGE", "FeatureGradient"]
__all__ += ["GeneratorState", "generator_shapes"]

GENERATE = "generate"
"""Query action: train the own generator, with the gradient that others found."""
JUDGE = "judge"
"""Query action: find the gradient for another client's generator."""


def generator_shapes(
    settings: FedSagePlusSettings, *, in_channels: int, num_features: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of fGen's weights, P_f numbers, by name.

    Parameters
    ----------
    settings : FedSagePlusSettings
        Its widths.
    in_channels : int
        Embedding width p.
    num_features : int
        Feature width d.
    """
    widths = [
        in_channels,
        settings.gen_channels,
        settings.gen_wide_channels,
        settings.max_neighbours * num_features,
    ]
    shapes: dict[str, tuple[int, ...]] = {}
    for number, (width, out) in enumerate(pairwise(widths)):
        shapes[f"{2 * number}.weight"] = (out, width)  # activations have odd numbers
        shapes[f"{2 * number}.bias"] = (out,)
    return shapes


@dataclass(frozen=True)
class FeatureGradient(Payload):
    """What other clients find: a gradient of fGen, 4·P_f bytes, or 0 for none.

    Parameters
    ----------
    tensors : mapping of str to Tensor, float32
        By parameter name; empty for none.
    """

    tensors: Mapping[str, Tensor]
    records = ("gradient",)

    def to_record(self) -> RecordDict:
        """Pack into the record ``gradient``, if there is any."""
        if not self.tensors:
            return RecordDict()
        return RecordDict({"gradient": write_tensors(self.tensors)})

    @classmethod
    def from_record(cls, content: RecordDict, spec: Shapes) -> Self:
        """Unpack, expecting the names and shapes of ``spec``, or nothing.

        Raises
        ------
        PayloadError
            If a tensor is missing, unexpected, of the wrong shape, or not finite.
        """
        if "gradient" not in content:
            return cls({})
        return cls(read_tensors(content, "gradient", spec))

    @property
    def num_bytes(self) -> int:
        """4·P_f."""
        return 4 * sum(tensor.numel() for tensor in self.tensors.values())


@dataclass(frozen=True)
class GeneratorState(Payload):
    """What others need to judge a generator: 4·(P_f + M·p) + M bytes for M nodes.

    A client none of whose nodes lost a neighbour sends nothing: 0 bytes.

    Parameters
    ----------
    tensors : mapping of str to Tensor, float32
        fGen's weights; empty if ``counts`` is.
    inputs : Tensor of shape (M, p), float32
        Embeddings of the nodes with hidden neighbours, noise added.
    counts : Tensor of shape (M,), uint8
        Neighbours to generate for each, at least 1.
    """

    tensors: Mapping[str, Tensor]
    inputs: Tensor
    counts: Tensor
    records = ("generator", "nodes")

    def to_record(self) -> RecordDict:
        """Pack into the records ``generator`` and ``nodes``, if there are nodes."""
        if not len(self.counts):
            return RecordDict()
        nodes = {"inputs": self.inputs, "counts": self.counts}
        return RecordDict(
            {"generator": write_tensors(self.tensors), "nodes": write_tensors(nodes)}
        )

    @classmethod
    def from_record(cls, content: RecordDict, spec: tuple[Shapes, int, int]) -> Self:
        """Unpack, expecting fGen's shapes, width p, and at most so many neighbours.

        Raises
        ------
        PayloadError
            If a tensor is missing, unexpected, of the wrong shape, or not finite, or a
            count is out of range.
        """
        shapes, width, most = spec
        if not {"generator", "nodes"} & set(content):
            return cls({}, torch.zeros((0, width)), torch.zeros(0, dtype=torch.uint8))
        tensors = read_tensors(content, "generator", shapes)
        nodes = read_tensors(content, "nodes", is_checked=False)
        if set(nodes) != {"inputs", "counts"}:
            raise PayloadError(
                f'Record "nodes" must hold inputs and counts, got {sorted(nodes)}.'
            )
        counts, inputs = nodes["counts"], nodes["inputs"]
        size = counts.numel()
        check_tensor("nodes/counts", counts, shape=(size,), dtype=torch.uint8)
        check_tensor("nodes/inputs", inputs, shape=(size, width))
        if not size or int(counts.min()) < 1 or int(counts.max()) > most:
            raise PayloadError(
                f'"nodes/counts" must name nodes with 1 to {most} neighbours to generate.'
            )
        return cls(tensors, inputs, counts)

    @property
    def num_bytes(self) -> int:
        """4·(P_f + M·p) + M."""
        weights = sum(tensor.numel() for tensor in self.tensors.values())
        return 4 * (weights + self.inputs.numel()) + self.counts.numel()
