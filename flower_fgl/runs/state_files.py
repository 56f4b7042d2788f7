"""Files of client states: their names, and links that keep them as they are.

A client's state file is never changed, only replaced, so that a second name (a hard link)
costs nothing and goes on holding what it held.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from flower_fgl.core.options import Scalar

__all__ = [
    "LinkedStates",
    "StateKeeper",
    "kept_states",
    "link_file",
    "state_file",
    "state_folder",
]


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


def state_folder(node: Mapping[str, Scalar], of_run: str) -> str:
    """Choose the folder of a node's client states; no run tells an owner where to write.

    Parameters
    ----------
    node : mapping of str to bool, int, float or str
        Node config: ``state-dir`` of its own, and whether it holds an owner's graph.
    of_run : str
        The run's ``state-dir``.

    Returns
    -------
    str
        Empty if there is none.
    """
    return str(node.get("state-dir") or ("" if "graph" in node else of_run))


def kept_states(
    run_id: int, node: Mapping[str, Scalar], run: Mapping[str, Scalar]
) -> dict[str, tuple[int, int]]:
    """Tell the files of a node's client states from those of another moment.

    Parameters
    ----------
    run_id : int
        Flower's number of the run.
    node, run : mapping of str to bool, int, float or str
        Node config and run config.

    Returns
    -------
    dict of str to tuple of int
        Number and time of every file: a file that is replaced has others. Where the node
        has no number yet, or none of its own, those of all clients in its folder.
    """
    folder = state_folder(node, str(run.get("state-dir", "")))
    if not folder:
        return {}
    number = node.get("partition-id")
    name = f"{run_id}-"
    if isinstance(number, int) and "graph" not in node:
        name = state_file(Path(), run_id, number).stem
    found = {}
    for path in Path(folder).glob(f"{name}*.safetensors"):
        with contextlib.suppress(FileNotFoundError):  # another client's, just dropped
            stat = path.stat()
            found[path.name] = stat.st_ino, stat.st_mtime_ns
    return found


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
