"""Settings and row of FGSSL, see ``client_apps.fgssl``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FGSSLSettings"]


@dataclass(frozen=True)
class FGSSLSettings(FedAvgSettings):
    """Settings of FGSSL."""

    contrast_weight: float = option(0.1, ge=0)
    """weight of the contrast between nodes of both views; ours"""
    structure_weight: float = option(0.1, ge=0)
    """weight of the distillation of the edges"""
    tau: float = option(0.1, "τ, temperature of the contrast", gt=0)
    structure_tau: float = option(0.1, gt=0)
    """ω, temperature of the distillation of the edges"""
    local_edge_drop: float = option(0.8, ge=0, lt=1)
    """share of the edges that the local view loses"""
    local_feature_mask: float = option(0.5, ge=0, lt=1)
    """share of the features that the local view loses"""
    global_edge_drop: float = option(0.3, ge=0, lt=1)
    """share of the edges that the received model's view loses"""
    global_feature_mask: float = option(0.3, ge=0, lt=1)
    """share of the features that the received model's view loses"""


METHOD = Method(
    name="fgssl",
    paper="Huang et al., IJCAI 2023",
    client_app="flower_fgl.client_apps.fgssl:FGSSLClientApp",
    settings=FGSSLSettings,
    payload="4P up, 4P down",
    graphs=False,
    additive=True,
    robust=True,
    weighs_classes=True,
)
