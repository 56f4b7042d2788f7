"""Settings and row of FGGP, see ``algorithms.prototypes.graph_views``."""

from dataclasses import dataclass
from typing import ClassVar

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FGGPSettings"]


@dataclass(frozen=True)
class FGGPSettings(FedAvgSettings):
    """Settings of FGGP."""

    REMOVED: ClassVar = {"edge-tau": 0.5}

    neighbors: int = option(3, ge=1)
    """k, nearest nodes (by cosine similarity) to which the second view connects each
    node"""
    tau: float = option(0.5, "τ, temperature of the prototype contrastive loss", gt=0)
    view_weight: float = option(1.0, ge=0)
    """weight of the cross-entropy on the second view"""
    edge_weight: float = option(1.0, "weight of the edge predictor's loss", ge=0)
    contrast_weight: float = option(1.0, ge=0)
    """weight of the prototype contrastive loss"""


METHOD = Method(
    name="fggp",
    paper="Wan et al., AAAI 2024",
    strategy="flower_fgl.strategies.fggp:FGGP",
    client_app="flower_fgl.client_apps.fggp:FGGPClientApp",
    settings=FGGPSettings,
    payload="4(P + Mp) up, 4(P + Qp) down, M classes present, Q clusters",
    shares_embeddings=True,
    graphs=False,
)
