"""A client's state between rounds, and the three stores that keep it.

- :class:`MemoryStates`: in this process, for the local engine.
- :class:`FileStates`: with the setting ``state-dir``, one safetensors file per run and
  client, written atomically.
- :class:`ContextStates`: otherwise, Flower's ``context.state``. In simulation it costs 7
  to 16 ms per MB and message, and it is lost with the process that holds it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from flwr.app import ConfigRecord, Context
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from flower_fgl.core.atomic import make_private_folder, write_file
from flower_fgl.core.errors import RunError
from flower_fgl.core.options import Scalar
from flower_fgl.protocols.base import read_tensors, write_tensors
from flower_fgl.runs.state_files import link_file, state_file

__all__ = ["ClientState", "ContextStates", "FileStates", "MemoryStates", "StateStore"]
__all__ += ["read_state", "write_state"]


@dataclass
class ClientState:
    """One client's state; tensors are replaced, never changed in place.

    Parameters
    ----------
    tensors : dict of str to Tensor
        For example ``model/encoder.weight``, ``optimizer/exp_avg/encoder.weight``.
    values : dict of str to bool, int, float or str
        Scalars, for example the round of the last training.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Scalar] = field(default_factory=dict)

    def group(self, prefix: str) -> dict[str, Tensor]:
        """Return copies of the tensors under ``prefix/`` by their names without it.

        They are sorted by name, so that all stores give the same order.
        """
        start = prefix + "/"
        return {
            key[len(start) :]: tensor.clone()
            for key, tensor in sorted(self.tensors.items())
            if key.startswith(start)
        }

    def set_group(self, prefix: str, tensors: dict[str, Tensor]) -> None:
        """Replace the tensors under ``prefix/`` by copies of ``tensors``.

        The groups ``model`` and ``optimizer`` and the value ``round`` belong to the base
        class.

        Raises
        ------
        TypeError
            If an entry is not a dense tensor.
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
    """Store of client states."""

    @abstractmethod
    def load(self, context: Context, partition_id: int) -> ClientState:
        """Return a client's state; it is empty before the first save.

        Raises
        ------
        RunError
            If a file is damaged.
        """

    def save(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Store a client's state atomically.

        Raises
        ------
        TypeError
            If a value is not a bool, int, float or str, which every store can keep.
        RunError
            If a file cannot be written.
        """
        for key, value in state.values.items():
            if type(value) not in (bool, int, float, str):
                raise TypeError(
                    f"client state value {key} must be a bool, int, float or str, got "
                    f"{type(value).__name__}. Store tensors with set_group."
                )
        self._store(context, partition_id, state)

    @abstractmethod
    def _store(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Store a checked state atomically."""

    @abstractmethod
    def rewind(
        self, context: Context, partition_id: int, run_id: int, server_round: int
    ) -> None:
        """Restore a client's state as it was after a round of an interrupted run.

        Stores whose states end with the run change nothing.

        Parameters
        ----------
        context : Context
            Flower's context of the resumed run.
        partition_id : int
            The client.
        run_id : int
            Flower's id of the interrupted run.
        server_round : int
            Round of the checkpoint.

        Raises
        ------
        RunError
            If a file cannot be written.
        """


class MemoryStates(StateStore):
    """Keep states in this process, for the local engine."""

    def __init__(self) -> None:
        self._states: dict[tuple[int, int], ClientState] = {}

    def load(self, context: Context, partition_id: int) -> ClientState:
        """Return a shallow copy, so that a failed message leaves the stored state as is."""
        state = self._states.get((context.run_id, partition_id), ClientState())
        return ClientState(dict(state.tensors), dict(state.values))

    def _store(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Store the state object."""
        self._states[context.run_id, partition_id] = state

    def rewind(
        self, context: Context, partition_id: int, run_id: int, server_round: int
    ) -> None:
        """Change nothing; the engine restores the states with :meth:`load_states`."""

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
        Folder of the files, created if missing. On a cluster all machines must share it.
    keep_every : int
        Rounds between the server's checkpoints. A client's states at the last two
        checkpoints are kept beside its current one, so that it can be rewound with the
        server. 0 keeps only the current state.
    is_synced : bool
        Whether states are synced to disk, so that they outlive a power failure. It takes
        about 3 ms for each state.
    """

    def __init__(
        self, folder: Path, *, keep_every: int = 0, is_synced: bool = False
    ) -> None:
        self.folder = folder
        self.keep_every = keep_every
        self.is_synced = is_synced

    def _path(self, context: Context, partition_id: int) -> Path:
        return state_file(self.folder, context.run_id, partition_id)

    def load(self, context: Context, partition_id: int) -> ClientState:
        """Read the client's file."""
        path = self._path(context, partition_id)
        return read_state(path) if path.exists() else ClientState()

    def _store(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Write the file atomically, unless the stored state is of a later round."""
        # a late worker must not undo what the client has since trained in another process
        path = self._path(context, partition_id)
        try:
            make_private_folder(self.folder)
            with FileLock(f"{path}.lock"):
                kept, new = _round_of(path), int(state.values.get("round", 0))
                if kept is None or kept <= new:
                    self._keep(path, kept, new)
                    write_state(path, state, is_synced=self.is_synced)
        except OSError as error:
            raise RunError(
                f"Cannot write client state {path}: {error}. Check state-dir."
            ) from error

    def _keep(self, path: Path, kept: int | None, new: int) -> None:
        """Keep the state of a checkpoint before a later round overwrites it."""
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
        """Restore the state of a round; an empty one if the client had not trained yet."""
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
    """Read a client's state from a file written by :func:`write_state`.

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
        raise RunError(f"Cannot read client state {path}: {error}.") from error
    return ClientState(tensors, values)


def write_state(path: Path, state: ClientState, *, is_synced: bool = False) -> None:
    """Write a client's state atomically, readable only by the owner of the process.

    Parameters
    ----------
    path : Path
        Safetensors file in an existing folder.
    state : ClientState
        State, with tensors on any device.
    is_synced : bool
        Whether the file is synced to disk.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in state.tensors.items()
    }
    # safetensors' own writer reports a full disk by another error, and keeps a part
    data = save(tensors, {"values": json.dumps(state.values)})
    write_file(path, data, is_private=True, is_synced=is_synced)


def _kept_at(path: Path, server_round: int) -> Path:
    """Return the path of the state kept for a checkpoint's round."""
    return path.with_name(f"{path.stem}.at-{server_round:06d}.safetensors")


def _round_of(path: Path) -> int | None:
    """Read the round of a state file, ``None`` if it is missing or unreadable."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            return int(_values(file).get("round", 0))
    except (OSError, SafetensorError, ValueError):
        return None


def _values(file: Any) -> dict[str, Scalar]:
    """Read the scalars of an open state file."""
    values: dict[str, Scalar] = json.loads((file.metadata() or {}).get("values", "{}"))
    return values


class ContextStates(StateStore):
    """Keep states in Flower's ``context.state``."""

    def load(self, context: Context, partition_id: int) -> ClientState:
        """Unpack the state's two records."""
        if "state-tensors" not in context.state.array_records:
            return ClientState()
        values = context.state.config_records["state-values"]
        return ClientState(
            read_tensors(context.state, "state-tensors", is_checked=False),
            dict(values),  # type: ignore[arg-type]
        )

    def _store(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Pack the state into two records."""
        context.state["state-tensors"] = write_tensors(state.tensors)
        context.state["state-values"] = ConfigRecord(dict(state.values))

    def rewind(
        self, context: Context, partition_id: int, run_id: int, server_round: int
    ) -> None:
        """Change nothing; Flower keeps no state of another run."""
