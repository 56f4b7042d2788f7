"""Settings and row of O-pFGL, see ``client_apps.opfgl``."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "VARIANTS", "OPFGLSettings", "Variant"]


@dataclass(frozen=True)
class Variant:
    """Describe the method or one of its ablations, Sec. V of the paper."""

    distill: Literal["node", "fixed", "none"] = "node"
    """Distillation weight: γ of Eq. (19), the constant β, or no distillation."""
    expands: bool = False
    """Whether reliable nodes enter the class statistics, Eq. (8)."""
    weighs_classes: bool = False
    """Whether rare classes have a larger weight in the cross-entropy."""
    starts_anew: bool = False
    """Whether stage 2 starts from the initial weights instead of the global model."""
    personalises: bool = True
    """Whether clients run stage 2, the personalization."""


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
"""The method and its ablations, by value of the setting ``variant``."""


@dataclass(frozen=True)
class OPFGLSettings:
    """Settings of O-pFGL; defaults are the paper's for Cora, Louvain partition.

    ``reliable_confidence`` is the paper's general value; on that partition it is 1.
    """

    REMOVED: ClassVar = {"link-threshold": 0.01}

    variant: str = option("ours", choices=" ".join(VARIANTS))
    """the method (ours), or one of the ablations in Sec. V of the paper"""
    depth: int = option(1, "h, propagation steps in the class statistics", ge=0)
    propagation_steps: int = option(2, "number of label propagation steps", ge=0)
    propagation_share: float = option(0.9, ge=0, le=1)
    """a, weight of the neighbours in label propagation"""
    reliable_confidence: float = option(0.95, ge=0, le=1)
    """f_th, soft label from which a node is reliable, Eq. (7)"""
    reliable_degree: int = option(20, ge=0)
    """d_th, number of neighbours from which a node is reliable, Eq. (7)"""
    reliable_classes: int = option(1, ge=0)
    """K, number of classes (those of largest homophily) with reliable nodes, Eq. (7)"""
    denominator: str = option("n-1", choices="n-1 n-mc")
    """divisor of the pooled sum of squares in Eq. (9): N - 1 (n-1), or N minus the number
    of clients that hold the class (n-mc)"""
    node_share: float = option(0.0, ge=0, le=1)
    """p, pseudo-nodes per labelled node of a class; 0: one pseudo-node per class"""
    server_steps: int = option(3000, ge=0)
    """T_c, training steps of the pseudo-graph generator"""
    lr_features: float = option(5e-3, gt=0)
    """learning rate of the generated features X'"""
    lr_links: float = option(1e-3, "learning rate of the link predictor g_θ", gt=0)
    link_channels: int = option(128, ge=1)
    """hidden width of the link predictor; the paper's code: 256 for ogbn-arxiv, Flickr and
    Reddit"""
    links: str = option("soft", choices="soft hard")
    """weights of the generated links: their probability (soft), or 1 for all (hard)"""
    alignment_weight: float = option(10.0, ge=0)
    """weight of the alignment loss, Eq. (11)"""
    smoothness_weight: float = option(0.1, ge=0)
    """weight of the smoothness loss, Eq. (12)"""
    smoothness: str = option("separate", choices="separate attract")
    """direction of Eq. (12): minimised as printed, which separates linked nodes (separate),
    or maximised as in graph condensation (attract)"""
    lr_global: float = option(1e-4, gt=0)
    """client learning rate of stage 1 (global model)"""
    lr_personal: float = option(5e-5, gt=0)
    """client learning rate of stage 2 (personalized model)"""
    beta: float = option(0.2, ge=0)
    """β of Eq. (19); for variant = ft-dist: the constant γ"""
    gamma_min: float = option(0.0, ge=0)
    """smallest distillation weight γ of a node, Eq. (19)"""
    gamma_max: float = option(0.15, ge=0)
    """largest distillation weight γ of a node, Eq. (19)"""

    def __post_init__(self) -> None:
        """Reject an empty range of γ."""
        if self.gamma_min > self.gamma_max:
            raise ConfigError(
                f"opfgl.gamma-min = {self.gamma_min:g} is above opfgl.gamma-max = "
                f"{self.gamma_max:g}. Set a larger gamma-max."
            )

    @property
    def signed_smoothness(self) -> float:
        """Weight of Eq. (12): positive as in the paper, negative as in condensation."""
        sign = 1 if self.smoothness == "separate" else -1
        return sign * self.smoothness_weight


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
        # the statistics of two nodes are these two nodes
        "min-class-count": 5,
    },
    has_global_model=False,
    mixes_models=True,
    is_one_shot=True,
    graphs=False,
    additive=True,
    sums_scaled_uploads=False,
    takes_late_clients=False,
    stacks_checks=True,
    unread=("lr", "weight-by"),
)
