"""Settings of FedLoG.

Kim et al., "Subgraph Federated Learning for Local Generalization", ICLR 2025.
"""

from __future__ import annotations

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedLogSettings"]


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


METHOD = Method(
    name="fedlog",
    paper="Kim et al., ICLR 2025",
    strategy="flower_fgl.strategies.fedlog:FedLog",
    client_app="flower_fgl.client_apps.fedlog:FedLogClientApp",
    network="flower_fgl.protocols.fedlog:build_network",
    settings=FedLogSettings,
    payload="4(P+Csd) up and down, once 4(C+P_pg) up, 4C·P_pg down; s nodes a class",
    defaults={
        "model": "graphsage",
        "local-epochs": 1,
        "batch-size": 64,
        "lr": 0.001,
        "optimizer-state": "reset",
        "weight-by": "equal",
    },
    has_global_model=False,
    graphs=False,
    takes_late_clients=False,
)
