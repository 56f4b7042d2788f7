"""Locks on folders, held while a process works on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from flower_fgl.core.errors import RunError

__all__ = ["hold"]


@contextlib.contextmanager
def hold(
    folder: Path, *, is_server: bool = False, timeout: float = 0.0
) -> Iterator[None]:
    """Hold a run folder while it is worked on; the lock goes when its process does.

    Parameters
    ----------
    folder : Path
        The run folder; the lock is a file beside it.
    is_server : bool
        Whether the caller is the run's server half, which writes to the folder while
        who launched it holds the folder: its lock is one inside.
    timeout : float
        Seconds to wait for another process to let go.

    Raises
    ------
    RunError
        If another process works on it.
    """
    beside = folder.with_name(f".{folder.name}.lock")
    lock = folder / ".server.lock" if is_server else beside
    try:
        with FileLock(lock, timeout=timeout):
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
    except Timeout as error:
        raise RunError(f"{folder} is being written by another process.") from error
