"""Checkpoints: what a run needs to go on after its process was killed.

``<run folder>/checkpoint/round-000010`` is the run as it stood after round 10:

======================  ==============================================================
``checkpoint.json``     round, settings, versions, clients, the server's plain values,
                        and the SHA-256 of every file, its own content included
``server.safetensors``  the server's tensors
``clients/``            one safetensors file per client state, where all clients run on
                        the machine of the server; elsewhere owners keep their own
======================  ==============================================================

A checkpoint is written beside its place and renamed; the one before it stays. Nothing is
forced to the disk: what a power failure leaves half written does not match its hashes, and
the one before it, long since written, is used. Nothing is ever pickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.core.version import VERSION
from flower_fgl.runs.state_files import StateKeeper

__all__ = ["UNCOMPARED", "Checkpoint", "Checkpoints", "Snapshot", "newest_checkpoint"]

log = logging.getLogger(__name__)
FOLDER, MANIFEST = "checkpoint", "checkpoint.json"
SERVER, CLIENTS = "server.safetensors", "clients"
KEPT = 2
"""Checkpoints that stay: the newest, and the one before in case that is damaged."""
UNCOMPARED = (
    "run-dir",
    "output-dir",
    "state-dir",
    "data-dir",
    "checkpoint-every",
    "keep-checkpoint",
    "resume",
)
"""Settings that do not change what a run computes."""


@dataclass(frozen=True)
class Snapshot:
    """State of one part of the server.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        Any type and device.
    values : mapping of str to object
        What JSON holds: numbers, strings, lists and mappings with string keys.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def join(cls, parts: Mapping[str, Snapshot]) -> Snapshot:
        """Put several into one; :meth:`part` takes them out again."""
        return cls(
            {
                f"{name}/{key}": tensor
                for name, part in parts.items()
                for key, tensor in part.tensors.items()
            },
            {name: dict(part.values) for name, part in parts.items()},
        )

    def part(self, name: str) -> Snapshot:
        """Return what :meth:`join` was given under a name, empty if nothing was."""
        start = name + "/"
        return Snapshot(
            {
                key[len(start) :]: tensor
                for key, tensor in self.tensors.items()
                if key.startswith(start)
            },
            dict(self.values.get(name, {})),
        )


@dataclass(frozen=True)
class Checkpoint:
    """A run as it stood after a round.

    Parameters
    ----------
    folder : Path
        Where it was read from.
    server_round : int
        The round.
    engine : str
        Where its clients are: ``local``, ``ray`` or ``deployment``.
    run_id : int
        Flower's number of the run that wrote it.
    config : dict
        Its settings, flat.
    versions : dict of str to str
        Of the libraries that it was computed with.
    clients : list of dict
        What the clients said of themselves.
    snapshot : Snapshot
        The server's state.
    """

    folder: Path
    server_round: int
    engine: str
    run_id: int
    config: dict[str, Any]
    versions: dict[str, str]
    clients: list[dict[str, Any]]
    snapshot: Snapshot

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read a checkpoint and compare all its files with their hashes.

        Parameters
        ----------
        folder : Path
            ``…/checkpoint/round-000010``.

        Returns
        -------
        Checkpoint

        Raises
        ------
        RunError
            If a file is missing or is not what was written.
        """
        try:
            written = json.loads((folder / MANIFEST).read_text("utf-8"))
            content = written["content"]
            if written["sha256"] != _json_hash(content):
                raise ValueError(f"{MANIFEST} does not match its hash")
            for name, digest in content["files"].items():
                if _file_hash(folder / name) != digest:
                    raise ValueError(f"{name} does not match its hash")
            # a copy, so that tensors lie in memory as those of the run did
            tensors = {
                name: tensor.clone()
                for name, tensor in safetensors.torch.load_file(folder / SERVER).items()
            }
            return cls(
                folder,
                content["round"],
                content["engine"],
                content["run_id"],
                content["config"],
                content["versions"],
                content["clients"],
                Snapshot(tensors, content["values"]),
            )
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise RunError(f"Checkpoint {folder} is damaged: {error}.") from error

    @property
    def client_folder(self) -> Path:
        """Where the client states are, if the engine could take them along."""
        return self.folder / CLIENTS

    def check(self, config: RunConfig) -> None:
        """Refuse settings or versions other than those of the run.

        Parameters
        ----------
        config : RunConfig
            Settings with which the run is to go on.

        Raises
        ------
        RunError
            Naming what differs.
        """
        now = {k: v for k, v in config.flat().items() if k not in UNCOMPARED}
        if not config.clients:
            del now["clients"]
        before = config.general_defaults() | dict(self.config)
        changed = [
            f"{key} = {value!r} (was {before.get(key)!r})"
            for key, value in now.items()
            if before.get(key) != value
        ]
        if changed:
            raise RunError(
                f"The run cannot go on with other settings: {', '.join(changed)}. Give "
                "those of its config.toml, or start a new run."
            )
        changed = [
            f"{name} {version} (was {self.versions.get(name)})"
            for name, version in _versions().items()
            if self.versions.get(name) != version
        ]
        if changed:
            raise RunError(
                f"The run cannot go on with another version: {', '.join(changed)}. "
                "Install the one it was started with, or start a new run."
            )


class Checkpoints:
    """Write the checkpoints of one run, and hand out the one it goes on from.

    Parameters
    ----------
    run_folder : Path
        The run folder.
    config : RunConfig
        Its settings.
    engine : str
        Where its clients are.
    run_id : int
        Flower's number of the run.
    states : StateKeeper, optional
        The engine's way to the client states; ``None`` where owners keep theirs.
    resumed : Checkpoint, optional
        Where the run goes on from.
    """

    def __init__(
        self,
        run_folder: Path,
        *,
        config: RunConfig,
        engine: str,
        run_id: int,
        states: StateKeeper | None = None,
        resumed: Checkpoint | None = None,
    ) -> None:
        self.folder = run_folder / FOLDER
        self.config = config
        self.engine = engine
        self.run_id = run_id
        self.states = states
        self.resumed = resumed

    def is_due(self, server_round: int) -> bool:
        """Say whether a round ends with a checkpoint."""
        config = self.config
        if config.keep_checkpoint and server_round == config.rounds:
            return True
        every = config.checkpoint_every
        return every > 0 and server_round % every == 0

    def restore_states(self) -> None:
        """Put client states back as they were, where the engine has them.

        Raises
        ------
        RunError
            If the files cannot be written, or the checkpoint was written where owners
            keep their own.
        """
        if self.resumed is None or self.states is None:
            return
        folder = self.resumed.client_folder
        if not folder.is_dir():
            raise RunError(
                f"{self.resumed.folder} holds no client states: the run was a "
                "deployment, whose clients keep their own. Resume it there."
            )
        try:
            self.states.load_states(self.run_id, folder)
        except OSError as error:
            raise RunError(
                f"Cannot put back client states of {folder}: {error}. Check state-dir."
            ) from error

    def save(
        self,
        server_round: int,
        snapshot: Snapshot,
        clients: Sequence[Mapping[str, Any]],
    ) -> None:
        """Write a checkpoint, then drop those that are not needed any more.

        Parameters
        ----------
        server_round : int
            The round that has just ended; no client is at work.
        snapshot : Snapshot
            The server's state.
        clients : sequence of mapping
            What the clients said of themselves.

        Raises
        ------
        RunError
            If it cannot be written; the checkpoints before it stay.
        """
        scratch = self.folder / f".round-{server_round:06d}.tmp"
        target = self.folder / f"round-{server_round:06d}"
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            self._write(scratch, server_round, snapshot, clients)
            if target.exists():  # damaged: the run went on from the one before it
                shutil.rmtree(target)
            os.replace(scratch, target)
        except OSError as error:
            shutil.rmtree(scratch, ignore_errors=True)
            raise RunError(
                f"Cannot write {target}: {error.strerror or error}. Free some space "
                "there, or set checkpoint-every = 0."
            ) from error
        for old in [*_rounds(self.folder)[KEPT:], *self.folder.glob(".round-*.tmp")]:
            shutil.rmtree(old, ignore_errors=True)

    def _write(
        self,
        folder: Path,
        server_round: int,
        snapshot: Snapshot,
        clients: Sequence[Mapping[str, Any]],
    ) -> None:
        tensors = {
            name: tensor.detach().cpu().clone().contiguous()
            for name, tensor in snapshot.tensors.items()
        }
        (folder / SERVER).write_bytes(safetensors.torch.save(tensors))
        if self.states is not None:
            self.states.save_states(self.run_id, folder / CLIENTS)
        number = self.config.clients or clients[0]["num_partitions"]
        content = {
            "round": server_round,
            "engine": self.engine,
            "run_id": self.run_id,
            "config": self.config.flat() | {"clients": number},
            "versions": _versions(),
            "clients": clients,
            "values": snapshot.values,
            "files": {
                str(path.relative_to(folder)): _file_hash(path)
                for path in sorted(folder.rglob("*.safetensors"))
            },
        }
        content = json.loads(json.dumps(content))  # as it is read, keys and all
        manifest = {"sha256": _json_hash(content), "content": content}
        (folder / MANIFEST).write_text(json.dumps(manifest), "utf-8")

    def remove(self) -> None:
        """Drop all checkpoints of a run that is complete."""
        shutil.rmtree(self.folder, ignore_errors=True)


def newest_checkpoint(run_folder: Path) -> Checkpoint | None:
    """Find the checkpoint that a run goes on from.

    Parameters
    ----------
    run_folder : Path
        The run folder.

    Returns
    -------
    Checkpoint or None
        The newest that is whole; damaged ones are named in the log. ``None`` if there
        never was one.

    Raises
    ------
    RunError
        If all that are there are damaged.
    """
    reasons = []
    for folder in _rounds(run_folder / FOLDER):
        try:
            found = Checkpoint.read(folder)
        except RunError as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            log.warning("%s Round %s is used.", reason, found.server_round)
        return found
    if reasons:
        raise RunError(f"{' '.join(reasons)} The run cannot go on: start a new one.")
    return None


def _rounds(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first."""
    return sorted(folder.glob(f"round-{'[0-9]' * 6}"), reverse=True)


def _versions() -> dict[str, str]:
    return {"flower-fgl": VERSION, "torch": str(torch.__version__)}


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json_hash(content: Any) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
