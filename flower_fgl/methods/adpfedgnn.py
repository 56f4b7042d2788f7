"""Settings and row of ADPFedGNN, see ``client_apps.adpfedgnn``."""

from dataclasses import dataclass
from typing import ClassVar

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "ADPFedGNNSettings"]


@dataclass(frozen=True)
class ADPFedGNNSettings:
    """Settings of ADPFedGNN.

    Notes
    -----
    1. The paper defers most of its settings to an appendix that is not available. Values
       without a source are this library's choice.
    """

    REMOVED: ClassVar = {
        "lambda-rl": 1.0,
        "replay-batch": 128,
        "agent-width": 128,
    }

    decouple: bool = option(True)
    """whether local and global knowledge are decoupled by masks, mutual information and
    Eqs. (14), (15); false: the paper's ablations -r and (with rl = false) -n"""
    rl: bool = option(True)
    """whether a reinforcement-learning agent selects the neighbours; false: the paper's
    ablations -d and (with decouple = false) -n"""
    selection: str = option("dqn", choices="dqn random-drop all")
    """neighbours that are kept: those the agent selects (dqn), the same number at random
    (random-drop), or all"""
    eval_actions: str = option("expected", choices="expected greedy")
    """neighbours at prediction: weighted by their probability in Eq. (2) (expected), or the
    action with the larger Q-value (greedy)"""
    beta: float = option(0.5, ge=0, le=1)
    """β, weight of the global branch's logits in Eq. (11); the paper: 0.1 to 0.9"""
    k: int = option(10, ge=1, le=1000)
    """k, neighbours sampled per node and layer in training"""
    eval_fanout: int = option(50, ge=1, le=1000)
    """largest number of neighbours per node at prediction"""
    q: float = option(0.5, ge=0, le=1)
    """q, share of the weights of each tensor that a mask selects"""
    mask_score: str = option("product", choices="product neg-abs-diff")
    """score by which the global mask compares the gradient with the global direction: their
    product, or the negative absolute difference"""
    overlap: str = option("excluded", choices="excluded allowed")
    """whether a weight may be in both masks: the local mask selects among the weights
    outside the global mask, which are fewer than q if q is above 0.5 (excluded), or among
    all (allowed)"""
    masked_agg: str = option("per-position", choices="per-position literal")
    """divisor of each entry in Eq. (14): the weights of the clients that share the entry
    (per-position), or of all clients as printed (literal)"""
    mi: bool = option(True)
    """whether the loss contains the mutual information of Eq. (6)"""
    club_norm: str = option("mean", choices="mean literal")
    """form of Eq. (6): CLUB's estimate (mean), or as printed (literal)"""
    lambda_mi: float = option(0.3, ge=0)
    """λ_mi, weight of the mutual information in Eq. (13); the paper: 0.1 to 0.9"""
    lambda_reg: float = option(0.003, ge=0)
    """λ_reg, weight of the regularisation in Eq. (13); the paper: 0.001 to 0.009"""
    reg_step: str = option("decoupled", choices="decoupled gradient")
    """how λ_reg is applied: shrink the weights directly as in AdamW (decoupled), or add to
    the gradient that Adam rescales (gradient)"""
    gamma_rl: float = option(0.9, ge=0, lt=1)
    """γ, discount factor of the agent; 0: each choice counts by itself"""
    reward_sign: str = option("corrected", choices="corrected literal")
    """sign of Eq. (3): reward a loss below the former ones (corrected), or above them as
    printed (literal)"""
    reward_scale: str = option("batch", choices="batch round")
    """former losses that Eq. (3) compares with: of single batches, or means of rounds"""
    reward_window: int = option(10, "number of former losses in Eq. (3)", ge=1)
    reward_norm: str = option("running", choices="running none")
    """scale of the rewards: divided by their running standard deviation (running), or as in
    Eq. (3) (none)"""
    buffer: int = option(10_000, "capacity of the replay buffer in steps", ge=1)
    steps_per_batch: int = option(256, ge=0)
    """steps of a batch that the replay buffer stores, drawn at random; all steps of a batch
    have one reward; 0: all"""
    network_lr: float = option(1e-3, gt=0)
    """learning rate (Adam) of the agent and the mutual-information estimator"""

    def __post_init__(self) -> None:
        """Reject a selection without effect."""
        if self.selection == "random-drop" and not self.rl:
            raise ConfigError(
                'adpfedgnn.selection = "random-drop" drops as many neighbours as the agent '
                "would, but adpfedgnn.rl = false disables the agent. Remove one."
            )

    @property
    def has_agent(self) -> bool:
        """Whether there is an agent; ``random-drop`` needs it to know how many to drop."""
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
    unread=("final-local-epochs",),
    has_global_model=False,
    graphs=False,
    models=("gat", "graphsage"),
)
