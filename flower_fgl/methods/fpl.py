"""Settings and row of FPL, see ``client_apps.fpl``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FPLSettings"]


@dataclass(frozen=True)
class FPLSettings(FedAvgSettings):
    """Settings of FPL."""

    tau: float = option(0.02, "τ, temperature of the contrast with the clusters", gt=0)
    contrast_weight: float = option(1.0, ge=0)
    """weight of the contrast with the cluster prototypes"""
    consistency_weight: float = option(1.0, ge=0)
    """weight of the distance to the mean of the own class's clusters"""


METHOD = Method(
    name="fpl",
    paper="Huang et al., CVPR 2023",
    strategy="flower_fgl.strategies.fggp:FGGP",
    client_app="flower_fgl.client_apps.fpl:FPLClientApp",
    settings=FPLSettings,
    payload="4(P + Mp) up, 4(P + Qp) down, M classes present, Q clusters",
    shares_embeddings=True,
    weighs_classes=True,
)
