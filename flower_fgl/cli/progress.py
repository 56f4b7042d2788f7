"""Progress of the runs of a grid: bars in a terminal, plain lines elsewhere."""

import math
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeRemainingColumn,
)

from flower_fgl.cli.arguments import show
from flower_fgl.runs.summary import score_text

__all__ = ["GridProgress"]


class GridProgress:
    """Show the active runs of a grid, and the time left; ``quiet`` prints failures only.

    ``rounds`` holds the rounds of each run. The time left follows from the rounds so far
    without the first one, which includes the start of a process.
    """

    def __init__(
        self,
        console: Console,
        rounds: Mapping[str, int],
        *,
        quiet: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._rounds, self._quiet = console, rounds, quiet
        self._ended = 0
        self._tasks: dict[str, Task] = {}
        self._errors: dict[str, str] = {}
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=console,
            speed_estimate_period=math.inf,
            get_time=now,
            disable=quiet or not console.is_terminal,
        )
        self._whole = self._add("all runs", sum(rounds.values()), len(rounds) > 1)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def _add(self, name: str, rounds: int, is_visible: bool = True) -> Task:
        self._bars.add_task(name, total=rounds, visible=is_visible, numbers="")
        return self._bars.tasks[-1]

    def start(self, name: str) -> None:
        """Add the bar of a run."""
        self._tasks[name] = self._add(name, self._rounds[name])

    def round(self, name: str, row: Mapping[str, Any]) -> None:
        """Update the bar of a run."""
        task, phase, text = self._tasks[name], row["phase"], name
        if phase == "train":
            done = min(row["round"], self._rounds[name])
            if not task.completed and done > 1:  # it resumes: these took no time
                task.completed = done - 1
                self._whole.completed += done - 1
            self._bars.update(self._whole.id, advance=done - task.completed)
            self._bars.update(task.id, completed=done)
        else:
            text = f"{name}: {phase}"
        self._bars.update(task.id, description=text, numbers=score_text(row))

    def note(self, name: str, text: str) -> None:
        """Print a log line of a run."""
        if not self._quiet:
            show(f"{name}: {text}", self._console)

    def end(self, name: str, error: str) -> None:
        """Remove the bar of a run, and print how the run ended."""
        task, number = self._tasks.pop(name), len(self._rounds)
        self._ended += 1
        self._whole.completed += task.remaining or 0  # of a run that ended before
        self._bars.remove_task(task.id)
        if error:
            first = self._errors.setdefault(error, name)
            why = f". {error}" if first == name else f" as {first} did."
            show(f"{name}: failed{why}", self._console)
        elif not self._quiet:
            text = f"{name}: {_clock(task.elapsed)}  {task.fields['numbers']}"
            if number > 1:
                left = self._whole.time_remaining
                about = f", about {_clock(left)} left" if left else ""
                text += f"  ({self._ended} of {number} runs{about})"
            show(text, self._console)


def _clock(seconds: float | None) -> str:
    """Format seconds as ``h:mm:ss``."""
    return str(timedelta(seconds=round(seconds or 0)))
