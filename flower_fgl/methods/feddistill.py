"""Settings and row of FedDistill, see ``client_apps.feddistill``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedDistillSettings"]


@dataclass(frozen=True)
class FedDistillSettings:
    """Settings of FedDistill."""

    distill_weight: float = option(1.0, ge=0)
    """λ, weight of the distance to the mean logits of the own class"""


METHOD = Method(
    name="feddistill",
    paper="Jeong et al., arXiv 1811.11479, 2018",
    strategy="flower_fgl.strategies.fedproto:FedDistill",
    client_app="flower_fgl.client_apps.feddistill:FedDistillClientApp",
    settings=FedDistillSettings,
    payload="4M(C+1) up, 4M'C down, M of C classes present, M' of all clients",
    has_global_model=False,
    mixes_models=True,
    unread=("weight-by",),
    sends_last_steps=True,
)
