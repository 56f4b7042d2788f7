"""Settings and row of AdaFGL, see ``algorithms.adafgl``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "AdaFGLSettings"]


@dataclass(frozen=True)
class AdaFGLSettings:
    """Settings of AdaFGL."""

    finetune_epochs: int = option(200, ge=0)
    """epochs of the second step, which each client trains alone after the last round; 0:
    FedAvg"""
    finetune_lr: float = option(0.01, "learning rate (Adam) of the second step", gt=0)
    finetune_weight_decay: float = option(5e-4, "weight decay of the second step", ge=0)
    alpha: float = option(0.5, ge=0, le=1)
    """α, share of the graph in the propagation matrix, the rest are pairs of nodes with
    alike predictions; the published code: 0.05, OpenFGL: 0.5"""
    beta: float = option(0.2, ge=0, le=1)
    """β, share of these pairs in the signed messages, the rest is learned; the published
    code: 0.2, OpenFGL: 0"""
    steps: int = option(3, "k, propagation steps of the features", ge=1)
    width: int = option(64, "width of the hidden layers of the second step", ge=1)


METHOD = Method(
    name="adafgl",
    paper="Li et al., ICDE 2024",
    client_app="flower_fgl.client_apps.adafgl:AdaFGLClientApp",
    network="flower_fgl.algorithms.adafgl:AdaFGLNet",
    settings=AdaFGLSettings,
    payload="4P up, 4P down; 4P down once more for the second step",
    graphs=False,
    additive=True,
    robust=True,
)
