"""What both halves of FedLoG agree on: weights, learnable nodes, prompt generators.

Kim et al., "Subgraph Federated Learning for Local Generalization", ICLR 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.condensed.network import BranchNet
from flower_fgl.condensed.prompts import make_generator
from flower_fgl.errors import PayloadError
from flower_fgl.nn import build_model, state_shapes
from flower_fgl.options import option
from flower_fgl.protocols.base import Payload, Shapes, read_tensors, write_tensors

__all__ = [
    "PRETRAIN",
    "FedLogDownload",
    "FedLogSettings",
    "FedLogShapes",
    "FedLogUpload",
    "PromptUpload",
    "build_network",
]

PRETRAIN = "pretrain"
"""Action of the exchange before round 1, which trains the prompt generators."""
WEIGHTS, NODES, PROMPTS, RATES = "weights", "nodes", "prompts", "class-rates"


@dataclass(frozen=True)
class FedLogSettings:
    """Settings of FedLoG."""

    encoder_channels: int = option(
        128,
        "width of the encoder's hidden layers; embeddings are hidden-channels",
        ge=1,
    )
    nodes_per_class: int = option(
        20, "s, learnable nodes per class and branch; the paper: 1 to 50", ge=1
    )
    tail_degree: float = option(
        3.0, "λ, degree up to which the tail branch outweighs; the paper: 0 to 20", ge=0
    )
    alpha_fixed: float = option(
        -1.0, "α of all nodes instead of Eq. (3); negative: by degree", ge=-1, le=1
    )
    beta: float = option(1.0, "β, weight of the norm of the learnable nodes", ge=0)
    norm: str = option(
        "fro",
        "half the Frobenius norm of each branch's nodes, or the paper's sum of norms",
        choices="fro sum",
    )
    loss_mix: str = option(
        "branch",
        "loss of real nodes: each branch's, weighted by α, or that of the mixture (3)",
        choices="branch mixture",
    )
    classifier_update: bool = option(
        True, "whether Eqs. (6)-(10) move nodes; they do not in the published code"
    )
    msg_input: str = option(
        "full",
        "messages of node, neighbours and distance; or, as published, without the node",
        choices="full neighbor",
    )
    lg: bool = option(True, "whether clients learn from global synthetic nodes")
    lg_mode: str = option(
        "joint",
        "whether they do so in the steps on their own nodes, or in steps after them",
        choices="joint sequential",
    )
    synthetic_mode: str = option(
        "HH",
        "class and degree that synthetic nodes are made of, each head (H) or tail (T)",
        choices="HH HT TH TT",
    )
    permute_slots: bool = option(
        False, "whether the server shuffles each client's nodes within a class"
    )
    fs: bool = option(True, "whether synthetic nodes are scaled by γ, Eq. (5)")
    gamma_step: float = option(0.001, "by how much γ moves in a step", ge=0, le=1)
    gamma_threshold: float = option(
        0.8, "accuracy on a class's synthetic nodes above which γ grows", ge=0, le=1
    )
    pg: bool = option(True, "whether synthetic nodes get a generated neighbour")
    prompt_epochs: int = option(100, "epochs of a client's prompt generator", ge=1)
    prompt_lr: float = option(0.01, "learning rate of the prompt generator", gt=0)
    prompt_networks: int = option(
        20, "N, fresh networks per epoch whose gradients are matched", ge=1
    )
    local_pretrain_epochs: int = option(
        0,
        "epochs at most of a client's encoder alone before it first trains, ended by "
        "validation accuracy; 0, as in the paper: none",
        ge=0,
    )
    class_rate_noise: str = option(
        "none",
        "how clients disguise their class distribution",
        choices="none gauss permute",
    )
    noise_scale: float = option(
        0.1, "a, deviation of `gauss` noise as a share of the rate", ge=0
    )


def build_network(
    hyper: FedLogSettings,
    *,
    model: str,
    num_features: int,
    num_classes: int,
    width: int,
    num_layers: int,
    dropout: float,
) -> BranchNet:
    """Build the network of both halves, initialised from torch's global generator.

    Parameters
    ----------
    hyper : FedLogSettings
        The method's settings.
    model : str
        Backbone of the encoder; its outputs are embeddings.
    num_features, num_classes, width, num_layers : int
        d, C, E and the encoder's depth.
    dropout : float in [0, 1)
        Between the encoder's layers.

    Returns
    -------
    BranchNet
        Its learnable nodes are undefined.
    """
    encoder = build_model(
        model,
        in_channels=num_features,
        hidden_channels=hyper.encoder_channels,
        num_classes=width,
        num_layers=num_layers,
        dropout=dropout,
    )
    return BranchNet(
        encoder,
        width=width,
        num_classes=num_classes,
        nodes_per_class=hyper.nodes_per_class,
        num_features=num_features,
        threshold=hyper.tail_degree,
        alpha=hyper.alpha_fixed if hyper.alpha_fixed >= 0 else None,
        updates=hyper.classifier_update,
        neighbours_only=hyper.msg_input == "neighbor",
    )


@dataclass(frozen=True)
class FedLogShapes:
    """What payloads are checked against.

    Parameters
    ----------
    weights : mapping of str to tuple of int
        φ, θ^H and θ^T.
    nodes : tuple of int, or None
        (C·s, d); ``None`` without local generalisation.
    prompts : mapping of str to tuple of int, or None
        One prompt generator; ``None`` without.
    num_classes : int
        C.
    """

    weights: Shapes
    nodes: tuple[int, int] | None
    prompts: Shapes | None
    num_classes: int

    @classmethod
    def of(cls, network: BranchNet, hyper: FedLogSettings) -> Self:
        """Return the shapes that a network and the settings lead to."""
        size, width = network.nodes["head"].shape
        has_prompts = hyper.lg and hyper.pg
        with torch.device("meta"):
            generator = make_generator(width) if has_prompts else None
        return cls(
            {n: tuple(t.shape) for n, t in network.shared_state().items()},
            (size, width) if hyper.lg else None,
            None if generator is None else state_shapes(generator),
            network.num_classes,
        )

    @property
    def stacked(self) -> Shapes:
        """Shapes of the C generators PG^c, stacked."""
        shapes = self.prompts or {}
        return {name: (self.num_classes, *shape) for name, shape in shapes.items()}


@dataclass(frozen=True)
class PromptUpload(Payload):
    """What goes up before round 1: 4·(C + P_pg) bytes, P_pg = 0 without generators.

    Parameters
    ----------
    rates : Tensor of shape (C,), float32
        r_k, disguised or not.
    prompts : mapping of str to Tensor, float32
        PG_k of P_pg numbers; empty without prompts.
    """

    rates: Tensor
    prompts: Mapping[str, Tensor]
    records = (RATES, PROMPTS)

    def to_record(self) -> RecordDict:
        """Pack into the records ``class-rates`` and ``prompts``."""
        return RecordDict(
            {
                RATES: write_tensors({RATES: self.rates}),
                PROMPTS: write_tensors(self.prompts),
            }
        )

    @classmethod
    def from_record(cls, content: RecordDict, spec: FedLogShapes) -> Self:
        """Unpack.

        Raises
        ------
        PayloadError
            If a tensor is missing, unexpected, of the wrong shape, or not finite, or a
            rate is negative.
        """
        rates = read_tensors(content, RATES, {RATES: (spec.num_classes,)})[RATES]
        if float(rates.min()) < 0:
            raise PayloadError(
                f"Class rates must not be negative, got {float(rates.min()):g}."
            )
        return cls(rates, read_tensors(content, PROMPTS, spec.prompts or {}))

    def withhold(self, shared: Tensor, min_count: int) -> Self:
        """Put the rates of classes that are not shared at 0."""
        return replace(self, rates=self.rates.masked_fill(~shared, 0))

    def in_range(self) -> Self:
        """Put negative rates at 0."""
        return replace(self, rates=self.rates.clamp(min=0))

    @property
    def num_bytes(self) -> int:
        """4·(C + P_pg)."""
        return 4 * self.rates.numel() + _bytes_of(self.prompts)


@dataclass(frozen=True)
class FedLogUpload(Payload):
    """A round's upload: 4·(P_enc + P_cls + C·s·d) bytes.

    Of the learnable nodes only those of one branch travel: the head's, or the tail's if
    the second letter of ``synthetic-mode`` is T. Without local generalisation none do.

    Parameters
    ----------
    weights : mapping of str to Tensor, float32
        φ_k and θ_k: P_enc + P_cls numbers.
    nodes : Tensor of shape (C·s, d), float32, or None
        X_k^H or X_k^T.
    """

    weights: Mapping[str, Tensor]
    nodes: Tensor | None
    records = (WEIGHTS, NODES)

    def to_record(self) -> RecordDict:
        """Pack into the records ``weights`` and ``nodes``."""
        return RecordDict(
            {
                WEIGHTS: write_tensors(self.weights),
                NODES: write_tensors(_named(self.nodes)),
            }
        )

    @classmethod
    def from_record(cls, content: RecordDict, spec: FedLogShapes) -> Self:
        """Unpack.

        Raises
        ------
        PayloadError
            If a tensor is missing, unexpected, of the wrong shape, or not finite.
        """
        shapes = {} if spec.nodes is None else {NODES: spec.nodes}
        nodes = read_tensors(content, NODES, shapes)
        return cls(read_tensors(content, WEIGHTS, spec.weights), nodes.get(NODES))

    @property
    def num_bytes(self) -> int:
        """4·(P_enc + P_cls + C·s·d)."""
        return _bytes_of(self.weights) + _bytes_of(_named(self.nodes))


@dataclass(frozen=True)
class FedLogDownload(Payload):
    """A round's download: 4·(P_enc + P_cls + C·s·d) bytes, once 4·C·P_pg more.

    Before the first aggregation there are no synthetic nodes, in the exchange before
    round 1 nothing is sent; the generators come with the first synthetic nodes that a
    client gets.

    Parameters
    ----------
    weights : mapping of str to Tensor, float32
        φ and θ: P_enc + P_cls numbers; empty before round 1.
    nodes : Tensor of shape (C·s, d), float32, or None
        X^g.
    prompts : mapping of str to Tensor of shape (C, ...), float32
        PG^1 … PG^C, stacked; empty if the client has them, or has no use for them yet.
    """

    weights: Mapping[str, Tensor] = field(default_factory=dict)
    nodes: Tensor | None = None
    prompts: Mapping[str, Tensor] = field(default_factory=dict)
    records = (WEIGHTS, NODES, PROMPTS)

    def to_record(self) -> RecordDict:
        """Pack into the records ``weights``, ``nodes`` and ``prompts``."""
        return RecordDict(
            {
                WEIGHTS: write_tensors(self.weights),
                NODES: write_tensors(_named(self.nodes)),
                PROMPTS: write_tensors(self.prompts),
            }
        )

    @classmethod
    def from_record(cls, content: RecordDict, spec: FedLogShapes) -> Self:
        """Unpack, each record whole or empty.

        Raises
        ------
        PayloadError
            If a tensor is missing, unexpected, of the wrong shape, or not finite.
        """
        expected = {
            WEIGHTS: spec.weights,
            NODES: {} if spec.nodes is None else {NODES: spec.nodes},
            PROMPTS: spec.stacked,
        }
        read = {
            name: read_tensors(content, name, shapes if content.get(name) else {})
            for name, shapes in expected.items()
        }
        return cls(read[WEIGHTS], read[NODES].get(NODES), read[PROMPTS])

    @property
    def num_bytes(self) -> int:
        """4·(P_enc + P_cls + C·s·d + C·P_pg) for what is there."""
        return sum(
            _bytes_of(part) for part in (self.weights, _named(self.nodes), self.prompts)
        )


def _named(nodes: Tensor | None) -> dict[str, Tensor]:
    return {} if nodes is None else {NODES: nodes}


def _bytes_of(tensors: Mapping[str, Tensor]) -> int:
    return 4 * sum(tensor.numel() for tensor in tensors.values())
