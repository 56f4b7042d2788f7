"""Settings and row of FedPG, see ``client_apps.fedpg``."""

from dataclasses import dataclass
from typing import ClassVar

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedPGSettings"]


@dataclass(frozen=True)
class FedPGSettings:
    """Settings of FedPG.

    Notes
    -----
    1. The paper sums the norms of Eq. (6) and recommends μ = 0.5. There are up to
       C(L + 1) norms, and their gradients do not shrink: the sum outweighs the
       cross-entropy, and results on Cora and CiteSeer are below local training. The
       default reduction and μ did best on validation nodes
       (``experiments/fedpg/fedpg-selection.toml``).
    2. The attention of Eq. (2) is additive by default, see ``scorer``: the activation is
       applied to the score, as printed.
    3. The paper does not say how the clients' models start. With ``init = "own"`` no
       pair of clients reaches λ in the first rounds, and Eq. (5) blends nothing;
       validation accuracy on Cora is lower.
    4. The thresholds between graphs are quantiles by default, see ``graph-similarity``:
       cosines of pooled embeddings are all near 1.
    """

    REMOVED: ClassVar = {"server-weight-decay": 0.0005}

    server_epochs: int = option(10, ge=0)
    """epochs per round in which the server trains the prototype generator; the paper: 3,
    10, 50"""
    server_lr: float = option(0.01, gt=0)
    """learning rate (Adam) of the prototype generator; the paper: 1e-2, 1e-3"""
    epsilon: float = option(0.5, ge=0, le=1)
    """ε, upper limit of the adaptive margin in Eq. (4); the paper: 0 to 1"""
    tau: float = option(1.0, "τ, temperature of Eq. (4); the paper: 0.1, 0.5, 1", gt=0)
    context_share: float = option(0.5, ge=0, le=1)
    """Δs, uploads of other hops that enter Eq. (4), per upload of the hop; 0: none"""
    rf_context: bool = option(True)
    """whether uploads of other hops enter Eq. (4) (receptive-field context)"""
    ada_margin: bool = option(True, "whether Eq. (4) uses its adaptive margin")
    contrast: str = option("cos-margin", choices="cos-margin literal tgp")
    """form of Eq. (4): margin subtracted from the positives (cos-margin), added to them as
    printed (literal), or FedTGP's loss (tgp)"""
    alpha: float = option(0.5, ge=0, le=1)
    """α, weight of the universal prototype in Eq. (5); 1: no prototypes of other clients"""
    threshold: float = option(0.8, ge=-1, le=1)
    """λ, cosine similarity from which two clients share prototypes in Eq. (5)"""
    personalized: bool = option(True)
    """whether Eq. (5) personalizes the prototypes; false: all clients get the universal
    ones"""
    init: str = option("shared", choices="shared own")
    """initial weights: the same on all clients of one backbone (shared), or drawn by each
    client (own)"""
    mu: float = option(0.03, "μ, weight of the prototype loss in Eq. (6)", ge=0)
    mu_warmup: int = option(0, ge=0)
    """rounds over which μ grows linearly to its value; 0: full weight from the start"""
    proto_loss: str = option("proto-norm", choices="proto-norm node-mse")
    """prototype loss of Eq. (6): norms of prototype differences (proto-norm), or mean
    squared error of the nodes (node-mse)"""
    proto_reduction: str = option("mean", choices="mean sum")
    """reduction of the norms in Eq. (6); the paper: sum, with mu = 0.5"""
    hops: int = option(2, ge=0)
    """L, largest hop with prototypes of its own; 0: one prototype per class"""
    hop_mode: str = option("ring", choices="ring within")
    """neighbours at hop h: at distance exactly h (ring), or at most h (within)"""
    neighbor_filter: str = option("same-class", choices="same-class any")
    """neighbours that count: those of the centre's class, or any"""
    neighbor_limit: int = option(32, ge=1)
    """largest number of neighbours per node, hop and round, drawn at random; between
    graphs: the most similar ones"""
    graph_similarity: str = option("quantile", choices="quantile cosine")
    """meaning of ρ_h: a quantile of the cosines of all pairs of the client's graphs, whose
    mean is subtracted first (quantile), or a cosine (cosine)"""
    rho: float = option(0.9, gt=0, le=1)
    """ρ_1, similarity from which two graphs are neighbours at hop 1"""
    rho_decay: float = option(0.9, gt=0, le=1)
    """factor from the similarity threshold ρ_h of one hop to that of the next"""
    attention: bool = option(True)
    """whether Eq. (2) weights neighbours by attention; false: equal weights"""
    scorer: str = option("additive", choices="additive mlp")
    """attention of Eq. (2): a sum of scores of neighbour, centre and the neighbours' mean
    (additive), or an MLP of the three (mlp)"""
    annotation: str = option("train+pseudo", choices="train train+pseudo")
    """nodes with a class: training nodes only, or also nodes with a predicted class
    (train+pseudo)"""
    pseudo_conf_min: float = option(0.0, ge=0, le=1)
    """softmax probability from which a predicted class is used; 0: always"""
    noise_dims: float = option(0.0, ge=0, le=1)
    """share of the dimensions of each uploaded prototype to which noise is added; 0: no
    noise"""


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
    weighs_classes=True,
    unread=("weight-by",),
)
