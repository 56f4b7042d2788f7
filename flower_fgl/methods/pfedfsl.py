"""Settings of pFedFSL.

Zhao et al., "Personalized Federated Few-Shot Learning", IEEE TNNLS 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

from flower_fgl.core.options import option

__all__ = ["PFedFSLSettings"]


@dataclass(frozen=True)
class PFedFSLSettings:
    """Settings of pFedFSL."""

    candidates: int = option(
        3, "q, models of other clients that a client tries in a round", ge=0
    )
