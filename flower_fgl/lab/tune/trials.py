"""Run the trials of a tuning study: in this process, or in processes that stay alive."""

import errno
import math
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_fgl.core.options import Scalar
from flower_fgl.lab.experiments.jobs import Job, Send, WorkerPool
from flower_fgl.runs.run import RunFolder
from flower_fgl.runs.summary import lost_finetuning

__all__ = ["CANNOT_WRITE", "Outcome", "TrialProcesses", "run_trial"]

CANNOT_WRITE = "The disk cannot be written"
"""Start of the error of a trial that does not count."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

KILLED = "The process that ran the trial was killed, perhaps because memory ran out."
ENDED = "The process that ran the trial ended with exit status {}."


@dataclass(frozen=True)
class Outcome:
    """What a trial shows on one draw. It holds no test score.

    ``score`` is that of validation in ``server_round``, ``None`` if the run failed,
    with the ``error``; ``metric`` is its name. A run ``diverged`` if the training loss of
    some round was not finite.
    """

    score: float | None
    server_round: int | None = None
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""
    diverged: bool = False
    metric: str = ""


def run_trial(settings: Mapping[str, Scalar], folder: Path) -> Outcome:
    """Run one configuration in a temporary folder, and keep its validation score only.

    A run that fails is an outcome. An error that begins with ``CANNOT_WRITE`` says
    nothing about the configuration.
    """
    # loads torch, once in each process
    from flower_fgl.simulation.run import run_one

    own: dict[str, Scalar] = {
        "run-dir": str(folder),
        "checkpoint-every": 0,
        "keep-checkpoint": False,
        "keep-client-models": False,
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
    metric = str(summary.get("metric", "accuracy"))
    score = scores.get("val", {}).get(metric)
    losses = [row.get("loss", 0.0) for row in run.rounds if row.get("phase") == "train"]
    diverged = any(loss is None or not math.isfinite(loss) for loss in losses)
    error = ""
    if lost_finetuning(summary, run.rounds):
        error = "The fine-tuning after the last round has no scores."
    elif summary["selection"] != "validation" or score is None:
        error = "The run has no validation score, by which settings are compared."
    if error or score is None:
        return Outcome(None, None, sent, seconds, error, diverged)
    number = int(scores["round"])
    return Outcome(float(score), number, sent, seconds, "", diverged, metric)


class TrialProcesses(WorkerPool):
    """A fixed number of processes that run trials; one job runs in this process.

    A trial whose process died runs once more, when no other trial is active. If its
    process dies again, it has failed. ``on_note`` gets why the first trial waits for
    memory.
    """

    def __init__(self, jobs: int, on_note: Callable[[str], None] | None = None) -> None:
        super().__init__(_run_in_worker, self._note, jobs if jobs > 1 else 0)
        self._on_note = on_note
        self._keys: dict[str, Any] = {}
        self._done: list[tuple[Any, Outcome]] = []
        self._again: list[Job] = []
        self._repeated: set[str] = set()

    @property
    def has_room(self) -> bool:
        """Whether another trial can start now."""
        return not self._again and not self._done and super().has_room

    def submit(self, key: Any, settings: Mapping[str, Scalar], folder: Path) -> None:
        """Start a trial if there is room; :meth:`outcomes` returns its ``key``."""
        self._keys[folder.name] = key
        self.start(Job(folder.name, {**settings, "run-dir": str(folder)}))

    def outcomes(self) -> list[tuple[Any, Outcome]]:
        """Wait until at least one trial has ended; return the keys and outcomes."""
        while not self._done and (self.num_busy or self._again):
            if not self.num_busy:
                self.start(self._again.pop(0))
            self.wait()
        out, self._done = self._done, []
        return out

    def _note(self, job: Job, kind: str, content: Any) -> None:
        """Note the outcome of a trial; run it again if its process died."""
        if kind == "hold":
            if self._on_note is not None:
                self._on_note(f"{job.name}: {content}")
            return
        if kind == "died":
            shutil.rmtree(str(job.settings["run-dir"]), ignore_errors=True)
            if job.name not in self._repeated:
                self._repeated.add(job.name)
                self._again.append(job)
                return
            was_killed = content == -signal.SIGKILL
            content = Outcome(
                None, error=KILLED if was_killed else ENDED.format(content)
            )
        self._done.append((self._keys.pop(job.name), content))


def _run_in_worker(job: Job, _: Send) -> Outcome:
    return run_trial(job.settings, Path(str(job.settings["run-dir"])))
