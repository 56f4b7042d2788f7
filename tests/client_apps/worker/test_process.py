"""Start and end of the worker process."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from flower_fgl.client_apps.worker.client import reach_worker
from flower_fgl.client_apps.worker.socket_path import worker_socket
from tests.client_apps.worker.conftest import Home
from tests.support.flower_deployment import wait_until

NODE = {"partition-id": 0, "num-partitions": 2}


def worker_pid(home: Home, idle: float = 60.0) -> int:
    """Start a worker or connect to it; return its process id."""
    reach_worker(NODE, home.parent, idle).close()
    (process,) = home.workers()
    return process.pid


def test_a_worker_persists_and_is_reused(home: Home) -> None:
    assert worker_pid(home) == worker_pid(home)
    socket = worker_socket(NODE, home.parent)
    assert socket.is_socket()
    assert socket.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.thorough
def test_each_node_config_has_its_own_worker(home: Home) -> None:
    worker_pid(home)
    reach_worker({**NODE, "partition-id": 1}, home.parent, 60.0).close()
    assert len(home.workers()) == 2


def test_concurrent_starts_leave_one_worker(home: Home) -> None:
    failed: list[BaseException] = []

    def reach() -> None:
        try:
            reach_worker(NODE, home.parent, 60.0).close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=reach) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failed
    assert len(home.workers()) == 1


@pytest.mark.thorough
def test_a_killed_worker_is_replaced_despite_its_leftover_socket(home: Home) -> None:
    first = worker_pid(home)
    os.kill(first, 9)
    wait_until(lambda: not home.workers())
    assert worker_socket(NODE, home.parent).exists()
    assert worker_pid(home) != first


@pytest.mark.thorough
@pytest.mark.parametrize("end", ["idle", "term", "supernode"])
def test_a_worker_removes_its_files_when_it_ends(home: Home, end: str) -> None:
    pid = worker_pid(home, idle=0.5 if end == "idle" else 60.0)
    if end == "term":
        os.kill(pid, 15)
    if end == "supernode":
        home.end_parent()
    wait_until(lambda: not home.workers(), seconds=10)
    with contextlib.suppress(FileNotFoundError):
        assert not list(worker_socket(NODE, home.parent).parent.iterdir())


def test_a_worker_has_the_module_path_of_its_starting_process(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flower_fgl").mkdir()
    (tmp_path / "flower_fgl" / "__init__.py").write_text("raise RuntimeError\n")
    monkeypatch.chdir(tmp_path)  # `python -m` would look here first
    worker_pid(home)
