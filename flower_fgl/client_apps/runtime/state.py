"""What a client keeps between rounds, and where.

Three places, one interface: the local engine keeps tensors in memory; with the setting
``state-dir`` they go to one safetensors file per run and client, written atomically; else
they ride in Flower's ``context.state``, which is always there but costs 7 to 16 ms per MB
and message in simulation and is lost with the process that holds it.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from flwr.app import ConfigRecord, Context
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flower_fgl.core.errors import RunError
from flower_fgl.core.options import Scalar
from flower_fgl.protocols.base import read_tensors, write_tensors
from flower_fgl.runs.state_files import link_file, state_file

__all__ = ["ClientState", "ContextStates", "FileStates", "MemoryStates", "StateStore"]
__all__ += ["read_state", "write_state"]


@dataclass
class ClientState:
    """One client's memory; tensors are replaced, never changed in place.

    Parameters
    ----------
    tensors : dict of str to Tensor
        E.g. ``model/encoder.weight``, ``optimizer/exp_avg/encoder.weight``.
    values : dict of str to bool, int, float or str
        Small facts, e.g. the round of the last training.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Scalar] = field(default_factory=dict)

    def group(self, prefix: str) -> dict[str, Tensor]:
        """Return copies of the tensors under ``prefix/``, without it, in order of names.

        The order is the same wherever the state was kept.
        """
        start = prefix + "/"
        return {
            key[len(start) :]: tensor.clone()
            for key, tensor in sorted(self.tensors.items())
            if key.startswith(start)
        }

    def set_group(self, prefix: str, tensors: dict[str, Tensor]) -> None:
        """Replace the tensors under ``prefix/`` by copies.

        ``model`` and ``optimizer`` are groups of the base class, the value ``round`` is
        its own too.

        Raises
        ------
        TypeError
            If one is no dense tensor.
        """
        start = prefix + "/"
        for name, t in tensors.items():
            if not isinstance(t, Tensor) or t.layout != torch.strided:
                raise TypeError(
                    f"client state {start}{name} must be a dense tensor, got "
                    f"{type(t).__name__}"
                )
        kept = {k: v for k, v in self.tensors.items() if not k.startswith(start)}
        self.tensors = kept | {
            start + name: t.detach().clone() for name, t in tensors.items()
        }


class StateStore(ABC):
    """Where client states live."""

    @abstractmethod
    def load(self, context: Context, partition_id: int) -> ClientState:
        """Return a client's state, an empty one at the start."""

    def save(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Keep a client's state, whole or not at all.

        Raises
        ------
        TypeError
            If a value is no bool, int, float or str: not every place can keep it.
        """
        for key, value in state.values.items():
            if type(value) not in (bool, int, float, str):
                raise TypeError(
                    f"client state value {key} must be a bool, int, float or str, got "
                    f"{type(value).__name__}: keep tensors by set_group"
                )
        self._store(context, partition_id, state)

    @abstractmethod
    def _store(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Keep a state that every place can keep, whole or not at all."""

    @abstractmethod
    def rewind(
        self, context: Context, partition_id: int, run_id: int, server_round: int
    ) -> None:
        """Take over a client's state as it was after a round of another run.

        Only states that outlive a run can; others stay as they are.

        Parameters
        ----------
        context : Context
            Of the run that goes on.
        partition_id : int
            The client.
        run_id : int
            Flower's number of the run that was interrupted.
        server_round : int
            The round of its checkpoint.
        """


class MemoryStates(StateStore):
    """Keep states in this process: the local engine."""

    def __init__(self) -> None:
        self._states: dict[tuple[int, int], ClientState] = {}

    def load(self, context: Context, partition_id: int) -> ClientState:
        """Return a state of its own, so that a client that fails changes nothing.

        The tensors are shared until they are replaced: nobody changes them in place.
        """
        state = self._states.get((context.run_id, partition_id), ClientState())
        return ClientState(dict(state.tensors), dict(state.values))

    def _store(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Keep the state itself."""
        self._states[context.run_id, partition_id] = state

    def rewind(
        self, context: Context, partition_id: int, run_id: int, server_round: int
    ) -> None:
        """Change nothing: the engine puts states back by :meth:`load_states`."""

    def save_states(self, run_id: int, folder: Path) -> None:
        """Write every state of a run to a folder, one file per client."""
        folder.mkdir(parents=True, exist_ok=True)
        for (run, partition_id), state in self._states.items():
            if run == run_id:
                write_state(folder / f"{partition_id:06d}.safetensors", state)

    def load_states(self, run_id: int, folder: Path) -> None:
        """Replace the states of a run by those of a folder.

        Raises
        ------
        RunError
            If a file is damaged.
        """
        self._states = {key: s for key, s in self._states.items() if key[0] != run_id}
        for path in folder.glob("*.safetensors"):
            self._states[run_id, int(path.stem)] = read_state(path)


class FileStates(StateStore):
    """Keep each state in a file.

    Parameters
    ----------
    folder : Path
        Made if it is not there; on a cluster all machines must see it.
    keep_every : int
        Rounds between the server's checkpoints. The state that a client had at the last
        two of them is kept beside its state of now, so that it can go back when the
        server does; 0 keeps none.
    """

    def __init__(self, folder: Path, *, keep_every: int = 0) -> None:
        self.folder = folder
        self.keep_every = keep_every

    def _path(self, context: Context, partition_id: int) -> Path:
        return state_file(self.folder, context.run_id, partition_id)

    def load(self, context: Context, partition_id: int) -> ClientState:
        """Read the file.

        Raises
        ------
        RunError
            If the file is damaged.
        """
        path = self._path(context, partition_id)
        return read_state(path) if path.exists() else ClientState()

    def _store(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Write beside the file, then move into place.

        A worker that comes late, after its client went on elsewhere, changes nothing.
        """
        path = self._path(context, partition_id)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{path}.lock"):
                kept, new = _round_of(path), int(state.values.get("round", 0))
                if kept is None or kept <= new:
                    self._keep(path, kept, new)
                    write_state(path, state)
        except OSError as error:
            raise RunError(
                f"Cannot write client state {path}: {error}. Check state-dir."
            ) from error

    def _keep(self, path: Path, kept: int | None, new: int) -> None:
        """Keep a state that checkpoints hold, before one of a later round follows."""
        if not self.keep_every or kept is None:
            return
        newest = (new - 1) // self.keep_every * self.keep_every
        points = [
            _kept_at(path, r) for r in (newest - self.keep_every, newest) if r > 0
        ]
        for point in points:
            if kept <= int(point.stem[-6:]) and not point.exists():
                link_file(path, point)
        for old in path.parent.glob(f"{path.stem}.at-*.safetensors"):
            if old not in points:
                old.unlink()

    def rewind(
        self, context: Context, partition_id: int, run_id: int, server_round: int
    ) -> None:
        """Take over the state of a round; none if the client had not trained by then.

        Raises
        ------
        RunError
            If it cannot be written.
        """
        path = self._path(context, partition_id)
        source = state_file(self.folder, run_id, partition_id)
        newest = _round_of(source)
        try:
            if _kept_at(source, server_round).exists():
                link_file(_kept_at(source, server_round), path)
            elif newest is not None and newest <= server_round:
                link_file(source, path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise RunError(
                f"Cannot write client state {path}: {error}. Check state-dir."
            ) from error


def read_state(path: Path) -> ClientState:
    """Read a client's state.

    Parameters
    ----------
    path : Path
        A file of :func:`write_state`.

    Returns
    -------
    ClientState

    Raises
    ------
    RunError
        If the file is missing or damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            values = _values(file)
    except (OSError, SafetensorError, ValueError) as error:
        raise RunError(f"Client state {path} is damaged: {error}.") from error
    return ClientState(tensors, values)


def write_state(path: Path, state: ClientState) -> None:
    """Write a client's state beside its file, then move it into place.

    Parameters
    ----------
    path : Path
        A safetensors file, whose folder exists.
    state : ClientState
        Tensors on any device.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in state.tensors.items()
    }
    save_file(tensors, scratch, {"values": json.dumps(state.values)})
    os.replace(scratch, path)


def _kept_at(path: Path, server_round: int) -> Path:
    """Name the file that keeps a state as a checkpoint's round left it."""
    return path.with_name(f"{path.stem}.at-{server_round:06d}.safetensors")


def _round_of(path: Path) -> int | None:
    """Read the round of a state file, ``None`` if there is none that can be read."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            return int(_values(file).get("round", 0))
    except (OSError, SafetensorError, ValueError):
        return None


def _values(file: Any) -> dict[str, Scalar]:
    """Read the small values of an opened state file."""
    values: dict[str, Scalar] = json.loads((file.metadata() or {}).get("values", "{}"))
    return values


class ContextStates(StateStore):
    """Keep states in Flower's ``context.state``."""

    def load(self, context: Context, partition_id: int) -> ClientState:
        """Unpack the two records."""
        if "state-tensors" not in context.state.array_records:
            return ClientState()
        values = context.state.config_records["state-values"]
        return ClientState(
            read_tensors(context.state, "state-tensors", is_checked=False),
            dict(values),  # type: ignore[arg-type]
        )

    def _store(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Pack into two records."""
        context.state["state-tensors"] = write_tensors(state.tensors)
        context.state["state-values"] = ConfigRecord(dict(state.values))

    def rewind(
        self, context: Context, partition_id: int, run_id: int, server_round: int
    ) -> None:
        """Change nothing: Flower keeps no state of another run."""
