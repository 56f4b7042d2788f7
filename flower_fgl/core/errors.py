"""Errors that a user can fix; the command line prints them without a traceback."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["ConfigError", "DataError", "FglError", "PayloadError", "RunError"]
__all__ += ["first_of", "hide_tracebacks", "one_line", "report_lack_of_memory"]

MAX_REASON = 500
"""Largest number of characters of a text that came from another party, in a log."""


def one_line(text: object, most: int = MAX_REASON) -> str:
    r"""Return foreign text as one line of at most ``most`` characters, others escaped."""
    words = " ".join(str(text)[: 4 * most].split())
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)
    return shown if len(shown) <= most else f"{shown[: most - 2]} …"


def first_of(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """List up to ``most`` names of a message, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


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


class _PlainErrors(logging.Filter):
    """Show errors that a user can fix by their message, without a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, FglError):
            record.msg, record.args, record.exc_info = str(error), (), None
        return True


PLAIN_ERRORS = _PlainErrors()


def hide_tracebacks(logger: logging.Logger) -> None:
    """Let a logger show an :class:`FglError` by its message, until the process ends."""
    logger.addFilter(PLAIN_ERRORS)
