"""Payload of FedAvg and related methods: the weights of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.core.flower_internals import plain_content
from flower_fgl.protocols.base import Shapes, TensorPayload
from flower_fgl.protocols.many import read_alike, write_stacked
from flower_fgl.protocols.secure_aggregation.additive import AdditivePayload

__all__ = ["Weights"]


@dataclass(frozen=True)
class Weights(TensorPayload, AdditivePayload):
    """All weights of a model, by parameter name: 4·P bytes for its P parameters.

    With secure aggregation the upload has 8·(P + 2) bytes: the weights times the client's
    weight in the average, this weight, and a check entry.
    """

    tensors: Mapping[str, Tensor]
    records: ClassVar[tuple[str, ...]] = ("weights",)
    public_summands = frozenset({"weight"})

    @classmethod
    def read_alike(
        cls, contents: Mapping[int, RecordDict], spec: Shapes
    ) -> dict[int, Self]:
        """Read the weights of many clients into one array per name."""
        found = read_alike(contents, "weights", spec)
        return {pid: cls(tensors) for pid, tensors in found.items()}

    @staticmethod
    def stacked_records(
        tensors: Mapping[str, Tensor], num_clients: int
    ) -> list[RecordDict]:
        """Pack stacked weights (K, ...) as :meth:`to_record` packs those of a client."""
        return [
            plain_content({"weights": record})
            for record in write_stacked(tensors, num_clients)
        ]

    def summands(self, weight: float) -> dict[str, Tensor]:
        """Return n_k·θ_k and n_k; the mean is the quotient of their sums."""
        scaled = {f"weights/{n}": weight * t.double() for n, t in self.tensors.items()}
        return {"weight": torch.tensor(weight, dtype=torch.float64), **scaled}

    @classmethod
    def summand_shapes(cls, spec: Shapes) -> dict[str, tuple[int, ...]]:
        """Return the shapes of :meth:`summands`."""
        return {"weight": (), **{f"weights/{n}": shape for n, shape in spec.items()}}
