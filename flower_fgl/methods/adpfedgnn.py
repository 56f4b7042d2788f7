"""Settings of ADPFedGNN.

Guan et al., "ADPFedGNN: Adaptive Decoupling Personalized Federated Graph Neural
Network", IJCAI 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flower_fgl.core.options import Scalar, option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "ADPFedGNNSettings"]


@dataclass(frozen=True)
class ADPFedGNNSettings:
    """Settings of ADPFedGNN.

    Notes
    -----
    1. The paper defers most of its settings to an appendix that is not to be had; those
       without a source are ours.
    """

    REMOVED: ClassVar[Mapping[str, Scalar]] = {
        "lambda-rl": 1.0,
        "replay-batch": 128,
        "agent-width": 128,
    }

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


METHOD = Method(
    name="adpfedgnn",
    paper="Guan et al., IJCAI 2025",
    strategy="flower_fgl.strategies.adpfedgnn:ADPFedGNN",
    client_app="flower_fgl.client_apps.adpfedgnn:ADPFedGNNClientApp",
    network="flower_fgl.algorithms.adpfedgnn.network:build_network",
    settings=ADPFedGNNSettings,
    payload="4qP + P/8 + 4(P_mi + P_q) + 4 up, 4(P + P_mi + P_q) down",
    defaults={
        "model": "graphsage",
        "batch-size": 128,
        "weight-decay": 0.0,
        "eval-policy": "refresh",
        "absent-classes": "zero",
    },
    has_global_model=False,
    graphs=False,
)
