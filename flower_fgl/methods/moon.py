"""What both halves of MOON agree on; its payload is FedAvg's.

Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021.
"""

from __future__ import annotations

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "MoonSettings"]


@dataclass(frozen=True)
class MoonSettings(FedAvgSettings):
    """Settings of MOON."""

    mu: float = option(
        1.0, "weight of the contrastive term; the paper searches 0.1, 1, 5", ge=0
    )
    tau: float = option(0.5, "temperature of the contrastive term", gt=0)
    nodes: str = option(
        "all",
        "whose embeddings are contrasted: all local nodes, or those that train",
        choices="all train",
    )


METHOD = Method(
    name="moon",
    paper="Li et al., CVPR 2021",
    strategy="flower_fgl.strategies.fedavg:FedAvg",
    client_app="flower_fgl.client_apps.moon:MoonClientApp",
    settings=MoonSettings,
    payload="4P up, 4P down",
    additive=True,
)
