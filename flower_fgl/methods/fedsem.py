"""Settings and row of FedSEM.

Long et al., "Multi-Center Federated Learning: Clients Clustering for Better
Personalization", World Wide Web 26, 2023.
"""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedSEMSettings"]


@dataclass(frozen=True)
class FedSEMSettings(FedAvgSettings):
    """Settings of FedSEM."""

    centers: int = option(2, ge=1)
    """K, number of cluster models on the server, at most one per client; typical: 2 to 4"""


METHOD = Method(
    name="fedsem",
    paper="Long et al., World Wide Web 2023",
    strategy="flower_fgl.strategies.fedsem:FedSEM",
    settings=FedSEMSettings,
    payload="4P up, 4P down",
    has_global_model=False,
    samples_neighbors=True,
)
