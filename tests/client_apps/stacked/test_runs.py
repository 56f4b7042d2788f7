"""Stacked training equals training one by one, for every method that can be stacked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from flwr.app import Message, RecordDict

from flower_fgl import METHODS
from flower_fgl.client_apps.dispatch import Dispatcher
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.state import MemoryStates
from flower_fgl.client_apps.stacked.half import load_stacked
from flower_fgl.methods import parse_config
from flower_fgl.protocols.base import read_tensors, record_bytes
from flower_fgl.simulation.local import run_config_of
from flower_fgl.simulation.local_grid import LocalGrid, task_identity
from flower_fgl.strategies.base import FglStrategy
from flower_fgl.strategies.rounds.describe_exchange import discover
from flower_fgl.strategies.rounds.messenger import send_receive
from flower_fgl.strategies.rounds.round_log import RoundLog
from tests.support.short_runs import SMALL, shortened

STACKED = [
    "clustered-sampling",
    "fedavg",
    "feded",
    "fedntd",
    "fedper",
    "fedprox",
    "fedrep",
    "fedsem",
    "local",
]
CLIENTS = 5
TOLERANCE = 1e-5


@dataclass
class Stage:
    """A method after the describe exchange, with its clients in this process."""

    strategy: FglStrategy
    grid: LocalGrid
    session: Session

    def replies(self, server_round: int) -> dict[int, Message]:
        """Run the training exchange of a round, and aggregate it."""
        self.strategy.loop.log = RoundLog(server_round)
        sent = self.strategy.train_messages(
            server_round, self.strategy.sample(server_round)
        )
        messages = self.strategy.messenger.by_receiver(sent)
        exchange = send_receive(self.grid, messages, timeout=60)
        assert exchange.failures == []
        self.strategy.aggregate_train(server_round, exchange.replies.values())
        return exchange.replies

    def states(self) -> dict[int, Any]:
        """Return the clients' states by partition-id."""
        assert self.session.memory is not None
        return {pid: state for (_, pid), state in self.session.memory._states.items()}


@contextmanager
def stage(method: str, stacked: str, settings: dict[str, Any]) -> Iterator[Stage]:
    values = run_config_of(
        method=method,
        dataset="synthetic",
        clients=CLIENTS,
        seed=0,
        settings={**shortened(method, {**SMALL, **settings}), "stacked": stacked},
    )
    config = parse_config(values)
    session = Session(memory=MemoryStates())
    with task_identity(5):
        grid = LocalGrid(Dispatcher(session), CLIENTS, values, run_id=5)
        strategy = METHODS[method].load_strategy()(config)
        strategy.messenger.grid = grid
        strategy.federation = discover(grid, config)
        strategy.prepare()
        yield Stage(strategy, grid, session)


def assert_close(found: RecordDict, expected: RecordDict) -> None:
    """Compare two replies: names, bytes, arrays and metrics."""
    assert list(found) == list(expected)
    assert record_bytes(found) == record_bytes(expected)
    for name in expected.array_records:
        one, other = (
            read_tensors(content, name, is_checked=False)
            for content in (found, expected)
        )
        assert list(one) == list(other)
        for entry, tensor in other.items():
            torch.testing.assert_close(
                one[entry], tensor, atol=TOLERANCE, rtol=TOLERANCE, msg=entry
            )
    for name, metrics in expected.metric_records.items():
        assert found.metric_records[name].keys() == metrics.keys()
        for key, value in metrics.items():
            if not key.startswith("seconds/"):
                assert found.metric_records[name][key] == pytest.approx(
                    value, abs=TOLERANCE, nan_ok=True
                ), key


def compare(method: str, settings: dict[str, Any], rounds: int = 3) -> None:
    with (
        stage(method, "true", settings) as stacked,
        stage(method, "false", settings) as alone,
    ):
        for server_round in range(1, rounds + 1):
            found, expected = (s.replies(server_round) for s in (stacked, alone))
            assert found.keys() == expected.keys()
            for pid, reply in expected.items():
                assert_close(found[pid].content, reply.content)
            one, other = stacked.states(), alone.states()
            assert one.keys() == other.keys()
            for pid, state in other.items():
                assert one[pid].values == state.values
                assert one[pid].tensors.keys() == state.tensors.keys()
                for name, tensor in state.tensors.items():
                    torch.testing.assert_close(
                        one[pid].tensors[name], tensor, atol=TOLERANCE, rtol=TOLERANCE,
                        msg=lambda text, name=name: f"{name}: {text}",
                    )  # fmt: skip


def test_the_list_of_methods_that_can_be_stacked() -> None:
    session = Session(memory=MemoryStates())
    able = [
        name
        for name, row in METHODS.items()
        if load_stacked(row.load_client_app()(session)) is not None
    ]
    assert able == sorted(STACKED)


@pytest.mark.parametrize("method", STACKED)
def test_three_rounds_equal_those_one_by_one(method: str) -> None:
    compare(method, {})


@pytest.mark.parametrize("model", ["gamlp", "gin", "graphsage", "mlp", "sgc"])
def test_every_backbone_equals_one_by_one(model: str) -> None:
    compare("fedavg", {"model": model}, rounds=2)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd", "lr": 0.1},
        {"optimizer": "adamw"},
        {"optimizer_state": "reset"},
        {"participation": 0.6},
        {"batch_size": 7},
        {"upload_clip": 1e6},
        {"min_class_count": 3},
        {"weight_by": "equal", "num_layers": 3, "local_epochs": 1},
        {"absent_classes": "zero", "partition": "louvain"},
        {"model": "gcn:linear"},
    ],
    ids=lambda settings: ",".join(f"{k}={v}" for k, v in settings.items()),
)
@pytest.mark.parametrize("method", ["fedavg", "fedrep"])
def test_settings_equal_one_by_one(method: str, settings: dict[str, Any]) -> None:
    compare(method, settings)
