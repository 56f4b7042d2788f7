"""Where an owner's worker is found, and whose it is."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from flower_fgl.core.options import Scalar
from flower_fgl.core.version import VERSION

__all__ = ["ParentProcess", "find_parent_process", "private_folder", "worker_socket"]

LONGEST = 100
"""Bytes of a Unix domain socket's path that every system allows (macOS: 103)."""
SUPERNODE = "flower-supernode"


@dataclass(frozen=True)
class ParentProcess:
    """The process that a worker must not outlive.

    Parameters
    ----------
    pid : int
        Its number.
    started : float
        When it began, in seconds since 1970: numbers are used again.
    """

    pid: int
    started: float

    def is_alive(self) -> bool:
        """Say whether it runs; one that nobody has buried yet does not."""
        try:
            process = psutil.Process(self.pid)
            # read twice, the time differs where the clock has been set meanwhile
            is_it = abs(process.create_time() - self.started) < 2
            return is_it and bool(process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False


def find_parent_process() -> ParentProcess:
    """Return the SuperNode above this process.

    Returns
    -------
    Master
        The nearest ancestor called ``flower-supernode``; where there is none (Flower's
        ``--isolation process``), the parent.

    Raises
    ------
    OSError
        If this process has no parent, or may not look at it.
    """
    try:
        ancestors = psutil.Process().parents()
        for process in ancestors:
            with contextlib.suppress(psutil.AccessDenied):
                names = [Path(part).name for part in process.cmdline()[:3]]
                if SUPERNODE in names:
                    return ParentProcess(process.pid, process.create_time())
        return ParentProcess(ancestors[0].pid, ancestors[0].create_time())
    except (psutil.Error, IndexError) as error:
        raise OSError(f"the SuperNode's process cannot be found: {error}") from error


def worker_socket(node: Mapping[str, Scalar], master: ParentProcess) -> Path:
    """Name the socket of an owner's worker, in a folder that is only this user's.

    Parameters
    ----------
    node : mapping of str to bool, int, float or str
        Node config.
    master : Master
        The owner's SuperNode.

    Returns
    -------
    Path
        Another one for every SuperNode, node config, place and version of this package,
        interpreter and working folder.

    Raises
    ------
    OSError
        If there is no folder that can be used.
    """
    parts = [
        master.pid,
        platform.node(),  # several machines may see one state-dir
        sorted(node.items()),
        __file__,
        VERSION,
        sys.executable,
        sys.version,
        os.getcwd(),
    ]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    name = f"{digest[:16]}.sock"
    own = Path(str(node.get("state-dir", "")))
    shared = Path(tempfile.gettempdir()) / f"flower-fgl-{os.getuid()}"
    for folder in [own / "workers"] * own.is_absolute() + [shared]:
        if len(os.fsencode(folder / name)) <= LONGEST:
            return private_folder(folder) / name
    raise OSError(
        f"{shared} is too long a path for a socket: set TMPDIR to a short one"
    )


def private_folder(folder: Path) -> Path:
    """Make a folder that only this user may enter.

    Raises
    ------
    OSError
        If it cannot be made, or is there and others may enter it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_ours or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must be a folder of this user with mode 0700: remove it"
        )
    return folder
