"""Settings and row of FedKD, see ``algorithms.fedkd``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedKDSettings"]


@dataclass(frozen=True)
class FedKDSettings:
    """Settings of FedKD."""

    student: str = option("gcn")
    """backbone of the shared student, the same for all clients; sizes may follow the name,
    as in model: gcn:2x32"""
    energy_start: float = option(0.95, gt=0, le=1)
    """T_start, share of a matrix's squared singular values that the first messages keep;
    with both shares at 1 messages hold whole matrices"""
    energy_end: float = option(0.98, gt=0, le=1)
    """T_end, the share that the last messages keep"""


METHOD = Method(
    name="fedkd",
    paper="Wu et al., Nature Communications 2022",
    strategy="flower_fgl.strategies.fedkd:FedKD",
    client_app="flower_fgl.client_apps.fedkd:FedKDClientApp",
    settings=FedKDSettings,
    payload=(
        "4(Σ min(r(m+n+1), mn) + b) up, the same down; the student's m×n matrices with "
        "ranks r, and b other numbers"
    ),
    has_global_model=False,
    mixes_models=True,
    unread=("weight-by",),
    plans_rounds=True,
)
