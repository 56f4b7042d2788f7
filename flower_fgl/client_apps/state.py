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

from filelock import FileLock
from flwr.app import ConfigRecord, Context
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flower_fgl.errors import RunError
from flower_fgl.options import Scalar
from flower_fgl.protocols.base import read_tensors, write_tensors

__all__ = ["ClientState", "ContextStates", "FileStates", "MemoryStates", "StatePlace"]


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
        """Return copies of the tensors under ``prefix/``, without the prefix."""
        start = prefix + "/"
        return {
            key[len(start) :]: tensor.clone()
            for key, tensor in self.tensors.items()
            if key.startswith(start)
        }

    def set_group(self, prefix: str, tensors: dict[str, Tensor]) -> None:
        """Replace the tensors under ``prefix/``."""
        start = prefix + "/"
        kept = {k: v for k, v in self.tensors.items() if not k.startswith(start)}
        self.tensors = kept | {start + name: t for name, t in tensors.items()}


class StatePlace(ABC):
    """Where client states live."""

    @abstractmethod
    def load(self, context: Context, partition_id: int) -> ClientState:
        """Return a client's state, an empty one at the start."""

    @abstractmethod
    def save(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Keep a client's state, whole or not at all."""


class MemoryStates(StatePlace):
    """Keep states in this process: the local engine."""

    def __init__(self) -> None:
        self._states: dict[tuple[int, int], ClientState] = {}

    def load(self, context: Context, partition_id: int) -> ClientState:
        """Return a state of its own, so that a client that fails changes nothing.

        The tensors are shared until they are replaced: nobody changes them in place.
        """
        state = self._states.get((context.run_id, partition_id), ClientState())
        return ClientState(dict(state.tensors), dict(state.values))

    def save(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Keep the state itself."""
        self._states[context.run_id, partition_id] = state


class FileStates(StatePlace):
    """Keep each state in a file.

    Parameters
    ----------
    folder : Path
        Made if it is not there; on a cluster all machines must see it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, context: Context, partition_id: int) -> Path:
        return self.folder / f"{context.run_id}-{partition_id:06d}.safetensors"

    def load(self, context: Context, partition_id: int) -> ClientState:
        """Read the file.

        Raises
        ------
        RunError
            If the file is damaged.
        """
        path = self._path(context, partition_id)
        if not path.exists():
            return ClientState()
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                values = _values(file)
        except (OSError, SafetensorError, ValueError) as error:
            raise RunError(f"Client state {path} is damaged: {error}.") from error
        return ClientState(tensors, values)

    def save(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Write beside the file, then move into place.

        A worker that comes late, after its client went on elsewhere, changes nothing.
        """
        path = self._path(context, partition_id)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{path}.lock"):
                if not self._is_outdated(path, state):
                    self._write(path, state)
        except OSError as error:
            raise RunError(
                f"Cannot write client state {path}: {error}. Check state-dir."
            ) from error

    def _is_outdated(self, path: Path, state: ClientState) -> bool:
        if not path.exists():
            return False
        try:
            with safe_open(path, "pt") as file:
                kept = _values(file).get("round", 0)
        except (OSError, SafetensorError, ValueError):
            return False
        return kept > state.values.get("round", 0)  # type: ignore[operator]

    def _write(self, path: Path, state: ClientState) -> None:
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        tensors = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in state.tensors.items()
        }
        save_file(tensors, scratch, {"values": json.dumps(state.values)})
        os.replace(scratch, path)


def _values(file: Any) -> dict[str, Scalar]:
    """Read the small values of an opened state file."""
    values: dict[str, Scalar] = json.loads((file.metadata() or {}).get("values", "{}"))
    return values


class ContextStates(StatePlace):
    """Keep states in Flower's ``context.state``."""

    def load(self, context: Context, partition_id: int) -> ClientState:
        """Unpack the two records."""
        if "state-tensors" not in context.state.array_records:
            return ClientState()
        values = context.state.config_records["state-values"]
        return ClientState(
            read_tensors(context.state, "state-tensors", is_checked=False),
            {key: value for key, value in values.items() if _is_scalar(value)},  # type: ignore[misc]
        )

    def save(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Pack into two records."""
        context.state["state-tensors"] = write_tensors(state.tensors)
        context.state["state-values"] = ConfigRecord(dict(state.values))


def _is_scalar(value: object) -> bool:
    return isinstance(value, bool | int | float | str)
