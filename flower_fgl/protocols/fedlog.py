"""Payloads and network of FedLoG: weights, learnable nodes, prompt generators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self, Unpack

import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.algorithms.fedlog.network import FedLogBranchNet
from flower_fgl.algorithms.fedlog.prompts import make_generator
from flower_fgl.algorithms.own_network import NetworkSizes, sized_backbone
from flower_fgl.core.errors import PayloadError
from flower_fgl.methods.fedlog import FedLogSettings
from flower_fgl.nn import state_shapes
from flower_fgl.protocols.base import Shapes, TensorPayload

__all__ = ["PRETRAIN", "FedLogDownload", "FedLogShapes", "FedLogUpload", "PromptUpload"]
__all__ += ["build_network"]

PRETRAIN = "pretrain"
"""Action of the message before round 1 that trains the prompt generators."""
ROUNDING = 1e-4
"""Rounding error of a sum of class rates."""
TAIL = 10.0
"""Standard deviations that noise on a class rate may reach; more has probability 1e-23."""
WEIGHTS, NODES, PROMPTS, RATES = "weights", "nodes", "prompts", "class-rates"


def build_network(
    method_config: FedLogSettings, **sizes: Unpack[NetworkSizes]
) -> FedLogBranchNet:
    """Build FedLoG's network; torch's global generator draws its weights.

    ``model`` is the backbone of the encoder, whose outputs of ``width`` E are the
    embeddings. The learnable nodes are not initialised.
    """
    width = sizes["width"]
    encoder = sized_backbone(
        sizes, hidden_channels=method_config.encoder_channels, num_outputs=width
    )
    return FedLogBranchNet(
        encoder,
        width=width,
        num_classes=sizes["num_outputs"],
        nodes_per_class=method_config.nodes_per_class,
        num_features=sizes["num_features"],
        threshold=method_config.tail_degree,
        alpha=method_config.alpha_fixed if method_config.alpha_fixed >= 0 else None,
        updates=method_config.classifier_update,
        neighbours_only=method_config.msg_input == "neighbor",
        second_silu=method_config.second_silu,
    )


@dataclass(frozen=True)
class FedLogShapes:
    """Expected shapes of FedLoG's payloads, and the largest sum of a client's class rates.

    ``weights`` are those of φ, θ^H and θ^T; ``nodes`` is (C·s, d), ``None`` without local
    generalization; ``prompts`` those of one prompt generator, ``None`` without prompts.
    """

    weights: Shapes
    nodes: tuple[int, int] | None
    prompts: Shapes | None
    num_classes: int
    most: float = 1.0

    @classmethod
    def of(cls, network: FedLogBranchNet, method_config: FedLogSettings) -> Self:
        """Return the shapes for a network and its settings."""
        size, width = network.nodes["head"].shape
        has_prompts = method_config.lg and method_config.pg
        is_noisy = method_config.class_rate_noise == "gauss"  # r_k^c·(1 + a·N(0, 1))
        with torch.device("meta"):
            generator = make_generator(width) if has_prompts else None
        return cls(
            {n: tuple(t.shape) for n, t in network.shared_state().items()},
            (size, width) if method_config.lg else None,
            None if generator is None else state_shapes(generator),
            network.num_classes,
            1 + TAIL * method_config.noise_scale if is_noisy else 1.0,
        )

    @property
    def stacked(self) -> Shapes:
        """Shapes of the C generators PG^c, stacked."""
        shapes = self.prompts or {}
        return {name: (self.num_classes, *shape) for name, shape in shapes.items()}


@dataclass(frozen=True)
class PromptUpload(TensorPayload):
    """Upload before round 1: 4·(C + P_pg) bytes; P_pg = 0 without generators.

    ``rates`` is r_k (C,), the client's class distribution, possibly with noise;
    ``prompts`` is PG_k, empty without prompts.
    """

    rates: Tensor
    prompts: Mapping[str, Tensor]
    records = (RATES, PROMPTS)

    @classmethod
    def from_record(cls, content: RecordDict, spec: FedLogShapes) -> Self:
        """Unpack; a PayloadError says that a tensor or the rates are malformed."""
        found = super().from_record(content, ((spec.num_classes,), spec.prompts or {}))
        rates = found.rates
        if float(rates.min()) < 0:
            raise PayloadError(
                f"Class rates must not be negative, got {float(rates.min()):g}."
            )
        if float(rates.sum()) > spec.most + ROUNDING:
            raise PayloadError(
                f"Class rates must add up to at most {spec.most:g}, got "
                f"{float(rates.sum()):g}."
            )
        return found

    def withhold(self, shared: Tensor, min_count: int) -> Self:
        """Set the rates of classes that are not shared to 0."""
        return replace(self, rates=self.rates.masked_fill(~shared, 0))

    def in_range(self) -> Self:
        """Clamp rates to [0, 1]."""
        return replace(self, rates=self.rates.clamp(0, 1))


@dataclass(frozen=True)
class FedLogUpload(TensorPayload):
    """Upload of a round, φ_k and θ_k and X_k: 4·(P_enc + P_cls + C·s·d) bytes.

    The learnable nodes (C·s, d) of one branch are sent: the head branch, or the tail
    branch if the second letter of ``synthetic-mode`` is T. Without local generalization
    none are sent.
    """

    weights: Mapping[str, Tensor]
    nodes: Tensor | None
    records = (WEIGHTS, NODES)

    @classmethod
    def from_record(cls, content: RecordDict, spec: FedLogShapes) -> Self:
        """Unpack; the shapes are those of ``spec``."""
        return super().from_record(content, (spec.weights, spec.nodes))


@dataclass(frozen=True)
class FedLogDownload(TensorPayload):
    """Download of a round: 4·(P_enc + P_cls + C·s·d) bytes, once 4·C·P_pg more.

    The message before round 1 is empty. The global synthetic nodes X^g (C·s, d) exist
    after the first aggregation. The first download with them also contains the stacked
    generators PG^1 … PG^C.
    """

    weights: Mapping[str, Tensor] = field(default_factory=dict)
    nodes: Tensor | None = None
    prompts: Mapping[str, Tensor] = field(default_factory=dict)
    records = (WEIGHTS, NODES, PROMPTS)

    @classmethod
    def from_record(cls, content: RecordDict, spec: FedLogShapes) -> Self:
        """Unpack; each record must be complete or empty."""
        shapes = (
            spec.weights if content.get(WEIGHTS) else {},
            spec.nodes if content.get(NODES) else None,
            spec.stacked if content.get(PROMPTS) else {},
        )
        return super().from_record(content, shapes)
