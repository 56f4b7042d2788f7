"""Settings and row of FedNTD, see ``client_apps.fedntd``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedNTDSettings"]


@dataclass(frozen=True)
class FedNTDSettings(FedAvgSettings):
    """Settings of FedNTD."""

    beta: float = option(1.0, "β, weight of the not-true distillation", ge=0)
    tau: float = option(1.0, gt=0)
    """τ, temperature of the distillation; the published code also has a default of 3"""


METHOD = Method(
    name="fedntd",
    paper="Lee et al., NeurIPS 2022",
    client_app="flower_fgl.client_apps.fedntd:FedNTDClientApp",
    settings=FedNTDSettings,
    payload="4P up, 4P down",
    additive=True,
    robust=True,
    samples_neighbors=True,
)
