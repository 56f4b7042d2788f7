"""Settings and row of FedSage+, see ``algorithms.fedsageplus``."""

from dataclasses import dataclass
from typing import ClassVar

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedSagePlusSettings"]


@dataclass(frozen=True)
class FedSagePlusSettings(FedAvgSettings):
    """Settings of FedSage+."""

    REMOVED: ClassVar = {
        "gen-epochs": 5,
        "gen-lr": 0.001,
        "hide-share": 0.5,
    }

    gen_rounds: int = option(10, ge=0)
    """rounds of generator training before round 1; 0: no generator, graphs stay as they
    are"""
    gen_channels: int = option(256, ge=1)
    """width of the first hidden layer of the feature generator fGen"""
    gen_wide_channels: int = option(2048, ge=1)
    """width of the second hidden layer of the feature generator fGen"""
    max_neighbours: int = option(5, ge=1)
    """largest number of neighbours generated for a node"""
    peers: int = option(1, ge=0)
    """number of other clients that judge each generator per round, in turn; 0: all
    others"""
    peer_weight: float = option(1.0, ge=0)
    """α, weight of the gradients from other clients"""


METHOD = Method(
    name="fedsage+",
    paper="Zhang et al., NeurIPS 2021",
    strategy="flower_fgl.strategies.fedsageplus:FedSagePlus",
    client_app="flower_fgl.client_apps.fedsageplus:FedSagePlusClientApp",
    settings=FedSagePlusSettings,
    payload="4P up, 4P down; before, T times 4Q(q+1)+4Mp+M up, 4Q(q+1)+q(4Mp+M) down",
    sent_before=(
        "embeddings of single nodes, which the server passes on to other owners",
        "the number of hidden neighbours of each of these nodes, passed on likewise",
        "the weights of a generator of missing neighbours",
        "gradients that reveal features: those of single nodes, and with "
        "min-class-count above 1 means of groups of at least so many nodes",
    ),
    defaults={"model": "graphsage"},
    graphs=False,
    takes_late_clients=False,
)
