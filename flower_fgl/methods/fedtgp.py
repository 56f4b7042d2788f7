"""Settings of FedTGP; its payloads are those of ``protocols/prototypes.py``.

Zhang et al., "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced
Contrastive Learning for Data and Model Heterogeneity in Federated Learning", AAAI 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedTGPSettings"]


@dataclass(frozen=True)
class FedTGPSettings:
    """Settings of FedTGP."""

    proto_weight: float = option(
        1.0, "λ, weight of the distance to the prototypes; 1 to 10", ge=0
    )
    server_epochs: int = option(
        10, "epochs of the global prototypes per round; 10 to 100", ge=0
    )
    server_lr: float = option(0.01, "learning rate of the global prototypes", gt=0)
    margin_limit: float = option(100.0, "κ, the largest margin", ge=0)


METHOD = Method(
    name="fedtgp",
    paper="Zhang et al., AAAI 2024",
    strategy="flower_fgl.strategies.fedtgp:FedTGP",
    client_app="flower_fgl.client_apps.fedproto:FedProtoClientApp",
    settings=FedTGPSettings,
    payload="4M(p+1) up, 4Cp down, M of C classes present",
    has_global_model=False,
    mixes_models=True,
    shares_embeddings=True,
)
