"""Settings and row of FedIIH, see ``algorithms.fediih``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedpub import PersonalMixSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedIIHSettings"]


@dataclass(frozen=True)
class FedIIHSettings(PersonalMixSettings):
    """Settings of FedIIH."""

    factors: int = option(2, ge=1)
    """F, latent factors; each has hidden-channels numbers; the published code: Cora and
    CiteSeer 2, PubMed 4, Computers and Photo 6"""
    iterations: int = option(6, ge=1)
    """R, iterations of a routing layer; the published code: mostly 6"""
    scale: float = option(10.0, ge=0)
    """sharpness of the similarity of two clients; 0: equal weights"""


METHOD = Method(
    name="fediih",
    paper="Yu et al., AAAI 2025",
    strategy="flower_fgl.strategies.personal_mix:FedIIH",
    client_app="flower_fgl.client_apps.fediih:FedIIHClientApp",
    network="flower_fgl.algorithms.fediih:FedIIHNet",
    settings=FedIIHSettings,
    payload="4(P + Fp) up, 4P down, F factors of width p",
    defaults={
        "hidden-channels": 128,
        "num-layers": 4,
        "local-epochs": 1,
        "lr": 0.02,
        "weight-decay": 5e-3,
        "dropout": 0.3,
    },
    has_global_model=False,
    graphs=False,
    sends_mixtures=True,
)
