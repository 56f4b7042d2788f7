"""What both halves of FedProx agree on; its payload is FedAvg's.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedProxSettings"]


@dataclass(frozen=True)
class FedProxSettings:
    """Settings of FedProx."""

    mu: float = option(
        1e-3, "weight of (μ/2)‖θ − w‖²; the paper searches 1e-4 to 1", ge=0
    )
    finetune_epochs: int = option(
        0,
        "local epochs after the last round, the best by validation kept; 0: none",
        ge=0,
    )


METHOD = Method(
    name="fedprox",
    paper="Li et al., MLSys 2020",
    strategy="flower_fgl.strategies.fedavg:FedAvg",
    client_app="flower_fgl.client_apps.fedprox:FedProxClientApp",
    settings=FedProxSettings,
    payload="4P up, 4P down",
    additive=True,
)
