"""Settings and row of pFedFSL, see ``client_apps.pfedfsl``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "PFedFSLSettings"]


@dataclass(frozen=True)
class PFedFSLSettings:
    """Settings of pFedFSL."""

    candidates: int = option(3, ge=0)
    """q, models of other clients that a client evaluates per round; 0: none"""
    tau: float = option(1.0, gt=0)
    """τ in the mixing weights softmax(−loss / τ); a small value selects the model with the
    smallest loss"""


METHOD = Method(
    name="pfedfsl",
    paper="Zhao et al., IEEE TNNLS 2024",
    strategy="flower_fgl.strategies.pfedfsl:PFedFSL",
    client_app="flower_fgl.client_apps.pfedfsl:PFedFSLClientApp",
    settings=PFedFSLSettings,
    payload="4(P + 1 + m) up, 4P(1 + m) down, m of q candidates",
    defaults={"eval-policy": "refresh-all"},
    has_global_model=False,
    unread=("weight-by",),
)
