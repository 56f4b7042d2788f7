"""Settings and row of FedSpray, see ``algorithms.fedspray``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedSpraySettings"]


@dataclass(frozen=True)
class FedSpraySettings:
    """Settings of FedSpray."""

    distill_weight: float = option(1.0, ge=0)
    """λ, weight of the distillation from the encoder into the network; the published code:
    1 or 5"""
    confidence: float = option(0.7, ge=0)
    """softmax of the encoder from which an unlabelled node is distilled"""
    proxy_lr: float = option(0.02, "learning rate of the node proxies", gt=0)
    width: int = option(64, "width of the encoder and of the proxies", ge=1)


METHOD = Method(
    name="fedspray",
    paper="Fu et al., KDD 2024",
    strategy="flower_fgl.strategies.fednh:FedSpray",
    client_app="flower_fgl.client_apps.fedspray:FedSprayClientApp",
    settings=FedSpraySettings,
    payload="4(P_e + M(q+1)) up, 4(P_e + Cq) down, P_e = (d+1)q + 2(q+1)C, M of C "
    "classes present, proxies of width q",
    defaults={"local-epochs": 5, "lr": 0.003},
    has_global_model=False,
    mixes_models=True,
    graphs=False,
)
