"""A message process and the worker to which it sends its message."""

from __future__ import annotations

import logging
import math
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from flower_fgl import Run, simulate
from flower_fgl.client_app import DispatchingClientApp
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.worker import client as worker_client
from flower_fgl.client_apps.worker.client import ask_worker, idle_seconds
from flower_fgl.client_apps.worker.socket_path import worker_socket
from flower_fgl.client_apps.worker.wire import TAKEN, pack_answer, receive_request
from flower_fgl.core.errors import FglError, RunError
from flower_fgl.protocols.base import INFO
from flower_fgl.server_app import run_server
from flower_fgl.simulation.local import run_config_of
from flower_fgl.simulation.local_grid import LocalGrid, task_identity
from tests.client_apps.worker.conftest import Home
from tests.engines.test_run import numbers
from tests.support.flower_deployment import wait_until
from tests.support.short_runs import SMALL


def test_the_process_of_a_message_imports_no_torch() -> None:
    code = (
        "import flower_fgl.client_app, sys;"
        "print(sorted({'torch', 'torch_geometric', 'pandas', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("idle", [-1, math.nan, "600", True])
def test_an_invalid_worker_idle_is_rejected(idle: Any) -> None:
    context = Context(1, 1, {"worker-idle": idle}, RecordDict(), {})
    with task_identity(1):
        message = Message(RecordDict(), 1, "train")
    with pytest.raises(RunError, match=r"worker-idle must be a number of seconds.*got"):
        DispatchingClientApp()(message, context)


def test_without_worker_idle_there_is_no_worker(home: Home) -> None:
    assert idle_seconds({}) == idle_seconds({"worker-idle": 0}) == 0
    values = {"method": "no such method"}
    for node in ({}, {"worker-idle": 0}):
        context = Context(1, 1, node, RecordDict(), values)
        with task_identity(1):
            message = Message(RecordDict(), 1, "train")
        with pytest.raises(ValueError, match="no such method"):
            DispatchingClientApp()(message, context)
    kept = DispatchingClientApp(Session())
    context = Context(1, 1, {"worker-idle": 60}, RecordDict(), values)
    with pytest.raises(ValueError, match="no such method"):
        kept(message, context)
    assert not list(home.folder.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_killed_workers_do_not_change_the_numbers_of_a_run(
    home: Home, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {**SMALL, "evaluate": "both", "rounds": 3}
    settings |= {"optimizer_state": "keep"}
    expected = simulate("fedprox", clients=2, output_dir=str(tmp_path), **settings)
    settings["run_dir"] = str(tmp_path / "resident")
    values = run_config_of(
        method="fedprox", dataset="synthetic", clients=2, seed=0, settings=settings
    )
    seen: list[set[int]] = []

    def kill_one(line: Any) -> None:
        seen.append({process.pid for process in home.workers()})
        if len(seen) == 1:
            os.kill(min(seen[0]), 9)
            wait_until(lambda: len(home.workers()) == 1)

    run_id = secrets.randbits(40) + 1
    with task_identity(run_id):
        grid = LocalGrid(DispatchingClientApp(), 2, values, run_id)
        for number, context in enumerate(grid.contexts.values()):
            context.node_config["worker-idle"] = 60
            if number:
                context.node_config["state-dir"] = str(tmp_path / "state")
        run_server(grid, values, engine="local", on_round=kill_one)
    assert numbers(Run.load(tmp_path / "resident")) == numbers(expected)
    assert [len(pids) for pids in seen[:2]] == [2, 2]
    assert len(seen[0] & seen[1]) == 1
    assert seen[1] == seen[-1]


def answer_of(
    kind: str,
    node: dict[str, Any],
    values: dict[str, Any],
    app: DispatchingClientApp | None = None,
) -> Any:
    """Return the description of a reply, or the error."""
    context = Context(1, 1, node, RecordDict(), values)
    with task_identity(1):
        message = Message(RecordDict(), 1, kind)
    try:
        reply = (app or DispatchingClientApp())(message, context)
    except Exception as error:
        return error
    return dict(reply.content.config_records[INFO])


@pytest.mark.thorough
def test_a_worker_gives_the_same_replies_and_errors_as_this_process(home: Home) -> None:
    values = run_config_of(
        method="fedavg", dataset="synthetic", clients=2, seed=0, settings=SMALL
    )
    node = {"partition-id": 0, "num-partitions": 2}
    by_worker = {**node, "worker-idle": 60}
    assert answer_of("query.describe", node, values) == answer_of(
        "query.describe", by_worker, values
    )
    (worker,) = home.workers()
    here, there = (answer_of("train", config, values) for config in (node, by_worker))
    assert isinstance(here, FglError)
    assert isinstance(there, FglError)
    assert str(here) == str(there)
    here, there = (
        answer_of("query.describe", config, {"method": "fedagv"})
        for config in (node, by_worker)
    )
    assert here == there
    assert here["unfit"].startswith('Unknown method "fedagv".')
    assert home.workers() == [worker]

    class Changing(DispatchingClientApp):
        def __call__(self, message: Message, context: Context) -> Message:
            reply = super().__call__(message, context)
            reply.content[INFO] = ConfigRecord({"changed": os.getpid()})
            return reply

    changed = answer_of("query.describe", by_worker, values, Changing())
    assert changed == {"changed": os.getpid()}
    assert home.workers() == [worker]


Behaviour = Callable[[Connection], object]


@contextmanager
def pretend_worker(address: Path, behave: Behaviour) -> Iterator[None]:
    """Run a thread that behaves like a worker, or misbehaves."""

    def work() -> None:
        with listener.accept() as connection:
            behave(connection)

    with Listener(str(address), family="AF_UNIX") as listener:
        thread = threading.Thread(target=work)
        thread.start()
        yield
        thread.join(timeout=20)


class Case:
    """One message for a worker that fails."""

    def __init__(self, home: Home, state: Path) -> None:
        node = {"worker-idle": 60, "graph": "a.npz", "state-dir": str(state)}
        self.context = Context(3, 1, node, RecordDict(), {})
        with task_identity(3):
            self.message = Message(RecordDict(), 1, "train")
        self.address = worker_socket(node, home.parent)
        self.here = 0

    def ask(self, behave: Behaviour) -> Message:
        def instead(message: Message, context: Context) -> Message:
            self.here += 1
            return Message(RecordDict(), reply_to=message)

        with pretend_worker(self.address, behave):
            return ask_worker(self.message, self.context, idle=60.0, instead=instead)


@pytest.fixture
def case(home: Home, tmp_path: Path) -> Case:
    state = tmp_path / "state"
    state.mkdir()
    (state / "3-000000.safetensors").write_bytes(b"before")
    (state / "4-000000.safetensors").write_bytes(b"another run")
    return Case(home, state)


def dies(connection: Connection) -> None:
    connection.send_bytes(TAKEN)
    receive_request(connection)


def sends_garbage(connection: Connection) -> None:
    dies(connection)
    connection.send_bytes(b"\x80\x04K\x01.")


def is_not_a_worker(connection: Connection) -> None:
    connection.send_bytes(b"good day")
    connection.poll(20)


def never_answers(connection: Connection) -> None:
    connection.poll(20)


@pytest.mark.parametrize(
    "behave", [dies, sends_garbage, is_not_a_worker, never_answers]
)
def test_a_message_is_handled_here_with_a_warning_if_the_worker_fails(
    case: Case,
    behave: Behaviour,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_client, "BUSY_SECONDS", 1.0)
    with caplog.at_level(logging.WARNING, worker_client.__name__):
        case.ask(behave)
    assert case.here == 1
    (line,) = caplog.messages
    assert line.startswith("The message is handled without a worker: ")


def test_a_new_worker_may_take_long_to_import_torch(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:

        def accept_late(connection: Connection) -> None:
            time.sleep(0.5)
            connection.send_bytes(TAKEN)

        def start(address: Path, *_: object) -> None:
            stack.enter_context(pretend_worker(address, accept_late))

        monkeypatch.setattr(worker_client, "BUSY_SECONDS", 0.1)
        monkeypatch.setattr(worker_client, "_start", start)
        node = {"partition-id": 0, "num-partitions": 2}
        worker_client.reach_worker(node, home.parent, 60.0).close()


@pytest.mark.parametrize("changed", [3, 4])
def test_a_message_is_not_handled_twice_after_its_state_was_stored(
    case: Case, tmp_path: Path, changed: int
) -> None:
    path = tmp_path / "state" / f"{changed}-000000.safetensors"

    def saves_and_dies(connection: Connection) -> None:
        dies(connection)
        scratch = path.with_suffix(".tmp")
        scratch.write_bytes(b"after")
        os.replace(scratch, path)

    if changed == 4:  # the state file of another run
        case.ask(saves_and_dies)
        assert case.here == 1
        return
    with pytest.raises(RunError, match="after it had stored the client's state"):
        case.ask(saves_and_dies)
    assert case.here == 0


def test_the_context_gets_the_state_from_the_worker(case: Case) -> None:
    def answers(connection: Connection) -> None:
        connection.send_bytes(TAKEN)
        message, context = receive_request(connection)
        context.state["more"] = message.content["x"]
        for frame in pack_answer(Message(RecordDict(), reply_to=message), context):
            connection.send_bytes(frame)

    case.message.content["x"] = ConfigRecord({"a": 1})
    case.ask(answers)
    assert case.here == 0
    assert case.context.state["more"] == ConfigRecord({"a": 1})


def test_no_worker_is_used_if_flower_installs_packages_per_message(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["flwr-clientapp", worker_client.INSTALLING])
    reply = ask_worker(
        case.message,
        case.context,
        idle=60.0,
        instead=lambda message, _: Message(RecordDict(), reply_to=message),
    )
    assert reply.has_content()
    assert "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1" in caplog.text
