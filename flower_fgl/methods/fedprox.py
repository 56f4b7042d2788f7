"""Settings and row of FedProx.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedProxSettings"]


@dataclass(frozen=True)
class FedProxSettings(FedAvgSettings):
    """Settings of FedProx."""

    mu: float = option(
        1e-3, "μ, weight of the proximal term (μ/2)‖θ − w‖²; typical: 1e-4 to 1", ge=0
    )


METHOD = Method(
    name="fedprox",
    paper="Li et al., MLSys 2020",
    strategy="flower_fgl.strategies.fedavg:FedAvg",
    client_app="flower_fgl.client_apps.fedprox:FedProxClientApp",
    settings=FedProxSettings,
    payload="4P up, 4P down",
    additive=True,
    robust=True,
    keeps_first_layer=True,
    keeps_head=True,
    predicts_links=True,
    weighs_classes=True,
    multi_label=True,
    numbers=True,
    reads_messages=True,
    samples_neighbors=True,
)
