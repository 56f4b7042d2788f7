"""Payloads of FedSage+ for the training of the neighbour generators."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.algorithms.fedsageplus import FeatureGenerator
from flower_fgl.core.errors import PayloadError
from flower_fgl.methods.fedsageplus import FedSagePlusSettings
from flower_fgl.nn import state_shapes
from flower_fgl.protocols.arrays import Layout, read_arrays
from flower_fgl.protocols.base import (
    Payload,
    Shapes,
    TensorPayload,
    read_tensors,
    write_tensors,
)

__all__ = ["GENERATE", "JUDGE", "FeatureGradient"]
__all__ += ["GeneratorState", "generator_shapes"]

GENERATE = "generate"
"""Query action: train the client's generator, using the gradient from other clients."""
JUDGE = "judge"
"""Query action: compute the gradient for another client's generator."""
NODES: Layout = {"counts": (torch.uint8, "M"), "inputs": (torch.float32, "M", "p")}


def generator_shapes(
    settings: FedSagePlusSettings, *, in_channels: int, num_features: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the P_f weights of the feature generator fGen, by name.

    ``in_channels`` is the embedding width p.
    """
    hidden = settings.gen_channels, settings.gen_wide_channels
    most = settings.max_neighbours
    with torch.device("meta"):
        made = FeatureGenerator(in_channels, hidden, most, num_features)
    return state_shapes(made)


@dataclass(frozen=True)
class FeatureGradient(TensorPayload):
    """Gradient of fGen from other clients: 4·P_f bytes, or 0 without a gradient.

    It is empty in a download if no gradient arrived, and in an upload if the generator
    gives no finite one.
    """

    tensors: Mapping[str, Tensor]
    records = ("gradient",)

    def to_record(self) -> RecordDict:
        """Pack into the record ``gradient``, or nothing."""
        return super().to_record() if self.tensors else RecordDict()

    @classmethod
    def from_record(cls, content: RecordDict, spec: Shapes) -> Self:
        """Unpack; the gradient must match ``spec`` or be absent."""
        return super().from_record(content, spec) if "gradient" in content else cls({})


@dataclass(frozen=True)
class GeneratorState(Payload):
    """Generator that other clients judge: 4·(P_f + M·p) + M bytes for M nodes.

    ``tensors`` are the weights of fGen. The nodes are those with hidden neighbours:
    ``counts`` (M,) has from 1 to ``max-neighbours`` of each, an integer that is never
    noised. ``inputs`` (M, p) are their embeddings, plus standard normal noise. This noise
    is part of the method and hides nothing: its seed follows from the run's seed, which
    the server and all clients know. A client without hidden neighbours sends nothing: 0
    bytes.

    Notes
    -----
    1. ``upload-clip`` and ``upload-noise`` apply to ``tensors`` and ``inputs`` together,
       around zero: the server sends no generator from which a change could be computed.
    """

    tensors: Mapping[str, Tensor]
    inputs: Tensor
    counts: Tensor
    records = ("generator", "nodes")

    def to_record(self) -> RecordDict:
        """Pack into the records ``generator`` and ``nodes``, or nothing."""
        if not len(self.counts):
            return RecordDict()
        nodes = {"inputs": self.inputs, "counts": self.counts}
        return RecordDict(
            {"generator": write_tensors(self.tensors), "nodes": write_tensors(nodes)}
        )

    @classmethod
    def from_record(
        cls, content: RecordDict, spec: tuple[Shapes, int, int, int]
    ) -> Self:
        """Unpack; ``spec`` = (shapes of fGen, p, most neighbours, most nodes M)."""
        shapes, width, most, num_nodes = spec
        if not {"generator", "nodes"} & set(content):
            return cls({}, torch.zeros((0, width)), torch.zeros(0, dtype=torch.uint8))
        tensors = read_tensors(content, "generator", shapes)
        nodes = read_arrays(content, "nodes", NODES, {"p": width})
        counts, size = nodes["counts"], len(nodes["counts"])
        if size > num_nodes:
            raise PayloadError(
                f"It shows {size} nodes, but the client described {num_nodes}."
            )
        if not size or int(counts.min()) < 1 or int(counts.max()) > most:
            raise PayloadError(
                f'"nodes/counts" must hold at least one count, each from 1 to {most}.'
            )
        return cls(tensors, **nodes)
