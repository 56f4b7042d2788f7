"""A grid that moves its clients to worker processes when that saves time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from flwr.app import Message, MessageType

from flower_fgl.client_apps.runtime.state import MemoryStates
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.core.options import Scalar
from flower_fgl.simulation.local_grid import LocalGrid, OneRunGrid
from flower_fgl.simulation.memory import require_memory
from flower_fgl.simulation.workers import WorkerGrid, WorkerStates, start_workers

__all__ = ["GrowingGrid", "saves_time"]

log = logging.getLogger(__name__)
T = TypeVar("T")

START_SECONDS = 15.0
"""Seconds until worker processes have started and opened their graphs."""
WORTH_SECONDS = 15.0
"""Seconds that worker processes must save beyond their start."""
MEASURED_ROUND = 2
"""The round whose seconds are measured: the first one still fills caches."""


def saves_time(round_seconds: float, rounds_left: int, workers: int) -> bool:
    """Return whether worker processes end a run earlier than one process.

    Parameters
    ----------
    round_seconds : float
        Seconds that the clients of one round take in one process.
    rounds_left : int
        Rounds that are still to run.
    workers : int
        Number of worker processes.
    """
    alone = round_seconds * rounds_left
    return alone - alone / workers > START_SECONDS + WORTH_SECONDS


class GrowingGrid(OneRunGrid):
    """Grid that starts in this process and may move to worker processes in round 3.

    It is also the keeper of the client states. The numbers are the same in both places,
    because seconds must not change them: clients that train together stay here, and there
    are at most as many workers as stacks of clients.

    Parameters
    ----------
    grid : LocalGrid
        The clients in this process.
    memory : MemoryStates
        Their states.
    config : RunConfig
        Settings of the run.
    values : dict of str to bool, int, float or str
        The same settings, flat.
    workers : int
        Number of worker processes to move to.
    are_stacked : callable
        Returns whether clients have trained together.
    """

    always_answers = True

    def __init__(
        self,
        grid: LocalGrid,
        memory: MemoryStates,
        config: RunConfig,
        values: dict[str, Scalar],
        workers: int,
        are_stacked: Callable[[], bool],
    ) -> None:
        super().__init__(grid.run.run_id)
        self._grid: LocalGrid | WorkerGrid = grid
        self._keeper: MemoryStates | WorkerStates = memory
        self._config = config
        self._values = values
        self._workers = workers
        self._are_stacked = are_stacked
        self._seconds = 0.0
        self._round = 0
        self._is_decided = False
        self._stack = ExitStack()

    def __enter__(self) -> GrowingGrid:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def get_node_ids(self) -> list[int]:
        """Return the node IDs in arbitrary order."""
        return list(self._grid.get_node_ids())

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages; before those of round 3, decide where the clients run."""
        messages = list(messages)
        if not self._is_decided and messages:
            kind = messages[0].metadata.message_type
            number = int(messages[0].metadata.group_id or 0)
            if kind == MessageType.TRAIN and number != self._round:
                if self._round == MEASURED_ROUND:
                    self._decide(number)
                self._round, self._seconds = number, 0.0
        return self._timed(lambda: list(self._grid.push_messages(messages)))

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that have arrived."""
        return self._timed(lambda: list(self._grid.pull_messages(message_ids)))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Push messages and wait for all replies."""
        return list(self._grid.send_and_receive(messages, timeout=timeout))

    def save_states(self, run_id: int, folder: Path) -> None:
        """Write the state of every client to a folder."""
        self._keeper.save_states(run_id, folder)

    def load_states(self, run_id: int, folder: Path) -> None:
        """Replace the states of the clients by those of a folder."""
        self._keeper.load_states(run_id, folder)

    def _timed(self, work: Callable[[], T]) -> T:
        """Add the seconds of ``work`` to those of the round."""
        start = time.perf_counter()
        result = work()
        self._seconds += time.perf_counter() - start
        return result

    def _decide(self, server_round: int) -> None:
        """Start worker processes if that saves time, and move the clients there."""
        self._is_decided = True
        left = self._config.rounds - server_round + 1
        if self._are_stacked() or not saves_time(self._seconds, left, self._workers):
            return
        try:
            require_memory(self._config, engine="local", workers=self._workers)
        except RunError as error:
            log.info("The run stays in one process. %s", error)
            return
        log.info(
            "The clients take %.1f s per round in one process: the other %d rounds run in "
            "%d worker processes. Choose with --workers.",
            self._seconds,
            left,
            self._workers,
        )
        assert isinstance(self._grid, LocalGrid)
        assert isinstance(self._keeper, MemoryStates)
        run_id, partitions = self._grid.run.run_id, self._grid.partitions
        hosts = self._stack.enter_context(
            start_workers(
                self._values,
                num_clients=self._config.clients,
                run_id=run_id,
                workers=self._workers,
                cpus=self._config.threads,
            )
        )
        keeper = WorkerStates(hosts, self._config.clients)
        keeper.restore(self._keeper.of_run(run_id))
        self._grid, self._keeper = WorkerGrid(hosts, partitions, run_id), keeper
