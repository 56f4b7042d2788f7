"""FedGen's server half: the distribution of the classes that it sends."""

from __future__ import annotations

import pytest
import torch

from flower_fgl.client_apps.runtime.describe import describe
from flower_fgl.protocols.describe import Description
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.federation import Federation
from flower_fgl.strategies.fedgen import FedGen
from flower_fgl.strategies.rounds.round_log import RoundLog
from tests.support.random_clients import random_client

OWN = ([0], [1, 2])
"""Classes of each client's nodes. Of 15 training nodes the first client has 15 of class 0,
the second 8 of class 1 and 7 of class 2."""


def strategy_of(*, server_steps: int, shares_counts: bool = True) -> FedGen:
    settings = {"share-class-counts": shares_counts}
    clients: dict[int, Description] = {}
    for pid, classes in enumerate(OWN):
        client = random_client(
            "fedgen",
            partition_id=pid,
            classes=classes,
            settings=settings,
            server_steps=server_steps,
            generator_channels=4,
            generated=4,
        )
        clients[pid] = describe(
            client.data,
            client.config,
            place=(pid, len(OWN)),
            model="gcn",
            name="",
        )
    strategy = FedGen(client.config)
    strategy.federation = Federation(clients, {pid: 10 + pid for pid in clients})
    strategy.loop.log = RoundLog(1)
    strategy.prepare()
    return strategy


def classes_after_a_round(strategy: FedGen, partition_ids: list[int]) -> list[float]:
    """Aggregate one upload of each of some clients; return the next download's classes."""
    generator = torch.Generator().manual_seed(1)
    uploads = {
        pid: Upload(
            Weights(
                {
                    name: torch.randn(shape, generator=generator)
                    for name, shape in strategy.shapes.items()
                }
            ),
            15.0,
        )
        for pid in partition_ids
    }
    strategy.aggregate(1, uploads)
    found: list[float] = strategy.download(2, 0).classes.tolist()
    return found


@pytest.mark.parametrize("shares_counts", [True, False])
def test_no_class_is_drawn_before_the_generator_was_trained(
    shares_counts: bool,
) -> None:
    strategy = strategy_of(server_steps=0, shares_counts=shares_counts)
    assert strategy.download(1, 0).classes.tolist() == [0, 0, 0]
    assert classes_after_a_round(strategy, [0, 1]) == [0, 0, 0]


@pytest.mark.parametrize("partition_ids", [[0, 1], [1]])
def test_classes_are_drawn_by_the_training_nodes_of_all_clients(
    partition_ids: list[int],
) -> None:
    found = classes_after_a_round(strategy_of(server_steps=1), partition_ids)
    assert found == pytest.approx([15 / 30, 8 / 30, 7 / 30])


def test_classes_are_drawn_equally_often_if_counts_are_not_shared() -> None:
    strategy = strategy_of(server_steps=1, shares_counts=False)
    assert classes_after_a_round(strategy, [0, 1]) == pytest.approx([1 / 3] * 3)
