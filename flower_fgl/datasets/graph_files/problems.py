"""Error handling for checks of a file: raise the first error, or collect all."""

import os
import unicodedata
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from flower_fgl.core.errors import DataError

__all__ = ["ErrorCollector", "clip", "has_control_characters", "show_path"]

LONGEST_VALUE = 80
"""Characters of a value that an error message quotes."""
LONGEST_PATH = 300
"""Characters of a path that an error message quotes."""
P = ParamSpec("P")
T = TypeVar("T")


class ErrorCollector:
    """Run checks, and raise the first error, or with ``collect`` list all errors."""

    def __init__(self, *, collect: bool = False) -> None:
        self.collect = collect
        self.problems: list[str] = []

    def __call__(
        self, check: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Run a check that may raise ``DataError``; ``None`` if its error was collected."""
        try:
            return check(*args, **kwargs)
        except DataError as error:
            if not self.collect:
                raise
            self.problems.append(str(error))
            return None

    def add(self, problem: str) -> None:
        """Raise a problem as a ``DataError``, or list it."""
        if not self.collect:
            raise DataError(problem)
        self.problems.append(problem)


def clip(text: object, longest: int = LONGEST_VALUE) -> str:
    """Return text for an error message: one printable line, which ends in ``…`` if cut."""
    given = str(text)
    shown = "".join(
        character if character.isprintable() else ascii(character)[1:-1]
        for character in given[: longest + 1]
    )
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def show_path(path: str | os.PathLike[str]) -> str:
    """Return a path for an error message; the end of a long path is shown."""
    text = str(path)
    shown = text if len(text) <= LONGEST_PATH else "…" + text[1 - LONGEST_PATH :]
    return clip(shown, 4 * LONGEST_PATH)


def has_control_characters(text: str) -> bool:
    """Return whether text holds a line break, another control character or a surrogate."""
    return not text.isprintable() and any(
        unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
        for character in text
    )
