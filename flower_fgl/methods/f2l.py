"""Settings and row of F²L, see ``algorithms.f2l``."""

from dataclasses import dataclass
from typing import ClassVar

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["ADAPTATION", "METHOD", "F2LSettings"]

ADAPTATION = "adaptation."
"""Prefix of the adaptation module's weight names."""


@dataclass(frozen=True)
class F2LSettings:
    """Settings of F²L."""

    REMOVED: ClassVar = {"inner-lr": 0.1}

    episodes: int = option(4, "number of episodes per local step", ge=1)
    ways: int = option(5, "N, largest number of classes in an episode", ge=1)
    shots: int = option(3, ge=1)
    """largest number of support nodes per class in an episode"""
    queries: int = option(15, ge=1)
    """largest number of query nodes per class in an episode"""
    support: int = option(32, ge=1)
    """largest number of training nodes per class to which the model adapts before it
    predicts"""
    inner_steps: int = option(5, ge=0)
    """gradient steps of the adaptation to a support set; 0: no adaptation"""
    tau: float = option(0.5, "τ, temperature of the contrastive loss", gt=0)
    contrast_weight: float = option(0.1, ge=0)
    """weight of the contrastive loss between the two representations of a support set"""
    distillation_weight: float = option(0.1, ge=0)
    """weight of the distillation from the classifier of all classes"""


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
