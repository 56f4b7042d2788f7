"""Checkpoints, from which a run resumes after its process was killed.

``<run folder>/checkpoint/round-000010`` holds the state of the run after round 10;
docs/resume.md lists its files. Only if all clients run on the machine of the server, client
states are among them; otherwise data owners keep their own.

A checkpoint is written under a temporary name and renamed; the previous one is kept. Client
states are not synced to disk, since that takes 3 ms each: after a power failure, incomplete
files do not match their hashes, and the previous checkpoint is used. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from flower_fgl.core.atomic import sync_path, write_file
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.core.unused_settings import unused_settings
from flower_fgl.core.version import VERSION
from flower_fgl.methods import METHODS
from flower_fgl.runs.files import (
    CLIENTS_FILE,
    CONFIG_FILE,
    HEADER,
    ROUNDS,
    read_text,
)
from flower_fgl.runs.run import RunFolder, require_rounds
from flower_fgl.runs.state_files import StateKeeper
from flower_fgl.runs.writer import RunWriter, replace_file

__all__ = ["LET_GO_SECONDS", "Checkpoint", "Checkpoints", "Snapshot"]
__all__ += ["differing_settings", "newest_checkpoint", "require_checkpoint", "rewind"]

log = logging.getLogger(__name__)
FOLDER, MANIFEST = "checkpoint", "checkpoint.json"
SERVER_FILE, CLIENT_STATES = "server.safetensors", "clients"
KEPT = 2
"""Checkpoints to keep: the newest, and the previous one in case that is damaged."""
UNCOMPARED = (
    "run-dir",
    "output-dir",
    "state-dir",
    "data-dir",
    "checkpoint-every",
    "keep-checkpoint",
    "keep-client-models",
    "track",
    "resume",
)
"""Settings that do not change the results of a run."""


@dataclass(frozen=True)
class Snapshot:
    """State of one part of the server: tensors of any dtype and device, and JSON values."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Snapshot:
        """Store nested mappings, lists and dataclasses of tensors, numbers and texts."""
        tensors: dict[str, Tensor] = {}
        return cls(tensors, {"tree": _flatten(tree, "", tensors)})

    def tree(self) -> Any:
        """Return what :meth:`of` stored, dataclasses as mappings of their fields."""
        return _restore(
            self.values.get("tree", {"keys": [], "values": []}), self.tensors
        )

    @classmethod
    def join(cls, parts: Mapping[str, Snapshot]) -> Snapshot:
        """Combine snapshots by name; :meth:`part` extracts one of them."""
        return cls(
            {
                f"{name}/{key}": tensor
                for name, part in parts.items()
                for key, tensor in part.tensors.items()
            },
            {name: dict(part.values) for name, part in parts.items()},
        )

    def part(self, name: str) -> Snapshot:
        """Return the snapshot that :meth:`join` got under a name, empty if none."""
        start = name + "/"
        tensors = {
            key.removeprefix(start): tensor
            for key, tensor in self.tensors.items()
            if key.startswith(start)
        }
        return Snapshot(tensors, dict(self.values.get(name, {})))


@dataclass(frozen=True)
class Checkpoint:
    """State of a run after a round.

    ``engine`` is ``local``, ``ray`` or ``deployment``, ``run_id`` Flower's ID of the
    run that wrote the checkpoint, ``config`` its flat settings, ``versions`` those of
    the libraries, ``clients`` the descriptions that the clients sent, and ``snapshot``
    the state of the server.
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
        """Read the checkpoint of a folder; RunError if a file does not match its hash."""
        try:
            written = json.loads((folder / MANIFEST).read_text("utf-8"))
            content = written["content"]
            if written["sha256"] != _json_hash(content):
                raise ValueError(f"{MANIFEST} does not match its hash")
            for name, digest in content["files"].items():
                if _file_hash(folder / name) != digest:
                    raise ValueError(f"{name} does not match its hash")
            # copies, so that tensors are laid out in memory as in the original run
            loaded = safetensors.torch.load_file(folder / SERVER_FILE)
            tensors = {name: tensor.clone() for name, tensor in loaded.items()}
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
        """Folder of the client states; missing if the engine does not save them."""
        return self.folder / CLIENT_STATES

    def check(self, config: RunConfig) -> None:
        """Raise a RunError that names a setting or version that differs from the run's.

        The run may get more rounds, unless its method plans with their number.
        """
        differing = differing_settings(config, self.config)
        if not config.clients:
            differing.pop("clients", None)
        before = differing.get("rounds", config.rounds)
        if config.rounds > before:
            if METHODS[config.method].plans_rounds:
                raise RunError(
                    f"A run of {config.method} cannot get more rounds (rounds = "
                    f"{config.rounds}, was {before}): what it does in a round "
                    "depends on the number of all rounds. Start a new run."
                )
            del differing["rounds"]
        if differing:
            now = config.flat()
            changed = [f"{k} = {now[k]!r} (was {v!r})" for k, v in differing.items()]
            raise RunError(
                f"The run cannot resume with other settings: {', '.join(changed)}. Use "
                "those of its config.toml, or start a new run."
            )
        changed = [
            f"{name} {version} (was {self.versions.get(name)})"
            for name, version in _versions().items()
            if self.versions.get(name) != version
        ]
        if changed:
            raise RunError(
                f"The run cannot resume with another version: {', '.join(changed)}. "
                "Install the version it was started with, or start a new run."
            )


@dataclass
class Checkpoints:
    """Write the checkpoints of one run, and restore the one from which it resumes.

    Data owners keep their own client ``states``.
    """

    run_folder: Path
    config: RunConfig
    engine: str
    run_id: int
    states: StateKeeper | None = None
    resumed: Checkpoint | None = None

    @property
    def folder(self) -> Path:
        """Folder of all checkpoints."""
        return self.run_folder / FOLDER

    def restore_states(self) -> None:
        """Restore the client states if the engine has them, or raise a RunError."""
        if self.resumed is None or self.states is None:
            return
        folder = self.resumed.client_folder
        if not folder.is_dir():
            raise RunError(
                f"{self.resumed.folder} holds no client states, because the run was a "
                "deployment, in which clients keep their own. Resume it as a deployment."
            )
        try:
            self.states.load_states(self.run_id, folder)
        except OSError as error:
            raise RunError(
                f"Cannot restore the client states of {folder}: {error}. Check state-dir."
            ) from error

    def save(
        self,
        server_round: int,
        snapshot: Snapshot,
        clients: Sequence[Mapping[str, Any]],
    ) -> None:
        """Write a checkpoint while no client trains, then delete those no longer needed.

        Raises a RunError if it cannot be written; earlier ones are kept.
        """
        scratch = self.folder / f".round-{server_round:06d}.tmp"
        target = self.folder / f"round-{server_round:06d}"
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            self._write(scratch, server_round, snapshot, clients)
            sync_path(scratch)
            for log in (ROUNDS, CLIENTS_FILE):  # a checkpoint never outlives its rows
                sync_path(self.folder.parent / log)
            if target.exists():  # damaged: the run resumed from the one before it
                shutil.rmtree(target)
            os.replace(scratch, target)
            sync_path(self.folder)
        except BaseException as error:
            shutil.rmtree(scratch, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
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
        """Write all files of a checkpoint; the manifest, with the hashes, comes last."""
        tensors = {
            name: tensor.detach().cpu().clone().contiguous()
            for name, tensor in snapshot.tensors.items()
        }
        write_file(folder / SERVER_FILE, safetensors.torch.save(tensors))
        if self.states is not None:
            self.states.save_states(self.run_id, folder / CLIENT_STATES)
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
        content = json.loads(json.dumps(content))  # with string keys
        manifest = {"sha256": _json_hash(content), "content": content}
        write_file(folder / MANIFEST, json.dumps(manifest).encode())

    def remove(self) -> None:
        """Delete all checkpoints of a completed run."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _flatten(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Move the tensors of nested values to ``tensors``; return the rest as JSON values."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        parts = [
            _flatten(v, f"{path}/{k}"[not path :], tensors) for k, v in value.items()
        ]
        return {"keys": [*value], "values": parts}
    if isinstance(value, list | tuple):
        return [_flatten(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]
    return value


def _restore(form: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo :func:`_flatten`."""
    if isinstance(form, list):
        return [_restore(part, tensors) for part in form]
    if not isinstance(form, Mapping):
        return form
    if "tensor" in form:
        return tensors[form["tensor"]]
    values = (_restore(part, tensors) for part in form["values"])
    return dict(zip(form["keys"], values, strict=True))


def differing_settings(config: RunConfig, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the earlier values of settings that change the results, where they differ."""
    now, before = config.flat(), config.general_defaults() | dict(before)
    ignored = {*UNCOMPARED, *unused_settings(now, config)}
    return {
        key: before.get(key)
        for key, value in now.items()
        if key not in ignored and before.get(key) != value
    }


def newest_checkpoint(run_folder: Path) -> Checkpoint | None:
    """Return the newest intact checkpoint of a run, ``None`` if the folder has none.

    Damaged ones are logged; if all are damaged, a RunError is raised.
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
        raise RunError(f"{' '.join(reasons)} The run cannot resume: start a new one.")
    return None


def _rounds(folder: Path) -> list[Path]:
    """Return the checkpoint folders, newest first."""
    return sorted(folder.glob(f"round-{'[0-9]' * 6}"), reverse=True)


def _versions() -> dict[str, str]:
    """Return the versions that must not change when a run resumes."""
    return {"flower-fgl": VERSION, "torch": str(torch.__version__)}


def _file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json_hash(content: Any) -> str:
    """Return the SHA-256 of JSON values, independent of the order of keys."""
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


SETTING_OF_ROUNDS = re.compile(r"^rounds = \d+", re.MULTILINE)
LET_GO_SECONDS = 30.0
"""Seconds to wait for the processes of a killed launcher to release the run folder."""


def rewind(folder: Path, config: RunConfig) -> Checkpoint:
    """Reset a run folder to its newest checkpoint and delete the rows of later rounds.

    No other process may write to it. A ``config`` with more rounds extends the run, and
    ``config.toml`` gets their number. Raises a RunError, and leaves the folder unchanged,
    if the run cannot resume with ``config``.
    """
    run = RunFolder.load(folder)
    before = int(run.config["rounds"])
    is_extended = config.rounds > before
    if run.status == "completed" and not is_extended:
        raise RunError(
            f"The run in {folder} is complete: there is nothing to resume. To add rounds, "
            f"set rounds above {before}."
        )
    checkpoint = require_checkpoint(folder)
    checkpoint.check(config)
    ended = max(
        (row["round"] for row in run.rounds if row["phase"] == "train"), default=0
    )
    if run.status == "completed" and ended < before:
        raise RunError(
            f"The run in {folder} ended after round {ended} of {before}, "
            "because no later round scored better (round-patience). Start a new run "
            "without round-patience."
        )
    require_rounds(run.rounds, checkpoint.server_round, folder)
    if is_extended:
        text = read_text(folder / CONFIG_FILE)
        longer = SETTING_OF_ROUNDS.sub(f"rounds = {config.rounds}", text, count=1)
        replace_file(folder / CONFIG_FILE, longer.encode())
    for name in (ROUNDS, CLIENTS_FILE):
        _drop_later_rows(folder / name, checkpoint.server_round)
    header = {key: run.summary.get(key) for key in HEADER}
    header |= {"engine": checkpoint.engine, "clients": len(checkpoint.clients)}
    summary = {**header, "rounds": checkpoint.server_round, "status": "running"}
    RunWriter(folder).write_summary(summary)
    return checkpoint


def require_checkpoint(folder: Path) -> Checkpoint:
    """Return the newest intact checkpoint; raise RunError if there is none."""
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        if RunFolder.load(folder).status == "completed":
            raise RunError(
                f"The run in {folder} cannot get more rounds: it kept no checkpoint when "
                "it ended. Run it again with keep-checkpoint = true."
            )
        again = f"flower-fgl run {folder}/config.toml"
        if RunFolder.load(folder).summary.get("engine") == "deployment":
            again = (
                "the same `flwr run` command without resume, and with another run-dir"
            )
        raise RunError(
            f"The run in {folder} has no checkpoint: it ended before the first one, or its "
            f"settings have checkpoint-every = 0. Start it again: {again}"
        )
    return checkpoint


def _drop_later_rows(path: Path, server_round: int) -> None:
    """Delete the rows of later rounds, and an incomplete last line."""
    if not path.exists():
        return
    data = path.read_bytes()
    kept = b"".join(
        line
        for line in data.splitlines(keepends=True)
        if line.endswith(b"\n") and json.loads(line)["round"] <= server_round
    )
    if kept != data:
        replace_file(path, kept)
