"""Settings and row of FedAvg, see ``client_apps.fedavg``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedAvgSettings"]


@dataclass(frozen=True)
class FedAvgSettings:
    """Settings of FedAvg."""

    finetune_epochs: int = option(0, ge=0)
    """local epochs after the last round (fine-tuning); keeps the epoch with the best
    validation accuracy; 0: no fine-tuning"""


METHOD = Method(
    name="fedavg",
    paper="McMahan et al., AISTATS 2017",
    settings=FedAvgSettings,
    payload="4P up, 4P down",
    additive=True,
    robust=True,
    keeps_first_layer=True,
    keeps_head=True,
    predicts_links=True,
    weighs_classes=True,
    multi_label=True,
    numbers=True,
    reads_messages=True,
    shares_parts=True,
    samples_neighbors=True,
    stacks_checks=True,
)
