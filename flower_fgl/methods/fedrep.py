"""Settings and row of FedRep, see ``client_apps.fedrep``."""

from dataclasses import dataclass, replace

from flower_fgl.core.options import option
from flower_fgl.methods import fedper

__all__ = ["METHOD", "FedRepSettings"]


@dataclass(frozen=True)
class FedRepSettings:
    """Settings of FedRep."""

    head_epochs: int = option(5, ge=0)
    """local epochs on the head, before local-epochs on the body; 5 as in FedPANO's
    experiments"""


METHOD = replace(
    fedper.METHOD,
    name="fedrep",
    paper="Collins et al., ICML 2021",
    client_app="flower_fgl.client_apps.fedrep:FedRepClientApp",
    settings=FedRepSettings,
    defaults={"local-epochs": 5, "eval-policy": "refresh"},
)
