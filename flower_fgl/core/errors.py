"""Errors a user can mend: the command line prints them without a traceback."""

from __future__ import annotations

__all__ = ["ConfigError", "DataError", "FglError", "PayloadError", "RunError"]


class FglError(ValueError):
    """Base of all errors whose message says what to do."""


class ConfigError(FglError):
    """A setting is unknown, of the wrong type or out of range."""


class DataError(FglError):
    """A data set or a graph file is missing, malformed or does not fit."""


class PayloadError(FglError):
    """A message does not hold what its protocol promises."""


class RunError(FglError):
    """A run cannot go on."""
