"""What both halves of FedSEM agree on; its payload is FedAvg's.

Long et al., "Multi-Center Federated Learning: Clients Clustering for Better
Personalization", World Wide Web 26, 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings

__all__ = ["FedSEMSettings"]


@dataclass(frozen=True)
class FedSEMSettings(FedAvgSettings):
    """Settings of FedSEM."""

    centers: int = option(
        2,
        "K, models that the server keeps, at most one per client; search 2 to 4",
        ge=1,
    )
