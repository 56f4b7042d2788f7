"""A process that stands in for a SuperNode, and a short folder for sockets."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flower_fgl.client_apps.worker import client as worker_client
from flower_fgl.client_apps.worker.socket_path import ParentProcess
from tests.support.flower_deployment import wait_until, workers_of


class Home:
    """The folder of one test's workers, and the process that they must not outlive."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"]
        )
        started = psutil.Process(self.process.pid).create_time()
        self.parent = ParentProcess(self.process.pid, started)

    def workers(self) -> list[psutil.Process]:
        """Return the running workers of this test."""
        return workers_of(self.parent.pid)

    def end_parent(self) -> None:
        """Kill the process that stands in for the SuperNode."""
        self.process.kill()
        self.process.wait(timeout=20)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    folder = Path(tempfile.mkdtemp(prefix="fgl", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    made = Home(folder)
    monkeypatch.setattr(worker_client, "find_parent_process", lambda: made.parent)
    try:
        yield made
    finally:
        made.end_parent()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not made.workers(), 10)
        for process in made.workers():
            process.kill()
        shutil.rmtree(folder)
