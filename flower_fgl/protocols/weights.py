"""Payloads of methods that send weights in another form, or something else with them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Self

import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from flower_fgl.algorithms.fedkd import PARTS, restore
from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.arrays import ANY, ArrayPayload, read_arrays
from flower_fgl.protocols.base import Shapes, TensorPayload, find_record
from flower_fgl.protocols.fedavg import DescribedWeights, StackedPayload, Weights
from flower_fgl.protocols.prototypes import LocalPrototypes, Prototypes

__all__ = ["AlignedWeights", "CandidateModels", "Coefficients", "ControlledWeights"]
__all__ += ["EmbeddedWeights", "FactoredWeights", "GeneratorDownload", "ModelAndMeans"]
__all__ += ["ModelAndPrototypes", "MomentWeights", "ReliableWeights", "ScoredModel"]
__all__ += ["TypedWeights"]


@dataclass(frozen=True)
class ControlledWeights(TensorPayload):
    """SCAFFOLD and FedDC: weights x and control variate c, of one shape: 8·P bytes."""

    tensors: Mapping[str, Tensor]
    control: Mapping[str, Tensor]
    records = ("weights", "control")


@dataclass(frozen=True)
class ReliableWeights(DescribedWeights):
    """FedTAD: weights and class reliabilities, 4·(P + C) bytes.

    The descriptor holds ``reliability`` (C,), 0 for classes without training nodes.
    """

    def withhold(self, shared: Tensor, min_count: int) -> Self:
        """Set the reliability of classes that are not shared to 0."""
        kept = self.descriptor["reliability"] * shared
        return replace(self, descriptor={"reliability": kept})

    def in_range(self) -> Self:
        """Clamp noisy reliabilities to at least 0."""
        kept = self.descriptor["reliability"].clamp(min=0)
        return replace(self, descriptor={"reliability": kept})


@dataclass(frozen=True)
class MomentWeights(DescribedWeights):
    """FedGTA: weights, moments and confidence, 4·(P + 2nC + 1) bytes for n orders.

    With raw or central moments alone the bytes are 4·(P + nC + 1). The descriptor holds
    ``moments`` (2n, C) and ``confidence`` (1,).
    """

    def withhold(self, shared: Tensor, min_count: int) -> Self:
        """Set the moments of classes that are not shared to 0.

        A node's labels sum to 1, so the moments of a single class would follow from the
        others: the next class is then withheld too.
        """
        if int((~shared).sum()) == 1:
            shared = shared & shared.roll(1)
        kept = self.descriptor["moments"] * shared
        return replace(self, descriptor={**self.descriptor, "moments": kept})

    def in_range(self) -> Self:
        """Clamp a noisy confidence to at least 0."""
        kept = self.descriptor["confidence"].clamp(min=0)
        return replace(self, descriptor={**self.descriptor, "confidence": kept})


@dataclass(frozen=True)
class ModelAndMeans(Weights):
    """FedNH, FedSpray: weights, and counted class means, 4·(P + M·(p + 1)) bytes.

    The M means are of shape (C, 1, p).
    """

    means: LocalPrototypes
    records = (*Weights.records, *LocalPrototypes.records)
    parts = MappingProxyType({"prototypes": LocalPrototypes})


@dataclass(frozen=True)
class ModelAndPrototypes(Weights):
    """FGGP and FPL: a model and class prototypes, 4·(P + M·p) bytes.

    An upload has one prototype per class (C, 1, p), M ≤ C; a download one per cluster of
    a class (C, K, p), for K clients.
    """

    prototypes: Prototypes
    records = (*Weights.records, *Prototypes.records)
    parts = MappingProxyType({"prototypes": Prototypes})


@dataclass(frozen=True)
class GeneratorDownload(TensorPayload):
    """FedGen: weights, generator and class distribution, 4·(P + P_G + C) bytes.

    ``classes`` (C,) are the probabilities with which clients draw each class; all 0
    before the generator has been trained.
    """

    tensors: Mapping[str, Tensor]
    generator: Mapping[str, Tensor]
    classes: Tensor
    records = ("weights", "generator", "classes")
    entries = MappingProxyType({"classes": "probability"})

    @classmethod
    def from_record(cls, content: RecordDict, spec: tuple[Shapes, Shapes, int]) -> Self:
        """Unpack; ``spec`` = (shapes of the weights, of the generator, C)."""
        weights, generator, number = spec
        found = super().from_record(content, (weights, generator, (number,)))
        if float(found.classes.min()) < 0:
            raise PayloadError('"classes/probability" must not hold negative numbers.')
        return found


@dataclass(frozen=True)
class EmbeddedWeights(StackedPayload):
    """FED-PUB: unmasked weights θ_i, and mean proxy embedding o_i: 4·(P + p) bytes."""

    tensors: Mapping[str, Tensor]
    embedding: Tensor
    records = ("weights", "embedding")
    entries = MappingProxyType({"embedding": "mean"})


@dataclass(frozen=True)
class CandidateModels(TensorPayload):
    """pFedFSL: a client's initial model, then m candidates: 4·P·(1 + m) bytes."""

    tensors: Mapping[str, Tensor]
    records = ("models",)

    @classmethod
    def from_record(cls, content: RecordDict, spec: tuple[Shapes, int]) -> Self:
        """Unpack; ``spec`` = (shapes of one model, largest number of candidates q)."""
        shapes, limit = spec
        layout: dict[str, Any] = {
            n: (torch.float32, "m", *s) for n, s in shapes.items()
        }
        found = cls(read_arrays(content, "models", layout))
        if not 0 <= found.num_candidates <= limit:
            raise PayloadError(
                f'Record "models" must hold 1 to {1 + limit} models, got '
                f"{1 + found.num_candidates}."
            )
        return found

    def model(self, number: int) -> dict[str, Tensor]:
        """Return the weights of one model; 0 is the initial model."""
        return {name: tensor[number] for name, tensor in self.tensors.items()}

    @property
    def num_candidates(self) -> int:
        """Number of candidates m."""
        return len(next(iter(self.tensors.values()))) - 1


@dataclass(frozen=True)
class ScoredModel(TensorPayload):
    """pFedFSL: a trained model, and losses of it and m candidates: 4·(P + 1 + m) bytes.

    The losses are those on the client's training nodes.
    """

    tensors: Mapping[str, Tensor]
    losses: Tensor
    records = ("weights", "losses")


@dataclass(frozen=True)
class Coefficients(ArrayPayload):
    """FedHGN: coefficients a_r of relations in L layers, 4·L·R·B bytes.

    ``rows`` are (L, R, B); R is 0 without alignment.
    """

    rows: Annotated[Tensor, torch.float32, "layers", ANY, "bases"]
    records = ("coefficients",)


@dataclass(frozen=True)
class AlignedWeights(TensorPayload):
    """FedHGN: weights that no schema names, and coefficients: 4·(P_s + L·R·B) bytes.

    ``tensors`` are bases, root weights, biases and head: P_s parameters. Up, the
    coefficients are those of the client's R relations, both directions; down, those of
    all other clients, in an order that is drawn anew in each round.
    """

    tensors: Mapping[str, Tensor]
    coefficients: Coefficients
    records = ("weights", "coefficients")
    parts = MappingProxyType({"coefficients": Coefficients})


@dataclass(frozen=True)
class TypedWeights(TensorPayload):
    """FedLIT: weights and types of a client, 4·(P + 2pM) + 8·M bytes for M types.

    ``tensors`` are the P weights by name, and the ``centroids`` (M, 2p). ``sizes`` (M,
    2), int32, has the number of edges of each type, and 1 if one of them ends at a
    training node, else 0. Both are 0 for a type that is withheld.
    """

    tensors: Mapping[str, Tensor]
    sizes: Tensor
    records = ("weights", "sizes")
    types = MappingProxyType({"sizes": torch.int32})

    @classmethod
    def from_record(cls, content: RecordDict, spec: tuple[Shapes, int]) -> Self:
        """Unpack; ``spec`` has the shapes of the tensors, and the client's edges."""
        shapes, most = spec
        found = super().from_record(content, (shapes, (shapes["centroids"][0], 2)))
        edges, marks = found.sizes.long().unbind(1)
        is_odd = (marks != 0) & (marks != 1) | (marks > edges) | (edges < 0)
        if int(edges.sum()) > most or bool(is_odd.any()):
            raise PayloadError(
                f'"sizes" must count at most the {most} edges that the client described, '
                f"and mark types with edges by 1 or 0, got {found.sizes.tolist()}."
            )
        return found


@dataclass(frozen=True)
class FactoredWeights(TensorPayload):
    """FedKD: a student's weights, 4·r(m + n + 1) bytes for an (m, n) matrix of rank r.

    A matrix whose factors would not be smaller is sent whole, as all vectors are: 4 bytes
    per number. ``factors`` are those of :func:`flower_fgl.algorithms.fedkd.compress`.
    """

    factors: Mapping[str, Tensor]
    records = ("weights",)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The weights by parameter name, multiplied out."""
        return restore(self.factors)

    @classmethod
    def from_record(cls, content: RecordDict, spec: Shapes) -> Self:
        """Unpack and check; ``spec`` holds the shapes of the whole weights."""
        arrays: Mapping[str, Any] = find_record(content, "weights", ArrayRecord) or {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in spec.items():
            parts = [f"{name}/{part}" for part in PARTS]
            if parts[1] not in arrays:
                shapes[name] = shape
                continue
            rank = math.prod(arrays[parts[1]].shape)
            if len(shape) != 2 or not 1 <= rank <= min(shape):
                raise PayloadError(
                    f'"weights/{name}" of shape {tuple(shape)} cannot have {rank} '
                    "singular values."
                )
            sizes = [(shape[0], rank), (rank,), (rank, shape[1])]
            shapes |= zip(parts, sizes, strict=True)
        return super().from_record(content, shapes)
