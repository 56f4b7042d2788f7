"""Checks of a file: stop at the first problem, or find them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from flower_fgl.core.errors import DataError

__all__ = ["ErrorCollector"]

P = ParamSpec("P")
T = TypeVar("T")


class ErrorCollector:
    """Run checks one by one.

    Parameters
    ----------
    collect : bool
        Whether to keep the problems and go on; by default the first one is raised.
    """

    def __init__(self, *, collect: bool = False) -> None:
        self.collect = collect
        self.problems: list[str] = []

    def __call__(
        self, check: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Run one check.

        Returns
        -------
        object
            What the check returns; ``None`` if it found a problem that was kept.

        Raises
        ------
        DataError
            What the check raises, unless problems are collected.
        """
        try:
            return check(*args, **kwargs)
        except DataError as error:
            if not self.collect:
                raise
            self.problems.append(str(error))
            return None
