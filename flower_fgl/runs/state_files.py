"""Files of client states: their names, and hard links that preserve their content.

A client's state file is never modified, only replaced. A hard link to it therefore costs
nothing and keeps the old content. The secrets of secure aggregation are never kept: a file
that holds some is copied without them.

Hashed groups of tensors are files of their own in the folder ``groups`` beside the states:
one for each content, which clients share and no round writes again.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from flower_fgl.core.atomic import (
    make_private_folder,
    replacing,
    scratch_path,
    write_file,
)
from flower_fgl.core.options import Scalar

__all__ = ["HASHED", "LinkedStates", "StateKeeper", "group_file", "hashed_groups"]
__all__ += ["is_secret", "is_whole", "keep_file", "kept_states", "link_file"]
__all__ += ["state_file", "state_folder"]

HASHED = "blake2b:"
"""Start of a state's value that is the hash of the group of tensors of the same name."""


class StateKeeper(Protocol):
    """Access to the client states of a run on one machine; implemented by each engine."""

    def save_states(self, run_id: int, folder: Path) -> None:
        """Save the current state of every client of the run to a folder."""

    def load_states(self, run_id: int, folder: Path) -> None:
        """Replace the client states of the run with those of a folder."""


def state_file(folder: Path, run_id: int, partition_id: int, owner: str = "") -> Path:
    """Return the path of a client's state file in the folder ``state-dir``.

    ``owner`` names a data owner's files. The server chooses the owner's partition ID,
    so without this name two owners with one folder could get each other's states.
    """
    name = f"{owner}-{partition_id:06d}" if owner else f"{partition_id:06d}"
    return folder / f"{run_id}-{name}.safetensors"


def group_file(folder: Path, digest: str) -> Path:
    """Return the path of a hashed group of the states in a folder."""
    return folder / "groups" / f"{digest.removeprefix(HASHED)}.safetensors"


def hashed_groups(values: Mapping[str, Scalar]) -> dict[str, str]:
    """Return the hashes among a state's values, by name of their group."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, str) and value.startswith(HASHED)
    }


def state_folder(node: Mapping[str, Scalar], of_run: str) -> str:
    """Choose the folder for the client states of a node, empty if none is set.

    ``state-dir`` of the node config comes before that of the run, ``of_run``. A node
    with ``graph`` belongs to a data owner and ignores the latter.
    """
    folder = str(node.get("state-dir") or ("" if "graph" in node else of_run))
    return os.path.expanduser(folder)


def kept_states(
    run_id: int, node: Mapping[str, Scalar], run: Mapping[str, Scalar]
) -> dict[str, tuple[int, int]]:
    """Return a fingerprint of a node's state files, which shows if one was replaced.

    It is inode and modification time in nanoseconds by file name. If the node has no
    ``partition-id`` or holds a data owner's graph, all state files of the run in its
    folder are included.
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
        with contextlib.suppress(
            FileNotFoundError
        ):  # another client's file, deleted meanwhile
            stat = path.stat()
            found[path.name] = stat.st_ino, stat.st_mtime_ns
    return found


class LinkedStates:
    """Client states in one file each in ``state-dir``, saved and restored as hard links."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save_states(self, run_id: int, folder: Path) -> None:
        """Link the state files of a run into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        prefix = f"{run_id}-"
        for path in self.folder.glob(f"{prefix}{'[0-9]' * 6}.safetensors"):
            keep_file(path, folder / path.name.removeprefix(prefix))

    def load_states(self, run_id: int, folder: Path) -> None:
        """Link the files of a folder back as state files of this run."""
        make_private_folder(self.folder)
        for path in self.folder.glob(f"{run_id}-{'[0-9]' * 6}.safetensors"):
            path.unlink()
        for path in folder.glob("*.safetensors"):
            keep_file(path, state_file(self.folder, run_id, int(path.stem)))


def is_secret(name: str) -> bool:
    """Return whether an entry of a client's state is a secret of a protocol."""
    return name.startswith(("secret/", "secure/")) and name != "secure/masked-round"


def keep_file(source: Path, target: Path) -> None:
    """Keep a client's state without its secrets, as a link if there are none.

    In another folder, its hashed groups are kept too.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(source, "np") as file:
            names = list(file.keys())
            metadata = file.metadata()
    except SafetensorError:  # damaged: the reader reports it
        names, metadata = [], None
    if source.parent != target.parent:
        values = json.loads((metadata or {}).get("values", "{}"))
        for digest in {*hashed_groups(values).values()}:
            kept = group_file(target.parent, digest)
            if not is_whole(kept):
                make_private_folder(kept.parent)
                link_file(group_file(source.parent, digest), kept)
    if not any(map(is_secret, names)):
        if source != target:
            link_file(source, target)
        return
    from safetensors.torch import save

    with safe_open(source, "pt") as file:
        tensors = {n: file.get_tensor(n) for n in names if not is_secret(n)}
    write_file(target, save(tensors, metadata), is_private=True)


def is_whole(path: Path) -> bool:
    """Return whether a file of tensors exists and has its full length.

    A power failure can leave a shorter file if it was not synced.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np"):
            return True
    except (OSError, SafetensorError):
        return False


def link_file(source: Path, target: Path) -> None:
    """Link a file that is never modified, or copy it; an existing target is replaced."""
    scratch = scratch_path(target)
    try:
        os.link(source, scratch)
        os.replace(scratch, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without hard links
        scratch.unlink(missing_ok=True)
        with open(source, "rb") as file, replacing(target, is_private=True) as copy:
            shutil.copyfileobj(file, copy)
