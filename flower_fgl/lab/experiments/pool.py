"""Processes that run jobs side by side and share the memory of the machine."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NoReturn, Self

from flower_fgl.core.options import Scalar
from flower_fgl.simulation.register import adopt_registered, pack_registered

__all__ = ["Job", "Send", "WorkerPool", "notes_once", "serve"]

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
        with suppress(OSError):  # a process that died is noticed when it is read
            self.connection.send(job)

    def answer(self, *, may_start: bool) -> None:
        """Start the job, or let the process report its memory again."""
        with suppress(OSError):
            self.connection.send(may_start)

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


class MemoryRoom:
    """The memory that runs side by side share, by their estimates."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}
        self._free = 0
        self._held: list[Worker] = []

    def admit(self, worker: Worker, name: str, needed: int, free: int) -> str:
        """Start a run whose memory fits beside that of the others, else hold it; say why.

        The estimates of all runs together must fit into what was free before the first of
        them, since a run that has just started has not yet taken its part. A run alone is
        always admitted: it reports itself that it does not fit.
        """
        if not self._taken:
            self._free = free
        room = min(self._free - sum(self._taken.values()), free)
        if not self._taken or needed <= room:
            self._taken[name] = needed
            worker.answer(may_start=True)
            return ""
        self._held.append(worker)
        return (
            f"It needs at least {needed / GIB:.1f} GiB of memory, and {len(self._taken)} "
            f"of the runs beside it leave {max(room, 0) / GIB:.1f} of "
            f"{self._free / GIB:.1f} GiB. It waits until one of them ends."
        )

    def release(self, name: str) -> None:
        """Free the memory of a run that ended; the held ones report theirs again."""
        self._taken.pop(name, None)
        for worker in self._held:
            worker.answer(may_start=False)
        self._held.clear()


class WorkerPool:
    """Processes that run jobs with a function of a module, and share the memory.

    A job that does not fit into memory beside the active ones waits until one ends;
    ``on_hold`` gets the name and the reason of the first such job.
    """

    def __init__(
        self,
        run: RunJob,
        on_hold: Callable[[str, str], None] | None = None,
    ) -> None:
        self._run, self._on_hold = run, on_hold
        self._workers: list[Worker] = []
        self._room = MemoryRoom()

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

    def start(self, job: Job) -> None:
        """Run a job in an idle process, or in a new one."""
        for worker in [worker for worker in self._workers if worker.job is None]:
            if worker.process.is_alive():
                break
            worker.stop()  # it was killed while it had no job
            self._workers.remove(worker)
        else:
            worker = Worker(self._run)
            self._workers.append(worker)
        worker.take(job)

    def wait(self) -> Iterator[tuple[Job, str, Any]]:
        """Wait for the busy processes; yield jobs with the kind and content of a message.

        Besides what the jobs send, the kinds are ``end`` with the result of a job, and
        ``died`` with the exit status of its process.
        """
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
                why = self._room.admit(worker, job.name, *content)
                if why and self._on_hold is not None:
                    self._on_hold(job.name, why)
                    self._on_hold = None
                continue
            if kind in ("end", "died"):
                self._room.release(job.name)
                worker.job = None
            yield job, kind, content


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
        needed = estimate_memory(config, engine="local").total
    except Exception:  # the run reports it
        needed = 0
    return needed, available_memory()
