"""Settings and row of MOON, see ``client_apps.moon``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "MoonSettings"]


@dataclass(frozen=True)
class MoonSettings(FedAvgSettings):
    """Settings of MOON."""

    mu: float = option(1.0, ge=0)
    """μ, weight of the contrastive loss; typical: 0.1, 1, 5"""
    tau: float = option(0.5, "τ, temperature of the contrastive loss", gt=0)
    nodes: str = option("all", choices="all train")
    """nodes whose embeddings are contrasted: all local nodes, or the training nodes only"""


METHOD = Method(
    name="moon",
    paper="Li et al., CVPR 2021",
    strategy="flower_fgl.strategies.fedavg:FedAvg",
    client_app="flower_fgl.client_apps.moon:MoonClientApp",
    settings=MoonSettings,
    payload="4P up, 4P down",
    additive=True,
    robust=True,
    predicts_links=True,
    weighs_classes=True,
    multi_label=True,
    numbers=True,
    reads_messages=True,
    shares_parts=True,
)
