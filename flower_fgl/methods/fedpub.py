"""Settings and row of FED-PUB, see ``client_apps.fedpub``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedPubSettings", "PersonalMixSettings"]


@dataclass(frozen=True)
class PersonalMixSettings:
    """Settings of a server half that averages separately for each client."""

    absent: str = option("mean", choices="mean last")
    """model that a client receives if it was not in the last round: the mean of that
    round's uploads, or its own last mixture"""


@dataclass(frozen=True)
class FedPubSettings(PersonalMixSettings):
    """Settings of FED-PUB."""

    tau: float = option(10.0, ge=0)
    """τ, sharpness of the attention between clients; 0: equal weights; the paper: 3 to
    10"""
    l1: float = option(1e-3, ge=0)
    """λ_1, weight of ‖ν‖_1; mask entries with a smaller magnitude are pruned"""
    l2: float = option(1e-3, ge=0)
    """λ_2, weight of the distance ‖θ − w‖_2 to the received weights"""


METHOD = Method(
    name="fed-pub",
    paper="Baek et al., ICML 2023",
    strategy="flower_fgl.strategies.personal_mix:FedPub",
    client_app="flower_fgl.client_apps.fedpub:FedPubClientApp",
    settings=FedPubSettings,
    payload="4(P+p) up, 4P down",
    defaults={"hidden-channels": 128},
    has_global_model=False,
    sends_mixtures=True,
)
