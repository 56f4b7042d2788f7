"""Atomic replacement of files, locks of run folders, and the folders of data and cache."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import platformdirs
from filelock import FileLock, Timeout

from flower_fgl.core.errors import DataError, RunError

__all__ = ["cache_folder", "data_folder", "hold", "make_private_folder", "replacing"]
__all__ += ["scratch_path", "sync_path", "write_file"]

PRIVATE_FILE, PRIVATE_FOLDER, SHARED_FILE = 0o600, 0o700, 0o666
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # missing on Windows


def scratch_path(path: Path) -> Path:
    """Return a path beside ``path`` that nobody can guess, for a file that replaces it."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


@contextlib.contextmanager
def replacing(
    path: Path,
    *,
    is_private: bool = False,
    is_synced: bool = True,
    is_new: bool = False,
) -> Iterator[IO[bytes]]:
    """Open a new file that replaces ``path`` when the block ends without an error.

    With ``is_private`` the file has mode 0600. With ``is_synced`` it outlives a power
    failure; a killed process leaves the old or the new file in any case, never a part.
    With ``is_new`` no file is replaced. Raises an OSError if the file cannot be written,
    or exists and must not; the old file is then unchanged, and the new one is removed.
    """
    scratch = scratch_path(path)
    mode = PRIVATE_FILE if is_private else SHARED_FILE
    # never another one's file, nor through a link
    number = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW, mode)
    try:
        with open(number, "wb") as file:
            yield file
            file.flush()
            if is_synced:
                os.fsync(number)
        if is_new:
            os.link(scratch, path)
            scratch.unlink()
        else:
            scratch.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise
    if is_synced:
        sync_path(path.parent)


def write_file(
    path: Path, data: bytes, *, is_private: bool = False, is_synced: bool = True
) -> None:
    """Create or replace a file atomically, see :func:`replacing`."""
    with replacing(path, is_private=is_private, is_synced=is_synced) as file:
        file.write(data)


def make_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents with mode 0700; keep existing ones."""
    for missing in reversed([folder, *folder.parents]):
        if not missing.is_dir():
            missing.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)


def sync_path(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk; a missing one is none to sync.

    What was appended to the file, or renamed in the folder, is then permanent.
    """
    try:
        number = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        os.fsync(number)
    finally:
        os.close(number)


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


def data_folder(data_dir: str | None = None) -> Path | None:
    """Return the absolute path of ``data-dir``, else of ``FLOWER_FGL_DATA``, else ``None``.

    Raises a DataError if the path is not a folder.
    """
    text = data_dir or os.environ.get("FLOWER_FGL_DATA")
    if not text:
        return None
    folder = Path(text).expanduser().resolve()
    if not folder.is_dir():
        origin = "data-dir" if data_dir else "FLOWER_FGL_DATA"
        found = "which is a file" if folder.exists() else "which does not exist"
        raise DataError(f"{origin} must name a folder, got {folder}, {found}.")
    return folder


def cache_folder() -> Path:
    """Return the folder for downloads and processed files, which may not exist yet.

    This is ``FLOWER_FGL_CACHE``, or the user's cache folder.
    """
    text = os.environ.get("FLOWER_FGL_CACHE")
    if text:
        return Path(text).expanduser().resolve()
    return Path(platformdirs.user_cache_dir("flower-fgl"))
