"""Settings and row of FedED, see ``client_apps.feded``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedEDSettings"]


@dataclass(frozen=True)
class FedEDSettings(FedAvgSettings):
    """Settings of FedED."""

    distill_weight: float = option(0.1, ge=0)
    """λ, weight of the distillation of the classes that the client lacks"""
    suppress_weight: float = option(0.005, ge=0)
    """κ, weight of the suppression of non-label logits"""


METHOD = Method(
    name="feded",
    paper="Guo et al., 2024",
    client_app="flower_fgl.client_apps.feded:FedEDClientApp",
    settings=FedEDSettings,
    payload="4P up, 4P down",
    additive=True,
    robust=True,
    samples_neighbors=True,
)
