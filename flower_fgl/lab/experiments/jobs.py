"""Run the configurations of a grid, one after another or side by side in processes."""

import logging
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from flower_fgl.core.errors import ConfigError, FglError
from flower_fgl.lab.experiments.pool import (
    Job,
    Send,
    WorkerPool,
    notes_once,
)
from flower_fgl.methods import parse_config

__all__ = ["Job", "Watcher", "check_jobs", "logged_to", "run_jobs"]


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
        return _side_by_side(jobs, watcher, min(side_by_side, len(jobs)))
    errors: dict[str, str] = {}
    how = {"engine": engine, "workers": workers, "client_gpus": client_gpus}
    with notes_once():
        for job in jobs:
            watcher.start(job.name)
            on_round = partial(watcher.round, job.name)
            error = _run(job, on_round, partial(watcher.note, job.name), **how)
            watcher.end(job.name, error)
            errors |= {job.name: error} if error else {}
    return errors


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
    """Download missing datasets before the first run."""
    from flower_fgl.datasets.store import obtain_data  # loads torch
    from flower_fgl.simulation.local import count_owners

    configs = []
    for job in jobs:
        try:
            configs.append(parse_config(count_owners(job.settings)))
        except FglError:  # the run reports it
            continue
    obtain_data(configs)


def _run(
    job: Job,
    on_round: Callable[[Mapping[str, Any]], None],
    on_note: Callable[[str], None],
    **options: Any,
) -> str:
    """Run one job and return its error message, empty if it completed."""
    # loads torch, which the process that starts the others does not need
    from flower_fgl.simulation.run import run_one

    with logged_to(on_note):
        try:
            run_one(job.settings, on_round=on_round, **options)
        except FglError as error:
            return str(error)
        except Exception as error:  # the other runs go on
            on_note(traceback.format_exc())
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


def _side_by_side(jobs: Sequence[Job], watcher: Watcher, number: int) -> dict[str, str]:
    """Run all jobs in some processes; return the errors by name."""
    errors: dict[str, str] = {}
    waiting = deque(jobs)

    def start_next() -> None:
        if waiting:
            job = waiting.popleft()
            watcher.start(job.name)
            pool.start(job)

    with WorkerPool(_run_in_worker, watcher.note) as pool:
        for _ in range(number):
            start_next()
        while pool.num_busy:
            for job, kind, content in pool.wait():
                if kind in ("round", "note"):
                    getattr(watcher, kind)(job.name, content)
                    continue
                error = content
                if kind == "died":  # without an answer
                    by_kill = content == -signal.SIGKILL
                    why = ", perhaps for lack of memory" if by_kill else ""
                    error = f"its process ended (exit status {content}){why}. Run the "
                    error += "same command again to resume it."
                watcher.end(job.name, error)
                if error:
                    errors[job.name] = error
                start_next()
    return errors


def _run_in_worker(job: Job, send: Send) -> str:
    """Run one job, and send its rounds and notes."""
    on_round, on_note = partial(send, "round"), partial(send, "note")
    return _run(job, on_round, on_note, engine="local", workers=1)
