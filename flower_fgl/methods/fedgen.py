"""Settings and row of FedGen, see ``algorithms.fedgen``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedGenSettings"]


@dataclass(frozen=True)
class FedGenSettings(FedAvgSettings):
    """Settings of FedGen."""

    label_weight: float = option(10.0, ge=0)
    """weight of the cross-entropy of the client's head on generated embeddings"""
    latent_weight: float = option(10.0, ge=0)
    """weight of the divergence between predictions for nodes and for generated embeddings
    of their class"""
    decay: float = option(0.98, gt=0, le=1)
    """factor by which both weights fall in each round"""
    diversity_weight: float = option(1.0, ge=0)
    """weight of the generator's diversity loss"""
    noise_channels: int = option(32, "width of the generator's noise", ge=1)
    generator_channels: int = option(256, "width of its hidden layer", ge=1)
    generated: int = option(128, ge=2)
    """embeddings that are generated in a step, on server and clients"""
    server_steps: int = option(50, "steps of the generator per round", ge=0)
    server_lr: float = option(3e-4, "learning rate (Adam) of the generator", gt=0)


METHOD = Method(
    name="fedgen",
    paper="Zhu et al., ICML 2021",
    strategy="flower_fgl.strategies.fedgen:FedGen",
    client_app="flower_fgl.client_apps.fedgen:FedGenClientApp",
    settings=FedGenSettings,
    payload="4P up, 4(P + P_G + C) down, P_G parameters of the generator",
)
