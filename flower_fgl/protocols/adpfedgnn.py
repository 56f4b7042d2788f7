"""What both halves of ADPFedGNN agree on: masked weights up, whole weights down.

Guan et al., "ADPFedGNN: Adaptive Decoupling Personalized Federated Graph Neural
Network", IJCAI 2025.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.decoupling.masks import pack_bits, unpack_bits
from flower_fgl.errors import PayloadError
from flower_fgl.options import option
from flower_fgl.protocols.base import (
    Payload,
    Shapes,
    check_tensor,
    read_tensors,
    write_tensors,
)

__all__ = ["ADPFedGNNSettings", "MaskedWeights", "SharedWeights", "Sizes"]

WEIGHTS, MASKED, NETWORKS = "weights", "masked", "networks"
VALUES, BITS, WEIGHT = "values", "bits", "num-examples"


@dataclass(frozen=True)
class ADPFedGNNSettings:
    """Settings of ADPFedGNN.

    Notes
    -----
    1. The paper defers most of its settings to an appendix that is not to be had; those
       without a source are ours.
    """

    decouple: bool = option(
        True, "masks, mutual information, Eq. (14) and (15); false: ablation -r, -n"
    )
    rl: bool = option(
        True, "whether an agent chooses neighbours; false: ablation -d, -n"
    )
    selection: str = option(
        "dqn",
        "which neighbours are kept: the agent's, as many at random, or all",
        choices="dqn random-drop all",
    )
    eval_actions: str = option(
        "expected",
        "neighbours of a prediction: each counts by its probability in Eq. (2), or the "
        "agent's better action is taken",
        choices="expected greedy",
    )
    beta: float = option(
        0.5, "β, weight of the global branch's logits in Eq. (11)", ge=0, le=1
    )
    k: int = option(10, "neighbours drawn for a node and layer", ge=1, le=1000)
    eval_fanout: int = option(
        50, "neighbours of a node at most when nodes are predicted", ge=1, le=1000
    )
    q: float = option(0.5, "share of each tensor's weights in a mask", ge=0, le=1)
    mask_score: str = option(
        "product",
        "how the global mask compares gradient and global direction",
        choices="product neg-abs-diff",
    )
    masked_agg: str = option(
        "per-position",
        "Eq. (14): divide by the weights of who shares an entry, or of all as printed",
        choices="per-position literal",
    )
    mi: bool = option(True, "whether the loss has the mutual information of Eq. (6)")
    club_norm: str = option(
        "mean", "Eq. (6) as CLUB's estimate, or as printed", choices="mean literal"
    )
    lambda_mi: float = option(0.3, "λ_mi in Eq. (13); the paper: 0.1 to 0.9", ge=0)
    lambda_reg: float = option(
        0.003, "λ_reg in Eq. (13); the paper: 0.001 to 0.009", ge=0
    )
    reg_step: str = option(
        "decoupled",
        "how λ_reg acts: shrinks weights by itself, as in AdamW, or is a part of the "
        "gradient that Adam rescales",
        choices="decoupled gradient",
    )
    lambda_rl: float = option(1.0, "λ_rl, scale of the reward in Eq. (3)", ge=0)
    gamma_rl: float = option(
        0.9, "γ, discount of the agent; 0: every choice by itself", ge=0, lt=1
    )
    reward_sign: str = option(
        "corrected",
        "Eq. (3): a loss below the former ones is rewarded, or one above as printed",
        choices="corrected literal",
    )
    reward_scale: str = option(
        "batch",
        "former losses of Eq. (3): of batches, or means of rounds",
        choices="batch round",
    )
    reward_window: int = option(10, "how many former losses Eq. (3) takes", ge=1)
    buffer: int = option(10_000, "steps in the replay buffer", ge=1)
    replay_batch: int = option(128, "steps the agent learns from at once", ge=1)
    agent_width: int = option(128, "width of the agent's two hidden layers", ge=1)
    network_lr: float = option(
        1e-3, "learning rate of agent and estimator (Adam)", gt=0
    )

    @property
    def has_agent(self) -> bool:
        """Whether there is an agent, be it to say how many are dropped."""
        return self.rl and self.selection != "all"

    @property
    def has_estimator(self) -> bool:
        """Whether the mutual information is estimated."""
        return self.decouple and self.mi


class Sizes(NamedTuple):
    """What payloads are checked against.

    Parameters
    ----------
    weights, networks : mapping of str to tuple of int
        Shapes of θ, and of agent and estimator.
    weight : float
        What the client weighs, n_i.
    """

    weights: Shapes
    networks: Shapes
    weight: float = 0.0

    @property
    def num_weights(self) -> int:
        """P."""
        return sum(math.prod(shape) for shape in self.weights.values())


@dataclass(frozen=True)
class SharedWeights(Payload):
    """All global weights: 4·(P + P_mi + P_q) bytes.

    Parameters
    ----------
    weights : mapping of str to Tensor, float32
        θ^global, P numbers.
    networks : mapping of str to Tensor, float32
        θ_μ and θ_σ (P_mi) and θ_q (P_q), as far as the settings use them.
    """

    weights: Mapping[str, Tensor]
    networks: Mapping[str, Tensor]
    records = (WEIGHTS, NETWORKS)

    def to_record(self) -> RecordDict:
        """Pack into the records ``weights`` and ``networks``."""
        return RecordDict(
            {
                WEIGHTS: write_tensors(self.weights),
                NETWORKS: write_tensors(self.networks),
            }
        )

    @classmethod
    def from_record(cls, content: RecordDict, spec: Sizes) -> Self:
        """Unpack, expecting exactly the shapes of ``spec``.

        Raises
        ------
        PayloadError
            If a tensor is missing, unexpected, of the wrong shape, or not finite.
        """
        return cls(
            read_tensors(content, WEIGHTS, spec.weights),
            read_tensors(content, NETWORKS, spec.networks),
        )

    @property
    def num_bytes(self) -> int:
        """4·(P + P_mi + P_q)."""
        tensors = [*self.weights.values(), *self.networks.values()]
        return 4 * sum(tensor.numel() for tensor in tensors)


@dataclass(frozen=True)
class MaskedWeights(Payload):
    """What a client shares: 4·M + ⌈P/8⌉ + 4·(P_mi + P_q) + 4 bytes.

    M ≤ ⌊qP⌋ of its P weights are sent. A mask of ones only, as in the first round and
    without decoupling, is left out: 4·P + 4·(P_mi + P_q) + 4 bytes.

    Parameters
    ----------
    values : Tensor of shape (P,), float32
        θ_i, zero where not shared.
    mask : Tensor of shape (P,), bool
        M^g_i.
    networks : mapping of str to Tensor, float32
        As in :class:`SharedWeights`.
    weight : int
        n_i, which the server knows.
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
            VALUES: self.values[self.mask],
            BITS: self._bits,
            WEIGHT: torch.tensor([self.weight], dtype=torch.float32),
        }
        return RecordDict(
            {MASKED: write_tensors(masked), NETWORKS: write_tensors(self.networks)}
        )

    @classmethod
    def from_record(cls, content: RecordDict, spec: Sizes) -> Self:
        """Unpack, expecting a mask over the weights of ``spec``.

        Raises
        ------
        PayloadError
            If an array is missing, unexpected, of the wrong shape or type, or not
            finite; if n_i is not what the client said of itself before round 1.
        """
        masked = read_tensors(content, MASKED, is_checked=False)
        if set(masked) != {VALUES, BITS, WEIGHT}:
            raise PayloadError(
                f'Record "{MASKED}" must have the entries {BITS}, {VALUES} and '
                f"{WEIGHT}, got {sorted(masked)}."
            )
        size = spec.num_weights
        bits = check_tensor(f"{MASKED}/{BITS}", masked[BITS], dtype=torch.uint8)
        mask = torch.ones(size, dtype=torch.bool)
        if bits.numel():
            mask = unpack_bits(bits, size)
        kept = check_tensor(
            f"{MASKED}/{VALUES}", masked[VALUES], shape=(int(mask.sum()),)
        )
        weight = float(check_tensor(f"{MASKED}/{WEIGHT}", masked[WEIGHT], shape=(1,)))
        if weight != spec.weight:
            raise PayloadError(
                f'"{MASKED}/{WEIGHT}" must be {spec.weight:g} as the client described '
                f"itself, got {weight:g}."
            )
        values = torch.zeros(size)
        values[mask] = kept
        networks = read_tensors(content, NETWORKS, spec.networks)
        return cls(values, mask, networks, int(weight))

    @property
    def num_bytes(self) -> int:
        """4·M + ⌈P/8⌉ + 4·(P_mi + P_q) + 4, without ⌈P/8⌉ where M = P."""
        floats = sum(tensor.numel() for tensor in self.networks.values())
        return 4 * (int(self.mask.sum()) + floats + 1) + self._bits.numel()
