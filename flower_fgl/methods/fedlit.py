"""Settings and row of FedLIT, see ``algorithms.fedlit``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedLITSettings"]


@dataclass(frozen=True)
class FedLITSettings(FedAvgSettings):
    """Settings of FedLIT."""

    types: int = option(4, "M, latent types of edges", ge=1, le=1000)
    em_steps: int = option(1, ge=1)
    """steps of each epoch that assign the edges to types and move the centroids"""
    edge: str = option("ordered", choices="ordered symmetric")
    """vector of an edge u, v with u < v; ordered: both embeddings, so that the types depend
    on the numbers of the nodes, as in the published code; symmetric: sum and absolute
    difference of the embeddings"""


METHOD = Method(
    name="fedlit",
    paper="Xie et al., WWW 2023",
    strategy="flower_fgl.strategies.fedlit:FedLIT",
    client_app="flower_fgl.client_apps.fedlit:FedLITClientApp",
    network="flower_fgl.algorithms.fedlit:FedLITNet",
    settings=FedLITSettings,
    payload="4(P + 2pM) + 8M up, 4(P + 2pM) down, M types of edges",
    defaults={"local-epochs": 1},
    graphs=False,
    weighs_classes=True,
    takes_batches=False,
)
