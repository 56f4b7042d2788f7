"""Run the configurations of a grid, one after another or side by side in processes."""

from __future__ import annotations

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
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, Protocol

from flower_fgl.core.errors import ConfigError, FglError
from flower_fgl.core.extensions import Registered, adopt, registered
from flower_fgl.core.options import Scalar
from flower_fgl.methods import parse_config

__all__ = [
    "Child",
    "Job",
    "MemoryRoom",
    "Watcher",
    "check_jobs",
    "follow_parent",
    "needed_memory",
    "notes_once",
    "run_jobs",
]

STOP_SECONDS = 20.0
"""Seconds in which an interrupted run writes its status before its process is killed."""
GIB = 1 << 30
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Job:
    """One run: a name of its own, and its flat config with ``clients`` and ``run-dir``."""

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

    ``side_by_side`` = 1 runs them in this process, one after another; more start as
    many processes, each of which takes one run after another, with one thread. The
    numbers are the same. A run whose estimated memory does not fit beside that of the
    active runs waits until one of them ends. Side by side, ``engine`` must be
    ``"auto"`` or ``"local"``, and the others unset; see
    :func:`~flower_fgl.simulation.run.run_one`.

    Returns the error message of each run that failed, by name. Raises a ConfigError if
    the options contradict each other, or what this process registered cannot be sent to
    other processes; and a DataError before the first run if a dataset is missing.
    Runs that were active at a Ctrl-C can resume.
    """
    check_jobs(side_by_side, engine, workers, client_gpus)
    _obtain_data(jobs)
    if side_by_side == 1:
        return _one_by_one(jobs, watcher, engine, workers, client_gpus)
    return _side_by_side(jobs, watcher, min(side_by_side, len(jobs)))


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
    """Download missing datasets before the first run, see :func:`obtain_data`."""
    from flower_fgl.datasets.store import obtain_data  # loads torch
    from flower_fgl.simulation.local import count_owners

    configs = []
    for job in jobs:
        try:
            configs.append(parse_config(count_owners(job.settings)))
        except FglError:  # the run reports it
            continue
    obtain_data(configs)


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


class MemoryRoom:
    """The memory that runs side by side share, by their estimates."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}
        self._free = 0
        self._held: list[Child] = []

    def admit(self, child: Child, name: str, needed: int, free: int) -> str:
        """Start a run whose memory fits beside that of the others, else hold it.

        Returns why it is held, empty if it starts.
        """
        why = self.why_full(name, needed, free)
        if why:
            self._held.append(child)
        else:
            child.answer(may_start=True)
        return why

    def why_full(self, name: str, needed: int, free: int) -> str:
        """Take ``needed`` bytes for a run, of ``free`` ones, and return an empty text.

        Otherwise return why the run must wait. The estimates of all runs together must
        fit into what was free before the first of them, since a run that has just
        started has not yet taken its part. A run alone is always admitted: it reports
        itself that it does not fit.
        """
        if not self._taken:
            self._free = free
        taken = sum(self._taken.values())
        room = min(self._free - taken, free)
        if not self._taken or needed <= room:
            self._taken[name] = needed
            return ""
        return (
            f"It needs at least {needed / GIB:.1f} GiB of memory, and {len(self._taken)} "
            f"of the runs beside it leave {max(room, 0) / GIB:.1f} of "
            f"{self._free / GIB:.1f} GiB. It waits until one of them ends."
        )

    def release(self, name: str) -> None:
        """Free the memory of a run that ended; the held ones report theirs again."""
        self._taken.pop(name, None)
        for child in self._held:
            child.answer(may_start=False)
        self._held.clear()


class Child:
    """A process that runs what it is sent, once it may start."""

    def __init__(self, target: Callable[[Connection], None]) -> None:
        self.connection, self.process = start_child(target)

    def answer(self, *, may_start: bool) -> None:
        """Start the run, or let the process report its memory again."""
        with suppress(OSError):  # a process that died is noticed when it is read
            self.connection.send(may_start)


class _Worker(Child):
    """A process that takes one run after another."""

    def __init__(self) -> None:
        super().__init__(_work)
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


def start_child(
    target: Callable[[Connection], None],
) -> tuple[Connection, BaseProcess]:
    """Start a process of one thread that knows what is registered here.

    It runs ``target`` with its end of a pipe, and does not import the caller's script.
    To end even when this process is killed, the target calls :func:`follow_parent`.
    Returns this process's end of the pipe, and the process; raises a ConfigError if
    something registered cannot be sent.
    """
    context = get_context("spawn")  # torch does not survive a fork
    outer, inner = context.Pipe()
    process = context.Process(
        target=_enter, args=(target, inner, _extensions()), daemon=True
    )
    with _one_thread(), _without_main():
        process.start()
    inner.close()
    return outer, process


def _enter(
    target: Callable[[Connection], None],
    parent: Connection,
    extensions: Registered | None,
) -> None:
    """Run the function in a child process, with the extensions of its parent."""
    if extensions:
        adopt(extensions)
    target(parent)


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


@contextmanager
def _without_main() -> Iterator[None]:
    """Let a process that starts inside not import the caller's script.

    A script that calls this at its top level would start processes without end.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class _Extensions:
    """What :func:`flower_fgl.register` added here, e.g. classes of a notebook.

    A child process receives the registered rows in its place.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __reduce__(self) -> tuple[Callable[[bytes], Registered], tuple[bytes]]:
        from ray import cloudpickle

        return cloudpickle.loads, (self._content,)


def _extensions() -> _Extensions | None:
    """Return what is registered here; None without."""
    rows = registered()
    if not rows:
        return None
    from ray import cloudpickle

    try:
        return _Extensions(bytes(cloudpickle.dumps(rows)))  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever the objects' own state raises
        names = ", ".join(name for named in rows.values() for name in named)
        raise ConfigError(
            f"What this process registered ({names}) cannot be sent to other processes: "
            f"{type(error).__name__}: {str(error).splitlines()[0]}. Use jobs = 1, or put "
            "it into a package: flower-fgl new NAME writes one."
        ) from error


def _side_by_side(jobs: Sequence[Job], watcher: Watcher, number: int) -> dict[str, str]:
    """Run all jobs in some processes."""
    return _Pool(jobs, watcher).run(number)


class _Pool:
    """Processes that share runs and memory."""

    def __init__(self, jobs: Sequence[Job], watcher: Watcher) -> None:
        self._waiting = deque(jobs)
        self._watcher = watcher
        self._workers: list[_Worker] = []
        self._busy: dict[Connection, _Worker] = {}
        self._room = MemoryRoom()
        self._has_noted = False
        self._errors: dict[str, str] = {}

    def run(self, number: int) -> dict[str, str]:
        """Run all jobs, some at once; return the errors by name."""
        try:
            for _ in range(number):
                self._employ(None)
            while self._busy:
                for ready in connection.wait(list(self._busy)):
                    assert isinstance(ready, Connection)
                    self._receive(self._busy[ready])
        finally:
            for one in self._workers:
                one.stop(is_busy=one.connection in self._busy)
            for one in self._workers:
                one.join(STOP_SECONDS)
        return self._errors

    def _employ(self, worker: _Worker | None) -> None:
        """Give the next job to a process, or to a new one."""
        if not self._waiting:
            return
        if worker is None:
            self._workers.append(worker := _Worker())
        job = self._waiting.popleft()
        self._watcher.start(job.name)
        worker.take(job)
        self._busy[worker.connection] = worker

    def _receive(self, worker: _Worker) -> None:
        """Handle one message of a process."""
        try:
            kind, content = worker.connection.recv()
        except (EOFError, OSError):
            worker.join(STOP_SECONDS)
            kind, content = "end", _why_died(worker.process.exitcode)
        if kind == "round":
            self._watcher.round(worker.name, content)
        elif kind == "note":
            self._watcher.note(worker.name, content)
        elif kind == "memory":
            why = self._room.admit(worker, worker.name, *content)
            if why and not self._has_noted:
                self._watcher.note(worker.name, why)
                self._has_noted = True
        else:
            self._end(worker, content)

    def _end(self, worker: _Worker, error: str) -> None:
        """Note the end of a run, and go on with the held and the waiting runs."""
        self._room.release(worker.name)
        del self._busy[worker.connection]
        self._watcher.end(worker.name, error)
        if error:
            self._errors[worker.name] = error
        self._employ(worker if worker.process.is_alive() else None)


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
    # also in the middle of a round, in which nothing is sent
    follow_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))
    with suppress(KeyboardInterrupt, EOFError):
        _serve(parent)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this process ends now


def follow_parent(end: Callable[[], None]) -> None:
    """Call ``end``, in a thread of this child process, when its parent has ended."""
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        end()

    threading.Thread(target=follow, daemon=True).start()


@notes_once()
def _serve(parent: Connection) -> None:
    """Run one job after another, each when the parent process has memory for it."""

    def send(kind: str, content: Any) -> None:
        try:
            parent.send((kind, content))
        except OSError:  # the parent process is gone
            raise KeyboardInterrupt from None

    options: dict[str, Any] = {"engine": "local", "workers": 1}
    while True:
        job = parent.recv()
        may_start = False
        while not may_start:
            send("memory", needed_memory(job.settings))
            may_start = parent.recv()
        error = _run(job, partial(send, "round"), partial(send, "note"), **options)
        send("end", error)


def needed_memory(settings: Mapping[str, Scalar]) -> tuple[int, int]:
    """Return the bytes that a run of the local engine needs at least, and the free ones.

    The first number is 0 if the settings, which name the ``clients``, are wrong.
    """
    from flower_fgl.simulation.local import check_run, count_owners
    from flower_fgl.simulation.memory import available_memory, estimate_memory

    try:
        config = check_run(count_owners(settings))
        needed = estimate_memory(config, engine="local").total
    except Exception:  # the run reports it
        needed = 0
    return needed, available_memory()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
