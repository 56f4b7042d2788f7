"""A method after the describe exchange, with its clients in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from flwr.app import Message, RecordDict

from flower_fgl.client_app import DispatchingClientApp
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.state import MemoryStates
from flower_fgl.methods import parse_config
from flower_fgl.simulation.local import run_config_of
from flower_fgl.simulation.local_grid import LocalGrid, task_identity
from flower_fgl.strategies.base import FglStrategy
from flower_fgl.strategies.rounds.discovery import discover
from flower_fgl.strategies.rounds.messenger import send_receive
from flower_fgl.strategies.rounds.round_log import RoundLog
from flower_fgl.testing.case import Contract, MethodCase

__all__ = ["Stage", "StageContract", "content_bytes"]


@dataclass
class Stage:
    """A method after the describe exchange, with three clients in this process.

    ``session`` has the state of the clients, ``sent`` the messages of the last exchange
    by partition-id.
    """

    strategy: FglStrategy
    grid: LocalGrid
    session: Session
    sent: Mapping[int, Message] = field(default_factory=dict)

    def replies(self, server_round: int) -> dict[int, Message]:
        """Run the training exchange of a round."""
        self.strategy.loop.log = RoundLog(server_round)
        sent = self.strategy.train_messages(
            server_round, self.strategy.federation.trainable
        )
        self.sent = messages = self.strategy.messenger.by_receiver(sent)
        return send_receive(self.grid, messages, timeout=60).replies

    def next_download(self) -> bytes:
        """Return the next download of client 0 as bytes."""
        return content_bytes(self.strategy.download(99, 0).to_record())

    def forget_evaluation(self) -> None:
        """Let the clients answer the evaluation of this round again."""
        assert self.session.memory is not None
        for state in self.session.memory._states.values():
            del state.values["answered/evaluate"]

    def stored(self) -> dict[Any, Any]:
        """Return the states of all clients in a comparable form."""
        assert self.session.memory is not None
        return {
            key: (
                {name: tensor.tolist() for name, tensor in state.tensors.items()},
                dict(state.values),
            )
            for key, state in self.session.memory._states.items()
        }


def content_bytes(content: RecordDict) -> bytes:
    """Return the names and bytes of all arrays of a message, and its config."""
    return (
        b"".join(
            name.encode() + array.data
            for record in content.array_records.values()
            for name, array in record.items()
        )
        + repr(sorted((k, dict(v)) for k, v in content.config_records.items())).encode()
    )


class StageContract(Contract):
    """Base of the tests that look at single exchanges of a method."""

    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        """Additional settings of the stage; a test may override them."""
        return {}

    @pytest.fixture
    def stage(self, case: MethodCase, settings: dict[str, Any]) -> Iterator[Stage]:
        """Prepare the server half; three clients are described."""
        values = case.settings(**settings)
        config = run_config_of(
            method=values.pop("method"),
            dataset="synthetic",
            clients=values.pop("clients"),
            seed=0,
            settings=values,
        )
        parsed = parse_config(config)
        session = Session(memory=MemoryStates())
        with task_identity(5):
            grid = LocalGrid(DispatchingClientApp(session), 3, config, run_id=5)
            strategy = case.row.load_strategy()(parsed)
            strategy.messenger.grid = grid
            strategy.federation = discover(grid, parsed)
            strategy.prepare()
            yield Stage(strategy, grid, session)
