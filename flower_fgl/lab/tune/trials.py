"""Run the trials of a tuning study: in this process, or in processes that stay alive."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flower_fgl.core.options import Scalar
from flower_fgl.lab.experiments.jobs import (
    Child,
    MemoryRoom,
    follow_parent,
    needed_memory,
    notes_once,
)
from flower_fgl.runs.run import RunFolder
from flower_fgl.runs.summary import lost_finetuning

__all__ = ["CANNOT_WRITE", "Outcome", "TrialProcesses", "run_trial"]

CANNOT_WRITE = "The disk cannot be written"
"""Start of the error of a trial that does not count."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

KILLED = "The process that ran the trial was killed, perhaps because memory ran out."
ENDED = "The process that ran the trial ended with exit status {}."
END_SECONDS = 5.0
"""Seconds in which the exit status of a process that closed its pipe is known."""


@dataclass(frozen=True)
class Outcome:
    """What a trial shows on one draw. It holds no test score.

    ``score`` is the validation accuracy, AUROC or RMSE of the best round
    (``server_round``), or after fine-tuning if the run ends with it; ``None`` if the
    run failed, with the ``error``. ``num_bytes`` are those of both directions,
    ``seconds`` those of the run; a run ``diverged`` if the training loss of some round
    was not finite.
    """

    score: float | None
    server_round: int | None = None
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""
    diverged: bool = False


def run_trial(settings: Mapping[str, Scalar], folder: Path) -> Outcome:
    """Run one configuration with the local engine, and keep its validation score only.

    The run folder is removed afterwards. A run that fails is an outcome, not an error.
    If the disk cannot be written, its error begins with ``CANNOT_WRITE``: that says
    nothing about the configuration.
    """
    # loads torch, once in each process
    from flower_fgl.simulation.run import run_one

    own: dict[str, Scalar] = {
        "run-dir": str(folder),
        "checkpoint-every": 0,
        "keep-checkpoint": False,
        "threads": 1,
    }
    started = time.monotonic()
    try:
        run = run_one({**settings, **own}, engine="local", workers=1)
        return _outcome(run, time.monotonic() - started)
    except Exception as error:  # a trial must not end the study
        text = str(error).partition("\nRun folder:")[0]
        if _is_disk(error):
            return Outcome(None, error=f"{CANNOT_WRITE}: {text}")
        return Outcome(
            None,
            seconds=time.monotonic() - started,
            error=f"{type(error).__name__}: {text}",
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_disk(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is that of a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            return True
        error = error.__cause__ or error.__context__
    return False


def _outcome(run: RunFolder, seconds: float) -> Outcome:
    """Return the validation score of the best round, and what the run cost."""
    summary = run.summary
    sent = summary["bytes"]["up"] + summary["bytes"]["down"]
    scores: Mapping[str, Any] = run.final or {}
    score = scores.get("val", {}).get(str(summary.get("metric", "accuracy")))
    losses = [row.get("loss", 0.0) for row in run.rounds if row.get("phase") == "train"]
    diverged = any(loss is None or not math.isfinite(loss) for loss in losses)
    if lost_finetuning(summary, run.rounds):
        error = "The fine-tuning after the last round has no scores."
        return Outcome(None, None, sent, seconds, error, diverged)
    if summary["selection"] != "validation" or score is None:
        error = "The run has no validation score, by which settings are compared."
        return Outcome(None, None, sent, seconds, error, diverged)
    return Outcome(float(score), int(scores["round"]), sent, seconds, "", diverged)


class TrialProcesses:
    """A fixed number of processes that run trials; each imports the library once.

    A trial whose estimated memory does not fit beside that of the active trials waits
    until one of them ends; ``on_note`` then gets one line of text. A trial whose
    process died, e.g. because somebody killed it or memory ran out, runs once more,
    when no other trial is active. If its process dies again, it has failed. With one
    job the trials run in this process.
    """

    def __init__(self, jobs: int, on_note: Callable[[str], None] | None = None) -> None:
        self._jobs = jobs
        self._on_note = on_note
        self._processes: list[_Process] = []
        self._done: list[tuple[Any, Outcome]] = []
        self._room = MemoryRoom()
        self._again: list[_Task] = []
        self.num_started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.stop()
        self._processes.clear()

    @property
    def has_room(self) -> bool:
        """Whether another trial can start now."""
        if self._again:
            return False
        busy = sum(process.key is not None for process in self._processes)
        return busy + len(self._done) < self._jobs

    @property
    def pids(self) -> list[int]:
        """Process IDs."""
        return [process.pid for process in self._processes]

    def submit(self, key: Any, settings: Mapping[str, Scalar], folder: Path) -> None:
        """Start a trial if :attr:`has_room` is true; :meth:`wait` returns its ``key``."""
        if self._jobs == 1:
            self._done.append((key, run_trial(settings, folder)))
            return
        self._start(_Task(key, settings, folder))

    def _start(self, task: _Task) -> None:
        """Start a trial in an idle process, or in a new one."""
        idle = [process for process in self._processes if process.key is None]
        for process in idle:
            if process.is_alive:
                break
            process.stop()  # it was killed while it had no trial
            self._processes.remove(process)
        else:
            process = _Process()
            self._processes.append(process)
            self.num_started += 1
        process.start_trial(task)

    def wait(self) -> list[tuple[Any, Outcome]]:
        """Wait until at least one trial has ended; return the keys and outcomes."""
        out, self._done = self._done, []
        while not out:
            busy = {p.connection: p for p in self._processes if p.key is not None}
            if not busy:
                if not self._again:
                    break
                self._start(replace(self._again.pop(0), is_repeat=True))
                continue
            for ready in wait(list(busy)):
                process = busy[ready]  # type: ignore[index]
                task, outcome = process.task, process.receive()
                if not isinstance(outcome, Outcome):
                    why = self._room.admit(process, process.name, *outcome)
                    if why and self._on_note is not None:
                        self._on_note(f"{process.name}: {why}")
                        self._on_note = None  # one line, whatever the number of trials
                    continue
                if process.is_stopped and not task.is_repeat:
                    self._again.append(task)
                else:
                    out.append((task.key, outcome))
                self._end(process)
        return out

    def _end(self, process: _Process) -> None:
        """Let the held trials report their memory again."""
        self._room.release(process.name)
        if process.is_stopped:
            self._processes.remove(process)


@dataclass(frozen=True)
class _Task:
    """A trial to run, and whether its process died before."""

    key: Any
    settings: Mapping[str, Scalar]
    folder: Path
    is_repeat: bool = False


class _Process(Child):
    """One process and the trial that it runs."""

    def __init__(self) -> None:
        super().__init__(_serve)
        self.key: Any = None
        self.task = _Task(None, {}, Path())

    @property
    def is_stopped(self) -> bool:
        """Whether the process died during a trial."""
        return self.connection.closed

    @property
    def is_alive(self) -> bool:
        """Whether the process can run another trial."""
        return self.process.is_alive()

    @property
    def pid(self) -> int:
        """Process ID."""
        return self.process.pid or 0

    def start_trial(self, task: _Task) -> None:
        """Send a trial to the process."""
        self.key, self.task = task.key, task
        with suppress(OSError):  # a process that died is noticed when it is read
            self.connection.send((dict(task.settings), task.folder))

    @property
    def name(self) -> str:
        """Name of the latest trial."""
        return self.task.folder.name

    def receive(self) -> Outcome | tuple[int, int]:
        """Return needed and free memory of a trial that may not start yet, or its outcome.

        A process that ended gives a failed outcome.
        """
        try:
            answer: Outcome | tuple[int, int] = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(END_SECONDS)
            status = self.process.exitcode
            self.stop()
            shutil.rmtree(self.task.folder, ignore_errors=True)
            answer = Outcome(
                None,
                error=KILLED if status == -signal.SIGKILL else ENDED.format(status),
            )
        if isinstance(answer, Outcome):
            self.key = None
        return answer

    def stop(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.kill()
        self.process.join()


def _serve(connection: Connection) -> None:
    """Run trials, each when the parent has memory for it, until the parent ends."""
    follow_parent(lambda: os._exit(1))  # a trial of a killed study must not continue
    _answer(connection)


@notes_once()
def _answer(connection: Connection) -> None:
    """Run trials until the parent closes the connection."""
    while True:
        try:
            settings, folder = connection.recv()
            may_start = False
            while not may_start:
                connection.send(needed_memory(settings))
                may_start = connection.recv()
            connection.send(run_trial(settings, folder))
        except (EOFError, OSError, KeyboardInterrupt):
            return
