"""Settings and row of DENSE, see ``algorithms.dense``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "DenseSettings"]


@dataclass(frozen=True)
class DenseSettings:
    """Settings of DENSE."""

    finetune_epochs: int = option(20, ge=1)
    """local epochs on the distilled model; keeps the best of the epochs that check-every
    compares by validation accuracy"""
    server_epochs: int = option(200, ge=0)
    """epochs of the server; each adds a batch of generated nodes"""
    generator_steps: int = option(30, "steps of the generator per epoch", ge=1)
    generator_lr: float = option(1e-3, gt=0)
    """learning rate (Adam) of the generator and its noise"""
    generator_channels: int = option(256, ge=1)
    """width of the generator's hidden layers; ours"""
    feature_length: float = option(1.0, gt=0)
    """length of the features of a generated node; choose that of the clients' nodes;
    ours"""
    noise_channels: int = option(256, "width of its noise", ge=1)
    batch: int = option(256, "generated nodes in a batch", ge=2)
    neighbors: int = option(5, ge=1)
    """edges from each generated node to its nearest ones"""
    adversarial_weight: float = option(1.0, ge=0)
    """weight of the disagreement of ensemble and student"""
    student_lr: float = option(0.005, "learning rate (SGD) of the student", gt=0)
    tau: float = option(20.0, "temperature of the student's distillation", gt=0)


METHOD = Method(
    name="dense",
    paper="Zhang et al., NeurIPS 2022",
    strategy="flower_fgl.strategies.dense:Dense",
    settings=DenseSettings,
    payload="4P up, 8P down, once",
    defaults={"rounds": 1, "local-epochs": 200, "check-every": 10, "patience": 10},
    is_one_shot=True,
    graphs=False,
    takes_late_clients=False,
)
