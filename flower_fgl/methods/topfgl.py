"""Settings and row of TopFGL, see ``algorithms.topfgl``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedpub import PersonalMixSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "TopFGLSettings"]


@dataclass(frozen=True)
class TopFGLSettings(PersonalMixSettings):
    """Settings of TopFGL."""

    warmup: float = option(0.3, ge=0, le=1)
    """r, share of the rounds that average as FedAvg, before the averages become
    personalized; 1: always"""
    augmentations: int = option(3, ge=0)
    """A: of T rounds, a client adds edges in those divisible by ⌊T/(A + 1)⌋, but not in the
    first or last; A times or, where A + 1 does not divide T, more often; the published
    code: 5 on ogbn-arxiv; 0: never"""
    neighbors: int = option(8, ge=1)
    """k, nearest nodes of which edges are chosen; the published code: 4 to 6 on Cora and
    CiteSeer"""
    same_class: str = option("any", choices="any pseudo")
    """edges to add: between nodes of any predicted class, or only of the same prediction of
    the topology learner (pseudo)"""


METHOD = Method(
    name="topfgl",
    paper="TopFGL, ICDE 2026",
    strategy="flower_fgl.strategies.personal_mix:TopFGL",
    client_app="flower_fgl.client_apps.topfgl:TopFGLClientApp",
    settings=TopFGLSettings,
    payload="4(P + P_t) up, 4(P + P_t) down, P_t parameters of the topology learner",
    defaults={"hidden-channels": 128, "local-epochs": 2, "weight-decay": 1e-8},
    has_global_model=False,
    graphs=False,
    takes_batches=False,
    sends_mixtures=True,
    plans_rounds=True,
)
