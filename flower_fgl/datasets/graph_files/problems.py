"""Error handling for checks of a file: raise the first error, or collect all."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from flower_fgl.core.errors import DataError

__all__ = ["ErrorCollector"]

P = ParamSpec("P")
T = TypeVar("T")


class ErrorCollector:
    """Run checks, and raise the first error or collect all errors.

    Parameters
    ----------
    collect : bool
        Whether to collect errors and continue; by default the first one is raised.
    """

    def __init__(self, *, collect: bool = False) -> None:
        self.collect = collect
        self.problems: list[str] = []

    def __call__(
        self, check: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Run one check.

        Parameters
        ----------
        check : callable
            Function that raises ``DataError`` if it finds a problem.
        *args, **kwargs
            Arguments of the check.

        Returns
        -------
        object
            Result of the check; ``None`` if its error was collected.

        Raises
        ------
        DataError
            Error of the check, unless errors are collected.
        """
        try:
            return check(*args, **kwargs)
        except DataError as error:
            if not self.collect:
                raise
            self.problems.append(str(error))
            return None
