"""Settings and row of FLIT and FLIT+, see ``algorithms.flit``."""

from dataclasses import dataclass, replace

from flower_fgl.core.options import option
from flower_fgl.methods import fedavg
from flower_fgl.methods.fedavg import FedAvgSettings

__all__ = ["METHOD", "FLITSettings"]


@dataclass(frozen=True)
class FLITSettings(FedAvgSettings):
    """Settings of FLIT and FLIT+."""

    variant: str = option("flit", choices="flit flit+")
    """flit: items are weighed by their loss; flit+: also by how much a small shift of the
    hidden features changes their prediction"""
    gamma: float = option(0.5, ge=0)
    """γ, power of an item's weight; 0: equal weights; the paper: 0.5, 1, 2"""
    virtual_weight: float = option(0.5, ge=0)
    """λ, weight of the change of the prediction in an item's difficulty (flit+); the paper:
    0.01, 0.1, 1"""


METHOD = replace(
    fedavg.METHOD,
    stacks_checks=False,
    name="flit",
    paper="Zhu et al., Patterns 2022",
    client_app="flower_fgl.client_apps.flit:FLITClientApp",
    settings=FLITSettings,
    defaults={"lr": 1e-4, "weight-decay": 1e-5, "batch-size": 64},
    predicts_links=False,
    weighs_classes=False,
    samples_neighbors=False,
)
