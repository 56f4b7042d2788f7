"""Settings and row of FedNH, see ``algorithms.fednh``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedNHSettings"]


@dataclass(frozen=True)
class FedNHSettings(FedAvgSettings):
    """Settings of FedNH."""

    rho: float = option(0.9, ge=0, le=1)
    """ρ, share of a class prototype that a round keeps"""
    scale: float = option(20.0, gt=0)
    """initial s, factor of the cosines; the published code: 20, in a small network 1, or 30
    fixed"""
    train_scale: bool = option(True, "whether clients train s")


METHOD = Method(
    name="fednh",
    paper="Dai et al., AAAI 2023",
    strategy="flower_fgl.strategies.fednh:FedNH",
    client_app="flower_fgl.client_apps.fednh:FedNHClientApp",
    network="flower_fgl.algorithms.fednh:FedNHNet",
    settings=FedNHSettings,
    payload="4(P_f + 1 + M(p+1)) up, 4(P_f + 1 + Cp) down, M of C classes present",
    defaults={"weight-by": "equal"},
    shares_embeddings=True,
    graphs=False,
    weighs_classes=True,
)
