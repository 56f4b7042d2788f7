"""Run the configurations of a grid, one after another or side by side in processes."""

from __future__ import annotations

import logging
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from flower_fgl.core.errors import ConfigError, FglError
from flower_fgl.core.options import Scalar

__all__ = ["Job", "Watcher", "check_jobs", "run_jobs"]

STOP_SECONDS = 20.0
"""Seconds in which an interrupted run writes its status before its process is killed."""
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Job:
    """One run.

    Parameters
    ----------
    name : str
        Name, different from those of the other runs.
    settings : mapping of str to bool, int, float or str
        Flat run config with ``clients`` and ``run-dir``.
    """

    name: str
    settings: Mapping[str, Scalar]


class Watcher(Protocol):
    """Receives what happens in the runs; all calls come from one thread."""

    def start(self, name: str) -> None:
        """Note that a run starts."""

    def round(self, name: str, row: Mapping[str, Any]) -> None:
        """Receive the row of a round."""

    def note(self, name: str, text: str) -> None:
        """Receive a log line of a run."""

    def end(self, name: str, error: str) -> None:
        """Note that a run ended; ``error`` is empty if it completed."""


def run_jobs(
    jobs: Sequence[Job],
    watcher: Watcher,
    *,
    side_by_side: int = 1,
    engine: str = "auto",
    workers: int | None = None,
    client_gpus: float = 0.0,
) -> dict[str, str]:
    """Run all jobs; one that fails does not stop the others.

    Parameters
    ----------
    jobs : sequence of Job
        Runs, in the order in which they start.
    watcher : Watcher
        Receives starts, rounds, log lines and ends.
    side_by_side : int
        Runs at once. 1 runs them in this process, one after another; more start as many
        processes, each of which takes one run after another, with one thread. The
        numbers are the same.
    engine, workers, client_gpus
        See :func:`~flower_fgl.simulation.run.run_one`. Side by side, every run is in one
        process: ``engine`` must be ``"auto"`` or ``"local"``, the others unset.

    Returns
    -------
    dict of str to str
        Error message by name of each run that failed.

    Raises
    ------
    ConfigError
        If ``side_by_side`` is below 1, or does not go with the other options.
    KeyboardInterrupt
        After Ctrl-C. Runs that were active can resume.
    """
    check_jobs(side_by_side, engine, workers, client_gpus)
    if side_by_side == 1:
        return _one_by_one(jobs, watcher, engine, workers, client_gpus)
    return _side_by_side(jobs, watcher, min(side_by_side, len(jobs)))


def check_jobs(
    side_by_side: int, engine: str, workers: int | None, client_gpus: float
) -> None:
    """Reject options that contradict each other, as :func:`run_jobs` does.

    Raises
    ------
    ConfigError
        In the cases of :func:`run_jobs`.
    """
    if side_by_side < 1:
        raise ConfigError(f"jobs must be at least 1, got {side_by_side}.")
    if side_by_side > 1 and (engine == "ray" or workers or client_gpus):
        raise ConfigError(
            f"jobs = {side_by_side} gives each run one process: leave out workers, "
            "client-gpus and engine ray, or use jobs = 1."
        )


def _one_by_one(
    jobs: Sequence[Job],
    watcher: Watcher,
    engine: str,
    workers: int | None,
    client_gpus: float,
) -> dict[str, str]:
    """Run all jobs in this process."""
    errors = {}
    for job in jobs:
        watcher.start(job.name)
        error = _run(
            job,
            partial(watcher.round, job.name),
            partial(watcher.note, job.name),
            engine=engine,
            workers=workers,
            client_gpus=client_gpus,
        )
        watcher.end(job.name, error)
        if error:
            errors[job.name] = error
    return errors


def _run(
    job: Job,
    on_round: Callable[[Mapping[str, Any]], None],
    on_note: Callable[[str], None],
    **options: Any,
) -> str:
    """Run one job and return its error message, empty if it completed."""
    # loads torch, which the process that starts the others does not need
    from flower_fgl.simulation.run import run_one

    with _logged_to(on_note):
        try:
            run_one(job.settings, on_round=on_round, **options)
        except FglError as error:
            return str(error)
        except Exception as error:  # the other runs go on
            on_note(traceback.format_exc())
            return repr(error)
    return ""


@contextmanager
def _logged_to(on_note: Callable[[str], None]) -> Iterator[None]:
    """Pass the warnings of this package to a function."""
    logger = logging.getLogger("flower_fgl")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: on_note(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Worker:
    """A process that takes one run after another."""

    def __init__(self) -> None:
        self.connection, inner = get_context("spawn").Pipe()
        self.process: BaseProcess = get_context("spawn").Process(
            target=_work, args=(inner,), daemon=True
        )
        with _one_thread():
            self.process.start()
        inner.close()
        self.name = ""

    def take(self, job: Job) -> None:
        """Give the process its next run."""
        self.name = job.name
        self.connection.send(job)

    def stop(self, *, is_busy: bool) -> None:
        """Tell the process to end; an active run becomes an interrupted one."""
        with suppress(OSError):
            self.connection.close()
        if is_busy:
            self.process.terminate()

    def join(self, seconds: float) -> None:
        """Wait for the end of the process, and kill it after some seconds."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let a process that starts inside use one thread, until its run sets a number."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _side_by_side(jobs: Sequence[Job], watcher: Watcher, number: int) -> dict[str, str]:
    """Run all jobs in some processes."""
    waiting, errors = deque(jobs), dict[str, str]()
    workers: list[_Worker] = []
    busy: dict[Connection, _Worker] = {}
    try:

        def employ(worker: _Worker | None) -> None:
            if not waiting:
                return
            if worker is None:
                workers.append(worker := _Worker())
            job = waiting.popleft()
            watcher.start(job.name)
            worker.take(job)
            busy[worker.connection] = worker

        for _ in range(number):
            employ(None)
        while busy:
            for ready in connection.wait(list(busy)):
                assert isinstance(ready, Connection)
                worker: _Worker | None = busy[ready]
                assert worker is not None
                try:
                    kind, content = ready.recv()
                except (EOFError, OSError):
                    worker.join(STOP_SECONDS)
                    kind, content = "end", _why_died(worker.process.exitcode)
                if kind == "round":
                    watcher.round(worker.name, content)
                elif kind == "note":
                    watcher.note(worker.name, content)
                else:
                    del busy[ready]
                    watcher.end(worker.name, content)
                    if content:
                        errors[worker.name] = content
                    employ(worker if worker.process.is_alive() else None)
    finally:
        for one in workers:
            one.stop(is_busy=one.connection in busy)
        for one in workers:
            one.join(STOP_SECONDS)
    return errors


def _why_died(status: int | None) -> str:
    """Return an error message for a process that ended without an answer."""
    by_kill = status == -signal.SIGKILL
    return (
        f"its process ended (exit status {status})"
        f"{', perhaps for lack of memory' if by_kill else ''}. Run the same command again "
        "to resume it."
    )


def _work(parent: Connection) -> None:
    """Run the jobs that the parent process sends, until it closes the connection."""
    # Ctrl-C reaches all processes of a terminal; only the parent process answers it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _interrupt)

    def send(kind: str, content: Any) -> None:
        try:
            parent.send((kind, content))
        except OSError:  # the parent process is gone
            raise KeyboardInterrupt from None

    options: dict[str, Any] = {"engine": "local", "workers": 1}
    with suppress(KeyboardInterrupt, EOFError):
        while True:
            job = parent.recv()
            error = _run(job, partial(send, "round"), partial(send, "note"), **options)
            send("end", error)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this process ends now


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
