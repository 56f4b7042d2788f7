"""Workers of a pool in threads of this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from flower_fgl.lab.experiments import jobs

__all__ = ["use_threads"]


def use_threads(
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[[jobs.Job, jobs.Send], Any],
    memory: tuple[int, int] = (1, 10),
) -> None:
    """Let threads run the jobs of a pool; all need and find the same memory."""

    class ThreadWorker(jobs.Worker):
        def __init__(self, _: Any) -> None:
            self.connection, inner = Pipe()
            self.job = None
            self.thread = threading.Thread(target=answer, args=(inner,), daemon=True)
            self.thread.start()
            self.process = SimpleNamespace(  # type: ignore[assignment]
                exitcode=-signal.SIGKILL,
                is_alive=self.thread.is_alive,
                terminate=lambda: None,
            )

        def join(self, seconds: float) -> None:
            self.thread.join(seconds)

    def answer(inner: Any) -> None:
        jobs.serve(inner, run)
        inner.close()

    monkeypatch.setattr(jobs, "Worker", ThreadWorker)
    monkeypatch.setattr(jobs, "needed_memory", lambda _: memory)
