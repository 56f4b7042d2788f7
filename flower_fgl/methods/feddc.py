"""Settings and row of FedDC, see ``client_apps.feddc``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedDCSettings"]


@dataclass(frozen=True)
class FedDCSettings(FedAvgSettings):
    """Settings of FedDC."""

    alpha: float = option(0.1, ge=0)
    """α, weight of the distance to w − h_i; typical: 0.01, 0.1"""


METHOD = Method(
    name="feddc",
    paper="Gao et al., CVPR 2022",
    strategy="flower_fgl.strategies.scaffold:FedDC",
    client_app="flower_fgl.client_apps.feddc:FedDCClientApp",
    settings=FedDCSettings,
    payload="8P up, 8P down",
    defaults={"optimizer": "sgd", "lr": 0.1},
    counts_steps=True,
    weighs_classes=True,
    multi_label=True,
    numbers=True,
    reads_messages=True,
)
