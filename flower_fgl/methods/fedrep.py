"""Settings and row of FedRep.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021.
"""

from __future__ import annotations

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedRepSettings"]


@dataclass(frozen=True)
class FedRepSettings:
    """Settings of FedRep."""

    head_epochs: int = option(
        5,
        "local epochs on the head, before local-epochs on the body; 5 as in FedPANO's "
        "experiments",
        ge=0,
    )


METHOD = Method(
    name="fedrep",
    paper="Collins et al., ICML 2021",
    strategy="flower_fgl.strategies.fedper:FedPer",
    client_app="flower_fgl.client_apps.fedrep:FedRepClientApp",
    settings=FedRepSettings,
    payload="4P_f up, 4P_f down, P_f parameters of the body",
    defaults={"local-epochs": 5, "eval-policy": "refresh"},
    has_global_model=False,
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
