"""Settings and row of FedGTA, see ``algorithms.fedgta``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedpub import PersonalMixSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedGTASettings"]


@dataclass(frozen=True)
class FedGTASettings(PersonalMixSettings):
    """Settings of FedGTA."""

    orders: int = option(10, ge=1)
    """n, highest order of the moments; the published code: Cora 6, CiteSeer 20, PubMed 13,
    others 10"""
    moments: str = option("hybrid", choices="raw central hybrid")
    """moments that describe a client: raw, central, or both (hybrid); the published code:
    PubMed raw, others hybrid"""
    threshold: float = option(0.5, ge=-1, le=1)
    """ε, cosine of the moments from which two clients are averaged; the published code:
    CiteSeer 0.6, PubMed 0.65, others 0.5"""
    propagation: str = option("reset", choices="reset add")
    """training nodes after each step of label propagation: reset to their class, or added
    to as in the published code"""


METHOD = Method(
    name="fedgta",
    paper="Li et al., VLDB 2024",
    strategy="flower_fgl.strategies.personal_mix:FedGTA",
    client_app="flower_fgl.client_apps.fedgta:FedGTAClientApp",
    settings=FedGTASettings,
    payload="4(P + 2nC + 1) up, 4P down, n orders",
    defaults={"model": "gamlp"},
    has_global_model=False,
    graphs=False,
    sends_mixtures=True,
)
