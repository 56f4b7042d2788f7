"""Settings and row of F²L, see ``algorithms.f2l``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flower_fgl.core.options import Scalar, option
from flower_fgl.methods.method import Method

__all__ = ["ADAPTATION", "METHOD", "F2LSettings"]

ADAPTATION = "adaptation."
"""Prefix of the adaptation module's weight names."""


@dataclass(frozen=True)
class F2LSettings:
    """Settings of F²L."""

    REMOVED: ClassVar[Mapping[str, Scalar]] = {"inner-lr": 0.1}

    episodes: int = option(4, "number of episodes per local step", ge=1)
    ways: int = option(5, "N, largest number of classes in an episode", ge=1)
    shots: int = option(
        3, "largest number of support nodes per class in an episode", ge=1
    )
    queries: int = option(
        15, "largest number of query nodes per class in an episode", ge=1
    )
    support: int = option(
        32,
        "largest number of training nodes per class to which the model adapts before "
        "it predicts",
        ge=1,
    )
    inner_steps: int = option(
        5, "gradient steps of the adaptation to a support set; 0: no adaptation", ge=0
    )
    tau: float = option(0.5, "τ, temperature of the contrastive loss", gt=0)
    contrast_weight: float = option(
        0.1,
        "weight of the contrastive loss between the two representations of a support "
        "set",
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
    defaults={"eval-policy": "refresh-all"},
    additive=True,
    robust=True,
)
