"""Errors that a user can fix; the command line prints them without a traceback."""

import logging
import os
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

__all__ = ["ConfigError", "DataError", "ErrorCollector", "FglError", "PayloadError"]
__all__ += ["RunError", "clip", "first_of", "has_control_characters"]
__all__ += ["hide_traceback", "one_line", "refuse", "report_lack_of_memory"]
__all__ += ["show_path"]

MAX_REASON = 500
"""Largest number of characters of a text that came from another party, in a log."""
LONGEST_VALUE = 80
"""Characters of a value that an error message quotes."""
LONGEST_PATH = 300
"""Characters of a path that an error message quotes."""
P = ParamSpec("P")
T = TypeVar("T")


def one_line(text: object, most: int = MAX_REASON) -> str:
    r"""Return foreign text as one line of at most ``most`` characters, others escaped."""
    words = " ".join(str(text)[: 4 * most].split())
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)
    return shown if len(shown) <= most else f"{shown[: most - 2]} …"


def first_of(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """List up to ``most`` names of a message, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


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


class FglError(ValueError):
    """Base class of all errors that a user can fix; the message says how."""


class ConfigError(FglError):
    """A setting is unknown, of the wrong type or out of range."""


class DataError(FglError):
    """A dataset or graph file is missing, malformed or does not match the run."""


class PayloadError(FglError):
    """A message violates its protocol; the text, which may quote it, is shortened."""

    def __init__(self, text: object = "") -> None:
        super().__init__(one_line(text))


class RunError(FglError):
    """A run cannot start, continue or resume."""


def refuse(
    reasons: Mapping[str, object], error: type[ValueError] = ConfigError
) -> None:
    """Raise an error with the first of the texts whose reason holds."""
    for text, holds in reasons.items():
        if holds:
            raise error(text)


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


LACK_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")
"""Parts of the messages of torch's allocators; its errors are of the type RuntimeError."""


@contextmanager
def report_lack_of_memory() -> Iterator[None]:
    """Raise a :class:`RunError` for a ``MemoryError`` or a failed allocation of torch."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        is_lack = any(part in text for part in LACK_OF_MEMORY)
        if not (isinstance(error, MemoryError) or is_lack):
            raise
        raise RunError(
            f"The memory is too small for this run: {one_line(text) or 'MemoryError'}. Use "
            "a smaller graph or backbone (hidden-channels, num-layers), or a machine with "
            "more memory."
        ) from error


def hide_traceback(record: logging.LogRecord) -> bool:
    """Filter of loggers that shows an :class:`FglError` by its message only."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, FglError):
        record.msg, record.args, record.exc_info = str(error), (), None
    return True
