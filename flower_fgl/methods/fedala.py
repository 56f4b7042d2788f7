"""What both halves of FedALA agree on; its payload is FedAvg's.

Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning",
AAAI 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings

__all__ = ["FedALASettings"]


@dataclass(frozen=True)
class FedALASettings(FedAvgSettings):
    """Settings of FedALA."""

    layers: int = option(
        1, "last layers that are blended weight by weight, the others are copied", ge=1
    )
    sample: float = option(
        80.0, "percent of the training nodes on which W is learned", gt=0, le=100
    )
    weight_lr: float = option(1.0, "η, step size of W", gt=0)
