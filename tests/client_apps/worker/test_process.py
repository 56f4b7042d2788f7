"""A worker comes, is alone, and goes."""

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


def reached(home: Home, idle: float = 60.0) -> int:
    """Start a worker or find it; return its process number."""
    reach_worker(NODE, home.master, idle).close()
    (process,) = home.workers()
    return process.pid


def test_a_worker_stays_and_is_found_again(home: Home) -> None:
    assert reached(home) == reached(home)
    socket = worker_socket(NODE, home.master)
    assert socket.is_socket()
    assert socket.parent.stat().st_mode & 0o777 == 0o700


def test_another_node_config_has_a_worker_of_its_own(home: Home) -> None:
    reached(home)
    reach_worker({**NODE, "partition-id": 1}, home.master, 60.0).close()
    assert len(home.workers()) == 2


def test_of_processes_that_race_to_start_a_worker_one_wins(home: Home) -> None:
    failed: list[BaseException] = []

    def reach() -> None:
        try:
            reach_worker(NODE, home.master, 60.0).close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=reach) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failed
    assert len(home.workers()) == 1


def test_a_killed_worker_is_replaced_though_its_socket_is_left(home: Home) -> None:
    first = reached(home)
    os.kill(first, 9)
    wait_until(lambda: not home.workers())
    assert worker_socket(NODE, home.master).exists()
    assert reached(home) != first


@pytest.mark.parametrize("end", ["idle", "term", "supernode"])
def test_a_worker_ends_and_leaves_nothing(home: Home, end: str) -> None:
    pid = reached(home, idle=0.5 if end == "idle" else 60.0)
    if end == "term":
        os.kill(pid, 15)
    if end == "supernode":
        home.end_master()
    wait_until(lambda: not home.workers(), seconds=10)
    with contextlib.suppress(FileNotFoundError):
        assert not list(worker_socket(NODE, home.master).parent.iterdir())


def test_a_worker_finds_the_modules_that_its_starter_finds(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flower_fgl").mkdir()
    (tmp_path / "flower_fgl" / "__init__.py").write_text("raise RuntimeError\n")
    monkeypatch.chdir(tmp_path)  # `python -m` would look here first
    reached(home)
