"""Settings and row of FedALA, see ``client_apps.fedala``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flower_fgl.core.options import Scalar, option
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedALASettings"]


@dataclass(frozen=True)
class FedALASettings(FedAvgSettings):
    """Settings of FedALA."""

    REMOVED: ClassVar[Mapping[str, Scalar]] = {"weight-lr": 1.0}

    layers: int = option(1, ge=1)
    """p, number of last layers whose weights are blended one by one; the other layers are
    copied from the global model"""
    sample: float = option(80.0, gt=0, le=100)
    """s, percent of the training nodes on which the blending weights W are learned"""


METHOD = Method(
    name="fedala",
    paper="Zhang et al., AAAI 2023",
    strategy="flower_fgl.strategies.fedavg:FedAvg",
    client_app="flower_fgl.client_apps.fedala:FedALAClientApp",
    settings=FedALASettings,
    payload="4P up, 4P down",
    additive=True,
    robust=True,
    predicts_links=True,
    weighs_classes=True,
    multi_label=True,
    numbers=True,
    reads_messages=True,
    samples_neighbors=True,
)
