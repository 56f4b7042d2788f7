"""Errors that a user can fix; the command line prints them without a traceback."""

from __future__ import annotations

__all__ = ["ConfigError", "DataError", "FglError", "PayloadError", "RunError"]


class FglError(ValueError):
    """Base class of all errors that a user can fix; the message says how."""


class ConfigError(FglError):
    """A setting is unknown, of the wrong type or out of range."""


class DataError(FglError):
    """A dataset or graph file is missing, malformed or does not match the run."""


class PayloadError(FglError):
    """A message violates its protocol."""


class RunError(FglError):
    """A run cannot start, continue or resume."""
