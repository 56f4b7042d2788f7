"""Settings and row of FedLoG, see ``algorithms.fedlog``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedLogSettings"]

MANY_NODES, SAMPLED_NODES = 2048, 256
"""Training nodes above which ``prompt-batch-size = 0`` draws a batch, and its size."""


@dataclass(frozen=True)
class FedLogSettings:
    """Settings of FedLoG."""

    encoder_channels: int = option(128, ge=1)
    """width of the encoder's hidden layers; its output is hidden-channels wide"""
    nodes_per_class: int = option(20, ge=1)
    """s, learnable nodes per class and branch; the paper: 1 to 50"""
    tail_degree: float = option(3.0, ge=0)
    """λ, degree up to which the tail branch has the larger weight in Eq. (3); the paper: 0
    to 20"""
    alpha_fixed: float = option(-1.0, ge=-1, le=1)
    """α of all nodes, in place of Eq. (3); negative: α follows the node's degree, Eq.
    (3)"""
    beta: float = option(1.0, ge=0)
    """β, weight of the norm of the learnable nodes in the loss"""
    norm: str = option("fro", choices="fro sum")
    """norm of the learnable nodes: half the Frobenius norm of each branch (fro), or the
    paper's sum of norms (sum)"""
    loss_mix: str = option("branch", choices="branch mixture")
    """loss of real nodes: the loss of each branch, weighted by α (branch), or the loss of
    the mixed prediction of Eq. (3) (mixture)"""
    classifier_update: bool = option(True)
    """whether the classifier updates node positions by Eqs. (6)-(10); false: as in the
    published code"""
    msg_input: str = option("full", choices="full neighbor")
    """input of the classifier's messages: node, neighbours and distance (full), or without
    the node as in the published code (neighbor)"""
    second_silu: bool = option(True)
    """whether MLP_trans of Eq. (8) has a SiLU between its last two linear maps; false:
    Linear, SiLU, Linear, Linear, as in the paper"""
    lg: bool = option(True)
    """whether clients also learn from the global synthetic nodes (local generalization)"""
    lg_mode: str = option("joint", choices="joint sequential")
    """when clients learn from synthetic nodes: in the steps on their own nodes (joint), or
    in separate steps after them (sequential)"""
    synthetic_mode: str = option("HH", choices="HH HT TH TT")
    """class (first letter) and degree (second letter) that synthetic nodes are made from,
    each head (H) or tail (T)"""
    permute_slots: bool = option(False)
    """whether the server shuffles each client's learnable nodes within a class"""
    fs: bool = option(True)
    """whether synthetic nodes are scaled by γ, Eq. (5) (feature scaling)"""
    gamma_step: float = option(0.001, "amount by which γ changes in a step", ge=0, le=1)
    gamma_threshold: float = option(0.8, ge=0, le=1)
    """accuracy on a class's synthetic nodes above which γ grows"""
    pg: bool = option(True)
    """whether each synthetic node gets a generated neighbour (prompt generation)"""
    pg_norm: str = option("sum", choices="sum mean")
    """distances in Eqs. (11) and (12), the losses of the prompt generator: squared norms as
    printed (sum), or means over entries as in the published code (mean)"""
    prompt_epochs: int = option(100, ge=1)
    """epochs in which a client trains its prompt generator before round 1"""
    prompt_lr: float = option(0.01, gt=0)
    """learning rate (Adam) of the prompt generator"""
    prompt_networks: int = option(1, ge=1)
    """N, randomly initialised networks per epoch whose gradients the prompt generator
    matches (paper: 20)"""
    prompt_batch_size: int = option(
        0,
        "training nodes on which an epoch of the prompt generator computes its losses, "
        f"drawn anew in each epoch; 0: all, but {SAMPLED_NODES} on a client with more "
        f"than {MANY_NODES}",
        ge=0,
    )
    local_pretrain_epochs: int = option(0, ge=0)
    """largest number of epochs in which a client trains its encoder alone before its first
    round; stops early by validation accuracy; 0: no pretraining, as in the paper"""
    class_rate_noise: str = option("none", choices="none gauss permute")
    """how clients disguise the class distribution that they upload: not at all, by Gaussian
    noise, or by a permutation"""
    noise_scale: float = option(0.1, ge=0)
    """a, standard deviation of class-rate-noise = gauss as a share of the rate"""

    def prompt_batch(self, num_nodes: int) -> int:
        """Return the batch size of a client's prompt generator; 0: all training nodes."""
        is_large = num_nodes > MANY_NODES
        return self.prompt_batch_size or (SAMPLED_NODES if is_large else 0)


METHOD = Method(
    name="fedlog",
    paper="Kim et al., ICLR 2025",
    strategy="flower_fgl.strategies.fedlog:FedLog",
    client_app="flower_fgl.client_apps.fedlog:FedLogClientApp",
    network="flower_fgl.protocols.fedlog:build_network",
    settings=FedLogSettings,
    payload="4(P+Csd) up and down, once 4(C+P_pg) up, 4C·P_pg down; s nodes a class",
    sent_before=(
        "the share of every class among the training nodes",
        "the weights of a generator of features",
    ),
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
