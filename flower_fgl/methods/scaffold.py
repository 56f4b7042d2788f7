"""Settings and row of SCAFFOLD, see ``client_apps.scaffold``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "ScaffoldSettings"]


@dataclass(frozen=True)
class ScaffoldSettings(FedAvgSettings):
    """Settings of SCAFFOLD."""

    server_lr: float = option(1.0, gt=0)
    """η_g, step of the server along the mean change of the weights"""


METHOD = Method(
    name="scaffold",
    paper="Karimireddy et al., ICML 2020",
    strategy="flower_fgl.strategies.scaffold:Scaffold",
    client_app="flower_fgl.client_apps.scaffold:ScaffoldClientApp",
    settings=ScaffoldSettings,
    payload="8P up, 8P down",
    defaults={"optimizer": "sgd", "lr": 0.1},
    weighs_classes=True,
    counts_steps=True,
    multi_label=True,
    numbers=True,
    reads_messages=True,
    unread=("weight-by",),
)
