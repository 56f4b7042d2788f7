"""Settings and row of FedSST, see ``algorithms.fedsst``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedSSTSettings"]


@dataclass(frozen=True)
class FedSSTSettings:
    """Settings of FedSST; "ours": the source does not give the value."""

    adapts_epochs: bool = option(True)
    """whether a client's epochs follow its weight; false: local-epochs"""
    fuses: bool = option(True)
    """whether a client mixes the received weights into its upload"""
    base: float = option(1.0, "b, score of every client; ours", ge=0)
    rise_weight: float = option(1.0, ge=0)
    """λ_f, weight of the part of the score that rises with the signal; ours"""
    rise_rate: float = option(1.0, "κ, how fast that part rises; ours", ge=0)
    middle_weight: float = option(1.0, ge=0)
    """λ_m, weight of the part for signals in the middle; ours"""
    middle_width: float = option(0.2, "σ, width of the middle; ours", gt=0)
    threshold: float = option(0.0, "score below which a client counts 0; ours", ge=0)
    epoch_rate: float = option(20.0, ge=0)
    """λ_reg, how fast the epochs rise with the weight; the paper: 20, 25 or 30, more for
    more domains"""
    min_epochs: int = option(1, "E_min, fewest epochs of a round; ours", ge=0)
    max_epochs: int = option(10, "E_max, most epochs of a round; ours", ge=1)
    min_fusion: float = option(0.1, ge=0, le=1)
    """α_min, share of the received weights at weight 0; ours"""
    max_fusion: float = option(0.9, ge=0, le=1)
    """α_max, share of the received weights at weight 1"""
    probe_mu: float = option(1.0, ge=0)
    """μ, strength of the class in the probe's features; ours"""


METHOD = Method(
    name="fedsst",
    paper="CVPR 2026",
    strategy="flower_fgl.strategies.partly_shared:FedSST",
    client_app="flower_fgl.client_apps.fedsst:FedSSTClientApp",
    settings=FedSSTSettings,
    payload="4(P_s+1) up, 4(P_s+1) down, P_s parameters of the layers between input and "
    "head",
    defaults={
        "model": "gin",
        "hidden-channels": 128,
        "local-epochs": 1,
        "batch-size": 128,
        "lr": 1e-3,
        "rounds": 200,
    },
    has_global_model=False,
    keeps_first_layer=True,
    keeps_head=True,
    models=("gin",),
    weighs_classes=True,
    unread=("weight-by",),
)
