"""Settings and row of FedTGP.

Zhang et al., "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced
Contrastive Learning for Data and Model Heterogeneity in Federated Learning", AAAI 2024.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from flower_fgl.core.options import option
from flower_fgl.methods import fedproto

__all__ = ["METHOD", "FedTGPSettings"]


@dataclass(frozen=True)
class FedTGPSettings:
    """Settings of FedTGP."""

    REMOVED: ClassVar = {"server-lr": 0.01, "margin-limit": 100.0}

    proto_weight: float = option(1.0, ge=0)
    """λ, weight of the distance to the global prototypes; typical: 1 to 10"""
    server_epochs: int = option(10, ge=0)
    """epochs per round in which the server trains the global prototypes; typical: 10 to
    100"""


METHOD = replace(
    fedproto.METHOD,
    name="fedtgp",
    paper="Zhang et al., AAAI 2024",
    strategy="flower_fgl.strategies.fedproto:FedTGP",
    settings=FedTGPSettings,
)
