"""What both halves of FedRep agree on; its payload is FedPer's: the body's weights.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021.
"""

from __future__ import annotations

from dataclasses import dataclass

from flower_fgl.core.options import option

__all__ = ["FedRepSettings"]


@dataclass(frozen=True)
class FedRepSettings:
    """Settings of FedRep."""

    head_epochs: int = option(
        5, "local epochs on the head before local-epochs on the body; FedPANO: 5", ge=0
    )
