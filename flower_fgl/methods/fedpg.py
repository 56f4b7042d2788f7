"""Settings of FedPG; its payloads are those of ``protocols/prototypes.py``.

Wu et al., "Federated Prototype Graph Learning", arXiv 2504.09493.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flower_fgl.core.options import Scalar, option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedPGSettings"]


@dataclass(frozen=True)
class FedPGSettings:
    """Settings of FedPG.

    Notes
    -----
    1. The paper sums the norms of Eq. (6) and recommends μ = 0.5. Over up to C(L + 1)
       norms, whose gradients do not shrink, that outweighs the cross-entropy: it is
       below training alone on Cora and CiteSeer. Reduction and μ are those that did best
       on validation nodes (``experiments/fedpg-selection.toml``).
    """

    REMOVED: ClassVar[Mapping[str, Scalar]] = {"server-weight-decay": 0.0005}

    server_epochs: int = option(
        10, "epochs of the prototype generator per round; the paper: 3, 10, 50", ge=0
    )
    server_lr: float = option(
        0.01, "learning rate of the generator (Adam); the paper: 1e-2, 1e-3", gt=0
    )
    epsilon: float = option(0.5, "ε, the largest margin in Eq. (4)", ge=0, le=1)
    tau: float = option(1.0, "τ, temperature of Eq. (4)", gt=0)
    context_share: float = option(
        0.5, "Δs, uploads of other hops per upload of the hop in Eq. (4)", ge=0, le=1
    )
    rf_context: bool = option(True, "whether uploads of other hops enter Eq. (4)")
    ada_margin: bool = option(True, "whether Eq. (4) has its adaptive margin")
    contrast: str = option(
        "cos-margin",
        "form of Eq. (4): margin against the positives, for them, or FedTGP's",
        choices="cos-margin literal tgp",
    )
    alpha: float = option(
        0.5, "α, weight of the universal prototype in Eq. (5)", ge=0, le=1
    )
    threshold: float = option(
        0.8, "λ, cosine from which clients share prototypes in Eq. (5)", ge=-1, le=1
    )
    personalized: bool = option(
        True, "whether Eq. (5) is used; else all get the universal prototypes"
    )
    mu: float = option(0.03, "μ, weight of the prototype term in Eq. (6)", ge=0)
    mu_warmup: int = option(0, "rounds over which μ grows linearly; 0: at once", ge=0)
    proto_loss: str = option(
        "proto-norm",
        "term of Eq. (6): norms of prototype differences, or squares of nodes'",
        choices="proto-norm node-mse",
    )
    proto_reduction: str = option(
        "mean",
        "mean or sum of the norms; the paper: sum, with mu 0.5",
        choices="mean sum",
    )
    hops: int = option(2, "L, farthest hop with prototypes of its own", ge=0)
    hop_mode: str = option(
        "ring",
        "neighbours at distance exactly h, or at most h",
        choices="ring within",
    )
    neighbor_filter: str = option(
        "same-class",
        "neighbours of the centre's class, or any",
        choices="same-class any",
    )
    neighbor_limit: int = option(
        32,
        "neighbours of a node, hop and round at most, drawn at random; of a graph the "
        "most similar",
        ge=1,
    )
    rho: float = option(
        0.9, "ρ_1, cosine from which graphs are neighbours at hop 1", gt=0, le=1
    )
    rho_decay: float = option(
        0.9, "factor from one hop's cosine to the next, ρ_h", gt=0, le=1
    )
    attention: bool = option(True, "whether Eq. (2) weighs neighbours by attention")
    annotation: str = option(
        "train+pseudo",
        "nodes with a class: training nodes, or predicted ones too",
        choices="train train+pseudo",
    )
    pseudo_conf_min: float = option(
        0.0, "softmax probability from which a prediction counts", ge=0, le=1
    )
    noise_dims: float = option(
        0.0, "share of each uploaded prototype's dimensions with noise", ge=0, le=1
    )


METHOD = Method(
    name="fedpg",
    paper="Wu et al., arXiv 2504.09493, 2025",
    strategy="flower_fgl.strategies.fedpg:FedPG",
    client_app="flower_fgl.client_apps.fedpg:FedPGClientApp",
    settings=FedPGSettings,
    payload="4M(p+1) up, 4Mp down, M prototypes present",
    defaults={"model": "gamlp"},
    has_global_model=False,
    mixes_models=True,
    shares_embeddings=True,
)
