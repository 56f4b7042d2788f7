"""Settings and row of FedProto, see ``client_apps.fedproto``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedProtoSettings"]


@dataclass(frozen=True)
class FedProtoSettings:
    """Settings of FedProto."""

    proto_weight: float = option(1.0, ge=0)
    """λ, weight of the distance to the global prototypes; typical: 0.1, 1, 10"""


METHOD = Method(
    name="fedproto",
    paper="Tan et al., AAAI 2022",
    strategy="flower_fgl.strategies.fedproto:FedProto",
    client_app="flower_fgl.client_apps.fedproto:FedProtoClientApp",
    settings=FedProtoSettings,
    payload="4M(p+1) up, 4Cp down, M of C classes present",
    has_global_model=False,
    mixes_models=True,
    shares_embeddings=True,
    weighs_classes=True,
    unread=("weight-by",),
)
