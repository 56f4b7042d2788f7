"""Files of client states: their names, and links that keep them as they are.

A client's state file is never changed, only replaced, so that a second name (a hard link)
costs nothing and goes on holding what it held.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Protocol

__all__ = ["LinkedStates", "StateKeeper", "link_file", "state_file"]


class StateKeeper(Protocol):
    """An engine's way to the client states of a run on one machine."""

    def save_states(self, run_id: int, folder: Path) -> None:
        """Write every client state of the run, as it is now, to a folder."""

    def load_states(self, run_id: int, folder: Path) -> None:
        """Replace the client states of the run by those of a folder."""


def state_file(folder: Path, run_id: int, partition_id: int) -> Path:
    """Name the file that holds a client's state.

    Parameters
    ----------
    folder : Path
        The setting ``state-dir``.
    run_id, partition_id : int
        Flower's number of the run, and the client's.

    Returns
    -------
    Path
    """
    return folder / f"{run_id}-{partition_id:06d}.safetensors"


class LinkedStates:
    """Client states in one file each, which are only ever replaced: links keep them.

    Parameters
    ----------
    folder : Path
        The setting ``state-dir``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save_states(self, run_id: int, folder: Path) -> None:
        """Link the files into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        prefix = f"{run_id}-"
        for path in self.folder.glob(f"{prefix}{'[0-9]' * 6}.safetensors"):
            link_file(path, folder / path.name.removeprefix(prefix))

    def load_states(self, run_id: int, folder: Path) -> None:
        """Link the files back, under the number of this run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob(f"{run_id}-{'[0-9]' * 6}.safetensors"):
            path.unlink()
        for path in folder.glob("*.safetensors"):
            link_file(path, state_file(self.folder, run_id, int(path.stem)))


def link_file(source: Path, target: Path) -> None:
    """Give a file that is never changed a second name, or copy it where that fails.

    Parameters
    ----------
    source, target : Path
        An existing file, and its other name; replaced if it is there.

    Raises
    ------
    OSError
        If it can neither be linked nor copied.
    """
    scratch = target.with_suffix(f".{os.getpid()}.tmp")
    scratch.unlink(missing_ok=True)
    try:
        os.link(source, scratch)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, scratch)
    os.replace(scratch, target)
