"""Settings and row of GCFL+, see ``algorithms.gcflplus``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "GCFLPlusSettings"]


@dataclass(frozen=True)
class GCFLPlusSettings:
    """Settings of GCFL+."""

    eps1: float = option(0.05, ge=0)
    """ε_1, norm of a cluster's mean update below which it may split; the published code:
    PROTEINS 0.03, IMDB-BINARY 0.025, NCI1 0.04, mixes of datasets 0.07"""
    eps2: float = option(0.1, ge=0)
    """ε_2, norm of a client's update above which its cluster may split; the published code:
    PROTEINS 0.06, IMDB-BINARY 0.045, NCI1 0.08, molecules 0.28, molecules and proteins
    0.35"""
    length: int = option(5, ge=1)
    """rounds of the series by which clients are compared; the published code: PROTEINS 10,
    others 5"""
    warmup: int = option(20, "rounds after which a cluster may split", ge=0)
    series: str = option("gradient", choices="gradient update")
    """norm that the series hold: of the last mini-batch's gradient as in the published
    code, or of the round's update as in the paper"""


METHOD = Method(
    name="gcfl+",
    paper="Xie et al., NeurIPS 2021",
    strategy="flower_fgl.strategies.partly_shared:GCFLPlus",
    client_app="flower_fgl.client_apps.gcflplus:GCFLPlusClientApp",
    settings=GCFLPlusSettings,
    payload="4(P_s+1) up, 4P_s down, P_s parameters of the layers between input and "
    "head",
    defaults={
        "model": "gin",
        "num-layers": 3,
        "local-epochs": 1,
        "batch-size": 128,
        "lr": 1e-3,
        "rounds": 200,
    },
    has_global_model=False,
    keeps_first_layer=True,
    keeps_head=True,
    weighs_classes=True,
)
