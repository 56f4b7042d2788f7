"""Settings and row of Co-Boosting, see ``algorithms.coboosting``."""

from dataclasses import dataclass, replace

from flower_fgl.core.options import option
from flower_fgl.methods import dense
from flower_fgl.methods.dense import DenseSettings

__all__ = ["METHOD", "CoBoostingSettings"]


@dataclass(frozen=True)
class CoBoostingSettings(DenseSettings):
    """Settings of Co-Boosting."""

    hardness: float = option(1.0, ge=0)
    """power of (1 − p) by which hard nodes count in the generator's loss"""
    perturbation: float = option(0.03, ge=0)
    """ε, length of the random step that perturbs a generated node; ours"""
    weight_step: float = option(0.01, ge=0)
    """μ, step of the clients' weights in the ensemble"""
    step_decay: float = option(0.99, gt=0, le=1)
    """factor by which that step falls in each epoch"""
    tau: float = option(4.0, gt=0)
    """temperature of the student's distillation; the published code: 4 (DENSE: 20)"""
    adversarial_tau: float = option(3.0, gt=0)
    """temperature of the disagreement of ensemble and student"""


METHOD = replace(
    dense.METHOD,
    name="co-boosting",
    paper="Dai et al., ICLR 2024",
    strategy="flower_fgl.strategies.dense:CoBoosting",
    settings=CoBoostingSettings,
)
