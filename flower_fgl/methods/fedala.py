"""Settings and row of FedALA, see ``client_apps.fedala``."""

from dataclasses import dataclass, replace
from typing import ClassVar

from flower_fgl.core.options import option
from flower_fgl.methods import fedavg
from flower_fgl.methods.fedavg import FedAvgSettings

__all__ = ["METHOD", "FedALASettings"]


@dataclass(frozen=True)
class FedALASettings(FedAvgSettings):
    """Settings of FedALA."""

    REMOVED: ClassVar = {"weight-lr": 1.0}

    layers: int = option(1, ge=1)
    """p, number of last layers whose weights are blended one by one; the other layers are
    copied from the global model"""
    sample: float = option(80.0, gt=0, le=100)
    """s, percent of the training nodes on which the blending weights W are learned"""


METHOD = replace(
    fedavg.METHOD,
    stacks_checks=False,
    name="fedala",
    paper="Zhang et al., AAAI 2023",
    client_app="flower_fgl.client_apps.fedala:FedALAClientApp",
    settings=FedALASettings,
    keeps_first_layer=False,
    keeps_head=False,
    shares_parts=False,
)
