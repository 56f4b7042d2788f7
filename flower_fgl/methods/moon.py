"""Settings and row of MOON, see ``client_apps.moon``."""

from dataclasses import dataclass, replace

from flower_fgl.core.options import option
from flower_fgl.methods import fedavg
from flower_fgl.methods.fedavg import FedAvgSettings

__all__ = ["METHOD", "MoonSettings"]


@dataclass(frozen=True)
class MoonSettings(FedAvgSettings):
    """Settings of MOON."""

    mu: float = option(1.0, ge=0)
    """μ, weight of the contrastive loss; typical: 0.1, 1, 5"""
    tau: float = option(0.5, "τ, temperature of the contrastive loss", gt=0)
    nodes: str = option("all", choices="all train")
    """nodes whose embeddings are contrasted: all local nodes, or the training nodes only"""


METHOD = replace(
    fedavg.METHOD,
    stacks_checks=False,
    name="moon",
    paper="Li et al., CVPR 2021",
    client_app="flower_fgl.client_apps.moon:MoonClientApp",
    settings=MoonSettings,
    keeps_first_layer=False,
    keeps_head=False,
    samples_neighbors=False,
)
