"""Progress of a run started from Python: a bar, or lines of text."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from flower_fgl.runs.files import OnRound, Row
from flower_fgl.runs.summary import describe_round

__all__ = ["show_progress"]

LINES = 10
"""Largest number of lines that a run prints where no bar can be drawn."""


@contextmanager
def show_progress(
    name: str, rounds: int, on_round: OnRound | None = None, *, first: int = 0
) -> Iterator[OnRound]:
    """Show the rounds of a run; yield the callback that gets the row of each round.

    A terminal and a notebook show a bar of tqdm. Elsewhere, e.g. in a log file, about
    ten lines are printed. ``on_round`` gets the rows as well; ``first`` rounds were
    complete before.
    """
    # a bar can be redrawn on a terminal and in a notebook
    is_notebook = type(sys.stderr).__module__.startswith("ipykernel")
    is_live = is_notebook or bool(getattr(sys.stderr, "isatty", lambda: False)())
    shown = _bar(name, rounds, first) if is_live else _lines(name, rounds, sys.stderr)
    with shown as show:

        def both(row: Row) -> None:
            show(row)
            if on_round is not None:
                on_round(row)

        yield both


@contextmanager
def _bar(name: str, rounds: int, first: int) -> Iterator[OnRound]:
    """Draw a bar with round, loss, accuracies and remaining time."""
    with warnings.catch_warnings():
        # without ipywidgets a notebook gets a bar of text
        warnings.filterwarnings("ignore", message="IProgress not found")
        from tqdm.auto import tqdm

        bar = tqdm(total=rounds, initial=first, desc=name, unit="round")
    with bar:

        def show(row: Row) -> None:
            if row["phase"] == "train":
                bar.update(min(int(row["round"]), rounds) - bar.n)
            else:
                bar.set_description(f"{name}, {row['phase']}", refresh=False)
            bar.set_postfix_str(describe_round(row))

        yield show


@contextmanager
def _lines(name: str, rounds: int, out: TextIO) -> Iterator[OnRound]:
    """Print a line for about every tenth part of the run."""
    step = math.ceil(rounds / LINES)

    def show(row: Row) -> None:
        number = int(row["round"])
        if row["phase"] != "train":
            print(f"{name}, {row['phase']}: {describe_round(row)}", file=out)
        elif number % step == 0 or number >= rounds:
            text = f"{name}, round {number} of {rounds}: {describe_round(row)}"
            print(text, file=out, flush=True)

    yield show
