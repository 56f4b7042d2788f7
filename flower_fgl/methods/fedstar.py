"""Settings and row of FedStar, see ``algorithms.fedstar``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedStarSettings"]


@dataclass(frozen=True)
class FedStarSettings:
    """Settings of FedStar."""

    walks: int = option(16, ge=1)
    """k_1, longest random walk of the structure encoding, in steps"""
    degrees: int = option(16, ge=1)
    """k_2, width of the one-hot degree in the structure encoding; larger degrees count as
    this one"""


METHOD = Method(
    name="fedstar",
    paper="Tan et al., AAAI 2023",
    strategy="flower_fgl.strategies.partly_shared:FedStar",
    client_app="flower_fgl.client_apps.fedstar:FedStarClientApp",
    network="flower_fgl.algorithms.fedstar:FedStarNet",
    settings=FedStarSettings,
    payload="4P_s up, 4P_s down, P_s parameters of the structure encoder",
    defaults={
        "num-layers": 3,
        "local-epochs": 1,
        "batch-size": 128,
        "lr": 1e-3,
        "rounds": 200,
    },
    has_global_model=False,
    keeps_first_layer=True,
    keeps_head=True,
    additive=True,
    robust=True,
    weighs_classes=True,
)
