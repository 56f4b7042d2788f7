"""Settings and row of clustered sampling, see ``algorithms.clusteredsampling``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "ClusteredSamplingSettings"]


@dataclass(frozen=True)
class ClusteredSamplingSettings(FedAvgSettings):
    """Settings of clustered sampling."""

    clusters: str = option("similarity", choices="similarity size")
    """how clients are clustered: by the similarity of their updates (Algorithm 2), or by
    their number of training nodes (Algorithm 1)"""


METHOD = Method(
    name="clustered-sampling",
    paper="Fraboni et al., ICML 2021",
    strategy="flower_fgl.strategies.clusteredsampling:ClusteredSampling",
    settings=ClusteredSamplingSettings,
    payload="4P up, 4P down",
    samples_neighbors=True,
    weighs_classes=True,
    multi_label=True,
    numbers=True,
    reads_messages=True,
)
