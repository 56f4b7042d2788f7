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
    """Lock a run folder until the block or the process ends.

    The launcher holds the lock file beside the folder while the server of the run
    (``is_server``) works, which uses a second one inside the folder. Raises a RunError if
    another process still holds the lock after ``timeout`` seconds.
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
