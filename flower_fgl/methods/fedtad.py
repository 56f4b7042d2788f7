"""Settings and row of FedTAD, see ``algorithms.fedtad``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedTADSettings"]


@dataclass(frozen=True)
class FedTADSettings(FedAvgSettings):
    """Settings of FedTAD."""

    server_epochs: int = option(5, ge=0)
    """times a round that the server trains generator and model; 0: FedAvg"""
    generator_steps: int = option(1, "steps of the generator in each", ge=0)
    model_steps: int = option(5, "steps of the global model in each", ge=0)
    server_lr: float = option(1e-3, "learning rate of both on the server", gt=0)
    nodes: int = option(100, "nodes of a generated graph, at least one a class", ge=1)
    output: str = option("tanh", choices="tanh linear")
    """last activation of the generator: tanh, or none as in the published code (linear)"""
    neighbors: int = option(5, ge=1)
    """nearest nodes to which a generated node is connected"""


METHOD = Method(
    name="fedtad",
    paper="Zhu et al., IJCAI 2024",
    strategy="flower_fgl.strategies.fedtad:FedTAD",
    client_app="flower_fgl.client_apps.fedtad:FedTADClientApp",
    settings=FedTADSettings,
    payload="4(P + C) up, 4P down",
    graphs=False,
    weighs_classes=True,
)
