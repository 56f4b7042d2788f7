"""Run the configurations of a grid, one after another or side by side in processes.

Processes that run side by side share the memory of the machine.
"""

import logging
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NoReturn, Protocol, Self

from flower_fgl.core.errors import ConfigError, FglError
from flower_fgl.core.options import Scalar
from flower_fgl.methods import parse_config
from flower_fgl.simulation.register import adopt_registered, pack_registered

__all__ = ["Job", "Send", "Watcher", "WorkerPool", "check_jobs", "logged_to"]
__all__ += ["run_jobs", "serve"]

STOP_SECONDS = 20.0
"""Seconds in which an interrupted run writes its status before its process is killed."""
GIB = 1 << 30
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
Send = Callable[[str, Any], None]
"""Sends a message of some kind from a job to the process that started it."""


@dataclass(frozen=True)
class Job:
    """One run: a name of its own, and its flat config with ``clients`` and ``run-dir``."""

    name: str
    settings: Mapping[str, Scalar]


RunJob = Callable[[Job, Send], Any]
"""Runs a job in a child process; its result is the content of the message ``end``."""


class Worker:
    """A process that knows what is registered here, and takes one job after another."""

    def __init__(self, run: RunJob) -> None:
        context = get_context("spawn")  # torch does not survive a fork
        self.connection, inner = context.Pipe()
        self.process = context.Process(
            target=_enter, args=(run, inner, pack_registered("jobs = 1")), daemon=True
        )
        with _child_environment():
            self.process.start()
        inner.close()
        self.job: Job | None = None

    def take(self, job: Job) -> None:
        """Give the process its next job."""
        self.job = job
        self.send(job)

    def send(self, content: Any) -> None:
        """Send something; a process that died is noticed when it is read."""
        with suppress(OSError):
            self.connection.send(content)

    def stop(self) -> None:
        """Tell the process to end; an active run becomes an interrupted one."""
        with suppress(OSError):
            self.connection.close()
        if self.job is not None:
            self.process.terminate()

    def join(self, seconds: float) -> None:
        """Wait for the end of the process, and kill it after some seconds."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class WorkerPool:
    """Runs jobs with a function of a module, in processes that share the memory.

    ``number`` of them run at once; 0 runs each job in this process as it starts. A job
    that does not fit into memory beside the active ones waits until one ends.

    ``receive`` gets the job, and kind and content of what it sends. Besides, the kinds are
    ``end`` with the result of a job, ``died`` with the exit status of its process, and
    ``hold`` with the reason why the first such job waits.
    """

    def __init__(
        self, run: RunJob, receive: Callable[[Job, str, Any], None], number: int
    ) -> None:
        self._run, self._receive, self._number = run, receive, number
        self._workers: list[Worker] = []
        self._held: list[Worker] = []
        self._has_held = False
        self._taken: dict[str, int] = {}  # estimates of the active jobs
        self._free = 0  # bytes before the first of them

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.join(STOP_SECONDS)
        self._workers.clear()

    @property
    def num_busy(self) -> int:
        """Number of processes that have a job."""
        return sum(worker.job is not None for worker in self._workers)

    @property
    def has_room(self) -> bool:
        """Whether another job can start now."""
        return self.num_busy < max(self._number, 1)

    def start(self, job: Job) -> None:
        """Run a job in an idle process, in a new one, or in this one."""
        if not self._number:
            self._receive(job, "end", self._run(job, partial(self._receive, job)))
            return
        for worker in [worker for worker in self._workers if worker.job is None]:
            if worker.process.is_alive():
                break
            worker.stop()  # it was killed while it had no job
            self._workers.remove(worker)
        else:
            worker = Worker(self._run)
            self._workers.append(worker)
        worker.take(job)

    def wait(self) -> None:
        """Wait until a busy process has sent something, and pass it on."""
        busy = {one.connection: one for one in self._workers if one.job is not None}
        for ready in connection.wait(list(busy)) if busy else ():
            worker = busy[ready]  # type: ignore[index]
            job = worker.job
            assert job is not None
            try:
                kind, content = worker.connection.recv()
            except (EOFError, OSError):
                worker.join(STOP_SECONDS)
                kind, content = "died", worker.process.exitcode
                worker.connection.close()
                self._workers.remove(worker)
            if kind == "memory":
                self._admit(worker, job, *content)
                continue
            if kind in ("end", "died"):
                worker.job = None
                self._taken.pop(job.name, None)
                for held in self._held:
                    held.send(False)  # it reports its memory again
                self._held.clear()
            self._receive(job, kind, content)

    def _admit(self, worker: Worker, job: Job, needed: int, free: int) -> None:
        """Start a job whose memory fits beside that of the others, else hold it.

        The estimates of all jobs together must fit into what was free before the first of
        them, since a job that has just started has not yet taken its part. A job alone is
        always admitted: it reports itself that it does not fit.
        """
        if not self._taken:
            self._free = free
        room = min(self._free - sum(self._taken.values()), free)
        if not self._taken or needed <= room:
            self._taken[job.name] = needed
            worker.send(True)
            return
        self._held.append(worker)
        if not self._has_held:
            self._has_held = True
            why = (
                f"It needs at least {needed / GIB:.1f} GiB of memory, and "
                f"{len(self._taken)} of the runs beside it leave "
                f"{max(room, 0) / GIB:.1f} of {self._free / GIB:.1f} GiB. It waits until "
                "one of them ends."
            )
            self._receive(job, "hold", why)


def _enter(run: RunJob, parent: Connection, extensions: bytes) -> None:
    """Run jobs in a child process, with the extensions of its parent."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    def follow() -> None:
        starter = parent_process()
        assert starter is not None
        starter.join()
        os.kill(os.getpid(), signal.SIGTERM)

    # Ctrl-C reaches all processes of a terminal; only the parent process answers it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, interrupt)
    # also in the middle of a round, in which nothing is sent
    threading.Thread(target=follow, daemon=True).start()
    adopt_registered(extensions)
    with suppress(KeyboardInterrupt):
        serve(parent, run)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this process ends now


@contextmanager
def _child_environment() -> Iterator[None]:
    """Let a process that starts inside use one thread, and not import this script.

    A script that calls this at its top level would start processes without end.
    """
    main = sys.modules["__main__"]
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))  # until its run sets a number
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def notes_once() -> Iterator[None]:
    """Log each note on the owners' data once, though all runs of a grid have it."""
    logger = logging.getLogger("flower_fgl.datasets.suspect")  # imports torch
    shown: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not (text in shown or shown.add(text))  # type: ignore[func-returns-value]

    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


@notes_once()
def serve(parent: Connection, run: RunJob) -> None:
    """Run one job after another, each when the parent process has memory for it.

    It ends when the parent closes the connection, or interrupts this process.
    """

    def send(kind: str, content: Any) -> None:
        try:
            parent.send((kind, content))
        except OSError:  # the parent process is gone
            raise KeyboardInterrupt from None

    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            job = parent.recv()
            may_start = False
            while not may_start:
                send("memory", needed_memory(job.settings))
                may_start = parent.recv()
            send("end", run(job, send))


def needed_memory(settings: Mapping[str, Scalar]) -> tuple[int, int]:
    """Return the bytes that a run needs at least (0 if unknown), and the free ones."""
    from flower_fgl.simulation.local import check_run, count_owners
    from flower_fgl.simulation.memory import available_memory, estimate_memory

    try:
        config = check_run(count_owners(settings))
        needed = sum(estimate_memory(config, engine="local").values())
    except Exception:  # the run reports it
        needed = 0
    return needed, available_memory()


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
    """Run all jobs; return the error message of each that failed, by name.

    ``side_by_side`` = 1 runs them in this process, one after another; more start as
    many processes of one thread, with the same numbers. A run whose estimated memory
    does not fit beside that of the active runs waits. Runs that were active at a Ctrl-C
    can resume.
    """
    check_jobs(side_by_side, engine, workers, client_gpus)
    _obtain_data(jobs)
    if side_by_side > 1:
        run = partial(_run, engine="local", workers=1)
        return _run_all(jobs, watcher, run, min(side_by_side, len(jobs)))
    run = partial(_run, engine=engine, workers=workers, client_gpus=client_gpus)
    return _run_all(jobs, watcher, run, 0)


def check_jobs(
    side_by_side: int, engine: str, workers: int | None, client_gpus: float
) -> None:
    """Reject options that contradict each other, as :func:`run_jobs` does."""
    if side_by_side < 1:
        raise ConfigError(f"jobs must be at least 1, got {side_by_side}.")
    if side_by_side > 1 and (engine == "ray" or workers or client_gpus):
        raise ConfigError(
            f"jobs = {side_by_side} gives each run one process: leave out workers, "
            "client-gpus and engine ray, or use jobs = 1."
        )


def _obtain_data(jobs: Sequence[Job]) -> None:
    from flower_fgl.datasets.store import obtain_data  # loads torch
    from flower_fgl.simulation.local import count_owners

    configs = []
    for job in jobs:
        try:
            configs.append(parse_config(count_owners(job.settings)))
        except FglError:  # the run reports it
            continue
    obtain_data(configs)


def _run(job: Job, send: Send, **how: Any) -> str:
    """Run one job, send its rounds and notes, and return its error, empty if completed."""
    # loads torch, which the process that starts the others does not need
    from flower_fgl.simulation.run import run_one

    with logged_to(partial(send, "note")):
        try:
            run_one(job.settings, on_round=partial(send, "round"), **how)
        except FglError as error:
            return str(error)
        except Exception as error:  # the other runs go on
            send("note", traceback.format_exc())
            return repr(error)
    return ""


@contextmanager
def logged_to(
    receive: Callable[[str], None], level: int = logging.WARNING
) -> Iterator[None]:
    """Pass the log records of this package, from some level on, to a function."""
    logger = logging.getLogger("flower_fgl")
    handler, before = logging.Handler(level), logger.level
    handler.emit = lambda record: receive(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(min(level, logger.getEffectiveLevel()))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _run_all(
    jobs: Sequence[Job], watcher: Watcher, run: RunJob, number: int
) -> dict[str, str]:
    """Run all jobs in a pool; return the errors by name."""
    errors: dict[str, str] = {}
    waiting = deque(jobs)

    def receive(job: Job, kind: str, content: Any) -> None:
        if kind == "round":
            watcher.round(job.name, content)
        elif kind in ("note", "hold"):
            watcher.note(job.name, content)
        else:
            if kind == "died":  # without an answer
                by_kill = content == -signal.SIGKILL
                why = ", perhaps for lack of memory" if by_kill else ""
                content = f"its process ended (exit status {content}){why}. Run the "
                content += "same command again to resume it."
            watcher.end(job.name, content)
            errors.update({job.name: content} if content else {})

    with notes_once(), WorkerPool(run, receive, number) as pool:
        while waiting or pool.num_busy:
            while waiting and pool.has_room:
                watcher.start(waiting[0].name)
                pool.start(waiting.popleft())
            pool.wait()
    return errors
