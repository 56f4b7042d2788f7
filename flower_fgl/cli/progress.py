"""Progress of the runs of a grid: bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from flower_fgl.cli.arguments import show
from flower_fgl.runs.summary import score_text

__all__ = ["GridProgress", "TimeLeft", "clock"]


def clock(seconds: float | None) -> str:
    """Format seconds as ``m:ss`` or ``h:mm:ss``; empty for ``None``."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@dataclass
class _Cell:
    """Progress of one run."""

    kind: str
    rounds: int
    done: int = 0
    started: float | None = None
    first: tuple[int, float] | None = None
    """Number and time of the first round noted."""
    latest: float = 0.0
    """Time of the latest round."""
    seconds: float | None = None
    """Duration; ``None`` until the run ends."""

    @property
    def paced(self) -> tuple[int, float]:
        """Rounds after the first one noted, and the seconds that they took."""
        if self.first is None:
            return 0, 0.0
        return self.done - self.first[0], self.latest - self.first[1]

    @property
    def whole(self) -> tuple[int, float]:
        """Rounds of a run that ended, and its duration."""
        return (0, 0.0) if self.seconds is None else (self.done, self.seconds)


@dataclass
class TimeLeft:
    """Estimate of the seconds that the runs of a grid still take, some of them at once.

    A round takes as long as the rounds so far of the same row, or else of all runs. The
    first round of a run does not count: it includes the start of a process.
    """

    side_by_side: int
    cells: dict[str, _Cell] = field(default_factory=dict)

    def add(self, name: str, kind: str, rounds: int) -> None:
        """Add a run that waits."""
        self.cells[name] = _Cell(kind, rounds)

    def start(self, name: str, now: float) -> None:
        """Note that a run starts."""
        self.cells[name].started = now

    def round(self, name: str, number: int, now: float) -> None:
        """Note the last finished round of a run."""
        cell = self.cells[name]
        cell.done = max(cell.done, min(number, cell.rounds))
        cell.latest = now
        if cell.first is None:
            cell.first = (cell.done, now)

    def end(self, name: str, now: float) -> None:
        """Note that a run ended, after all rounds or before."""
        cell = self.cells[name]
        cell.seconds = 0.0 if cell.started is None else now - cell.started
        cell.rounds = cell.done

    def of_run(self, name: str) -> float | None:
        """Return the seconds that one run still takes, ``None`` if not known yet."""
        cell = self.cells[name]
        if cell.done == cell.rounds:
            return 0.0
        every = list(self.cells.values())
        alike = [one for one in every if one.kind == cell.kind]
        for group in (alike, every):
            # runs of a single round show only how long they took as a whole
            for counts in ([c.paced for c in group], [c.whole for c in group]):
                if rounds := sum(number for number, _ in counts):
                    spent = sum(seconds for _, seconds in counts)
                    return spent / rounds * (cell.rounds - cell.done)
        return None

    def __call__(self) -> float | None:
        """Return the seconds that all runs still take, ``None`` if not known yet."""
        left = [self.of_run(name) for name in self.cells]
        known = [seconds for seconds in left if seconds is not None]
        if not known or (None in left and not any(known)):
            return None
        return max(sum(known) / self.side_by_side, *known)


class GridProgress:
    """Show the active runs of a grid, and the time left; ``quiet`` prints failures only."""

    def __init__(
        self,
        console: Console,
        estimate: TimeLeft,
        *,
        quiet: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._estimate = estimate
        self._quiet = quiet
        self._now = now
        self._ended = 0
        self._tasks: dict[str, TaskID] = {}
        self._latest: dict[str, str] = {}
        self._errors: dict[str, str] = {}
        self._bars: Progress | None = None
        if console.is_terminal and not quiet:
            self._bars = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[left]}"),
                TextColumn("{task.fields[numbers]}"),
                console=console,
            )
            self._all = self._bars.add_task(
                "all runs",
                total=len(estimate.cells),
                left="",
                numbers="",
                visible=len(estimate.cells) > 1,
            )

    def __enter__(self) -> GridProgress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def start(self, name: str) -> None:
        """Add the bar of a run."""
        self._estimate.start(name, self._now())
        rounds = self._estimate.cells[name].rounds
        if self._bars is not None:
            self._tasks[name] = self._bars.add_task(
                name, total=rounds, left="starting", numbers=""
            )

    def round(self, name: str, row: Mapping[str, Any]) -> None:
        """Update the bar of a run."""
        now = self._now()
        if row["phase"] == "train":
            self._estimate.round(name, row["round"], now)
        self._latest[name] = score_text(row)
        if self._bars is not None:
            self._bars.update(
                self._tasks[name],
                description=name
                if row["phase"] == "train"
                else f"{name}: {row['phase']}",
                completed=self._estimate.cells[name].done,
                left=self._left(self._estimate.of_run(name)),
                numbers=self._latest[name],
            )
            self._bars.update(self._all, left=self._left(self._estimate()))

    def note(self, name: str, text: str) -> None:
        """Print a log line of a run."""
        if not self._quiet:
            show(f"{name}: {text}", self._console)

    def end(self, name: str, error: str) -> None:
        """Remove the bar of a run, and print how the run ended."""
        now = self._now()
        self._estimate.end(name, now)
        self._ended += 1
        left = self._left(self._estimate())
        if self._bars is not None:
            self._bars.remove_task(self._tasks.pop(name))
            self._bars.update(self._all, completed=self._ended, left=left)
        if error:
            first = self._errors.setdefault(error, name)
            why = f". {error}" if first == name else f" as {first} did."
            show(f"{name}: failed{why}", self._console)
        elif not self._quiet:
            seconds = clock(self._estimate.cells[name].seconds)
            text = f"{name}: {seconds}  {self._latest.get(name, '')}"
            if (number := len(self._estimate.cells)) > 1:
                text += f"  ({self._ended} of {number} runs{', ' * bool(left)}{left})"
            show(text, self._console)

    def _left(self, seconds: float | None) -> str:
        return "" if not seconds else f"about {clock(seconds)} left"
