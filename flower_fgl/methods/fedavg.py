"""Settings of FedAvg.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass

from flower_fgl.core.options import option

__all__ = ["FedAvgSettings"]


@dataclass(frozen=True)
class FedAvgSettings:
    """Settings of FedAvg."""

    finetune_epochs: int = option(
        0,
        "local epochs after the last round, the best by validation kept; 0: none",
        ge=0,
    )
