"""The path of a worker's socket, and the SuperNode that the worker belongs to."""

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

from flower_fgl.core.atomic import make_private_folder
from flower_fgl.core.options import Scalar
from flower_fgl.core.version import VERSION

__all__ = ["ParentProcess", "find_parent_process", "private_folder", "worker_socket"]

LONGEST = 100
"""Longest path of a Unix domain socket, in bytes, within the limit of every system
(macOS: 103)."""
SUPERNODE = "flower-supernode"


@dataclass(frozen=True)
class ParentProcess:
    """The process that a worker must not outlive.

    ``started``, in seconds since 1970, is needed because process ids are reused.
    """

    pid: int
    started: float

    def is_alive(self) -> bool:
        """Return whether the process runs; a zombie does not."""
        try:
            process = psutil.Process(self.pid)
            # the reported start time shifts when the system clock is set
            is_same = abs(process.create_time() - self.started) < 2
            return is_same and bool(process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False


def find_parent_process() -> ParentProcess:
    """Return the nearest ancestor whose command is ``flower-supernode``.

    Without one (Flower's ``--isolation process``) it is the direct parent; OSError if
    this process may not inspect it.
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


def worker_socket(node: Mapping[str, Scalar], parent: ParentProcess) -> Path:
    """Return the path of a worker's socket, in a folder that only this user may enter.

    It is unique for each SuperNode, node config, location and version of this package,
    interpreter and working directory. OSError if no folder can be used.
    """
    parts = [
        parent.pid,
        platform.node(),  # several machines may share one state-dir
        sorted(node.items()),
        __file__,
        VERSION,
        sys.executable,
        sys.version,
        os.getcwd(),
    ]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    name = f"{digest[:16]}.sock"
    own = Path(os.path.expanduser(str(node.get("state-dir", ""))))
    shared = Path(tempfile.gettempdir()) / f"flower-fgl-{os.getuid()}"
    for folder in [own / "workers"] * own.is_absolute() + [shared]:
        if len(os.fsencode(folder / name)) <= LONGEST:
            return private_folder(folder) / name
    raise OSError(
        f"The path {shared} is too long for a socket. Set TMPDIR to a shorter path."
    )


def private_folder(folder: Path) -> Path:
    """Create a folder that only this user may enter; OSError if others may enter it."""
    make_private_folder(folder)
    found = folder.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_ours or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must be a folder of this user with mode 0700. Remove it."
        )
    return folder
