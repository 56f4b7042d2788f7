"""What both halves of F²L agree on; its payload is FedAvg's with more weights in it.

Wang et al., "Federated Few-shot Learning", KDD 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["ADAPTATION", "METHOD", "F2LSettings"]

ADAPTATION = "adaptation."
"""What the names of the adaptation module's weights begin with."""


@dataclass(frozen=True)
class F2LSettings:
    """Settings of F²L."""

    episodes: int = option(4, "episodes drawn in each local step", ge=1)
    ways: int = option(5, "N, classes of an episode at most", ge=1)
    shots: int = option(3, "support nodes of a class in an episode at most", ge=1)
    queries: int = option(15, "query nodes of a class in an episode at most", ge=1)
    support: int = option(
        32, "training nodes of a class at most to adapt to before prediction", ge=1
    )
    inner_steps: int = option(5, "steps of adaptation to a support set", ge=0)
    inner_lr: float = option(0.1, "learning rate of these steps (SGD)", gt=0)
    tau: float = option(0.5, "τ, temperature of the contrast", gt=0)
    contrast_weight: float = option(
        0.1,
        "weight of the contrast between both representations of a support set",
        ge=0,
    )
    distillation_weight: float = option(
        0.1, "weight of the distillation from the classifier of all classes", ge=0
    )


METHOD = Method(
    name="f2l",
    paper="Wang et al., KDD 2023",
    strategy="flower_fgl.strategies.f2l:F2L",
    client_app="flower_fgl.client_apps.f2l:F2LClientApp",
    settings=F2LSettings,
    payload="4(P + 3p² + pC + C) up and down",
    defaults={"eval-policy": "refresh"},
    additive=True,
)
