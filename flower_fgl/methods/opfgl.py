"""Settings of O-pFGL.

Yan et al., "Toward Personalized Federated Node Classification in One-shot
Communication", arXiv 2411.11304.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "VARIANTS", "OPFGLSettings", "Variant"]


@dataclass(frozen=True)
class Variant:
    """What an ablation switches off, Sec. V of the paper.

    Parameters
    ----------
    distill : {"node", "fixed", "none"}
        γ of Eq. (19), the constant β, or no distillation.
    expands : bool
        Whether reliable nodes enter the statistics, Eq. (8).
    weighs_classes : bool
        Whether rare classes weigh more in the cross-entropy.
    starts_anew : bool
        Whether stage 2 starts from initial weights instead of the global model.
    personalises : bool
        Whether there is a stage 2.
    """

    distill: Literal["node", "fixed", "none"] = "node"
    expands: bool = False
    weighs_classes: bool = False
    starts_anew: bool = False
    personalises: bool = True


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "ours": Variant(expands=True),
        "nd-ft-dist": Variant(),
        "ft-dist": Variant(distill="fixed"),
        "ft": Variant(distill="none"),
        "ft-imb": Variant(distill="none", weighs_classes=True),
        "hre-nd-dist": Variant(expands=True, starts_anew=True),
        "global": Variant(distill="none", expands=True, personalises=False),
    }
)


"""The method and its ablations by the name that the setting ``variant`` takes."""


@dataclass(frozen=True)
class OPFGLSettings:
    """Settings of O-pFGL; the defaults are those for Cora cut by Louvain."""

    variant: str = option(
        "ours", "the method or an ablation of it", choices=" ".join(VARIANTS)
    )
    depth: int = option(1, "h, steps of propagation in the statistics", ge=0)
    propagation_steps: int = option(2, "steps of label propagation", ge=0)
    propagation_share: float = option(
        0.9, "a, weight of the neighbours in label propagation", ge=0, le=1
    )
    reliable_confidence: float = option(
        0.95, "f_th, soft label from which a node is reliable, Eq. (7)", ge=0, le=1
    )
    reliable_degree: int = option(
        20, "d_th, neighbours from which a node is reliable, Eq. (7)", ge=0
    )
    reliable_classes: int = option(
        1, "K, classes of largest homophily with reliable nodes, Eq. (7)", ge=0
    )
    denominator: str = option(
        "n-1",
        "divisor of the pooled sum of squares, Eq. (9): N - 1, or N less the clients "
        "that hold the class",
        choices="n-1 n-mc",
    )
    node_share: float = option(
        0.0, "p, pseudo-nodes per labelled node of a class; 0: one node", ge=0, le=1
    )
    server_steps: int = option(3000, "T_c, steps of the generator", ge=0)
    lr_features: float = option(5e-3, "the generator's step for X'", gt=0)
    lr_links: float = option(1e-3, "the generator's step for the link predictor", gt=0)
    link_channels: int = option(
        128, "width of the link predictor; 256 for arxiv, Flickr and Reddit", ge=1
    )
    link_threshold: float = option(
        0.01, "δ, weight below which a link is dropped", ge=0, le=1
    )
    links: str = option(
        "soft", "whether links keep their weight or all weigh 1", choices="soft hard"
    )
    alignment_weight: float = option(10.0, "weight of Eq. (11)", ge=0)
    smoothness_weight: float = option(0.1, "weight of Eq. (12)", ge=0)
    smoothness: str = option(
        "separate",
        "whether Eq. (12) is minimised as printed, which separates linked nodes, or "
        "maximised as in graph condensation",
        choices="separate attract",
    )
    lr_global: float = option(1e-4, "client learning rate of stage 1", gt=0)
    lr_personal: float = option(5e-5, "client learning rate of stage 2", gt=0)
    beta: float = option(0.2, "β of Eq. (19); of ft-dist: γ itself", ge=0)
    gamma_min: float = option(0.0, "smallest γ, Eq. (19)", ge=0)
    gamma_max: float = option(0.15, "largest γ, Eq. (19)", ge=0)


METHOD = Method(
    name="opfgl",
    paper="Yan et al., arXiv 2411.11304, 2024",
    strategy="flower_fgl.strategies.opfgl:OPFGL",
    client_app="flower_fgl.client_apps.opfgl:OPFGLClientApp",
    settings=OPFGLSettings,
    payload="8M(D+1) up, 4(sd+s+s²) down, once; M classes, D = (h+1)d, s nodes",
    defaults={
        "rounds": 1,
        "local-epochs": 3000,
        "check-every": 100,
        "patience": 10,
        "dropout": 0.0,
        "weight-decay": 0.0,
        "absent-classes": "zero",
    },
    has_global_model=False,
    mixes_models=True,
    is_one_shot=True,
    graphs=False,
    additive=True,
    takes_late_clients=False,
)
