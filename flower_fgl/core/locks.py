"""Locks that give one process exclusive access to a run folder."""

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
    """Lock a run folder; the lock is released when the block or the process ends.

    Parameters
    ----------
    folder : Path
        The run folder; the lock file lies beside it.
    is_server : bool
        Whether the caller is the server of the run. The launcher holds the lock beside
        the folder meanwhile, so the server uses a second lock inside the folder.
    timeout : float
        Seconds to wait until another process releases the lock.

    Raises
    ------
    RunError
        If another process still holds the lock.
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
