"""Settings and row of FedProx, see ``client_apps.fedprox``."""

from dataclasses import dataclass, replace

from flower_fgl.core.options import option
from flower_fgl.methods import fedavg
from flower_fgl.methods.fedavg import FedAvgSettings

__all__ = ["METHOD", "FedProxSettings"]


@dataclass(frozen=True)
class FedProxSettings(FedAvgSettings):
    """Settings of FedProx."""

    mu: float = option(1e-3, ge=0)
    """μ, weight of the proximal term (μ/2)‖θ − w‖²; typical: 1e-4 to 1"""


METHOD = replace(
    fedavg.METHOD,
    stacks_checks=False,
    name="fedprox",
    paper="Li et al., MLSys 2020",
    client_app="flower_fgl.client_apps.fedprox:FedProxClientApp",
    settings=FedProxSettings,
)
