"""A client's state between rounds, and the three stores that keep it.

- :class:`MemoryStates`: in this process, for the local engine.
- :class:`FileStates`: with the setting ``state-dir``, one safetensors file per run and
  client, written atomically.
- :class:`ContextStates`: otherwise, Flower's ``context.state``. In simulation it costs 7
  to 16 ms per MB and message, and it is lost with the process that holds it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock
from flwr.app import ConfigRecord, Context
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as save_arrays
from safetensors.torch import save
from torch import Tensor

from flower_fgl.core.atomic import make_private_folder, write_file
from flower_fgl.core.errors import PayloadError, RunError
from flower_fgl.core.options import Scalar
from flower_fgl.protocols.base import config_record, read_tensors, write_tensors
from flower_fgl.runs.state_files import (
    HASHED,
    group_file,
    hashed_groups,
    is_secret,
    is_whole,
    keep_file,
    link_file,
    state_file,
)

__all__ = ["ClientState", "ContextStates", "FileStates", "MemoryStates", "StateStore"]
__all__ += ["part_of", "read_state", "split_prefix", "write_state"]

Entry = TypeVar("Entry")
MASKED = "secure/masked-round"
"""Tensor of a state: the last round with a masked upload."""
TOGETHER = "clients"
"""Exchange that a state of several clients claims."""
ANSWERED = "answered/"
"""Prefix of the values that hold the last answered round of each exchange."""


@dataclass
class ClientState:
    """One client's state; tensors are replaced, never changed in place.

    A tensor is, for example, ``optimizer/exp_avg/encoder.weight``; a value the round of
    the last training. ``claimed`` is the exchange that the current message answers; not
    stored.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Scalar] = field(default_factory=dict)
    claimed: str = field(default="", init=False, compare=False)

    @property
    def has_answered(self) -> bool:
        """Whether the client has answered any round of any exchange."""
        return any(key.startswith(ANSWERED) for key in self.values)

    def claim(self, exchange: str, number: int, last: int, *, first: int = 0) -> None:
        """Note that a round of an exchange is answered; each is answered only once.

        A second answer to the same round would let the server average the noise away.
        PayloadError if this or a later round was answered, or it is not one of ``first``
        to ``last``.
        """
        kept = self.values.get(ANSWERED + exchange)
        if kept is not None and number <= int(kept):
            raise PayloadError(
                f'round {number} of the exchange "{exchange}" is refused: the client has '
                f"answered round {int(kept)}, and it answers every round once"
            )
        if not first <= number <= last:
            raise PayloadError(
                f'round {number} of the exchange "{exchange}" is refused: its rounds are '
                f"{first} to {last}"
            )
        self.values[ANSWERED + exchange] = number
        self.claimed = exchange

    def group(self, prefix: str) -> dict[str, Tensor]:
        """Return copies of the tensors under ``prefix/``, sorted by names without it."""
        found = part_of(self.tensors, prefix + "/")
        return {name: found[name].clone() for name in sorted(found)}

    def share_group(self, prefix: str, other: ClientState) -> bool:
        """Let tensors under ``prefix/`` be those of another client, if they are equal."""
        start = prefix + "/"
        own, others = part_of(self.tensors, start), part_of(other.tensors, start)
        if own.keys() != others.keys():
            return False
        for name, tensor in others.items():
            if own[name] is not tensor and not torch.equal(own[name], tensor):
                return False
        self.tensors |= {start + name: tensor for name, tensor in others.items()}
        return True

    def has_group(self, prefix: str) -> bool:
        """Return whether there are tensors under ``prefix/``."""
        return any(name.startswith(prefix + "/") for name in self.tensors)

    def without_secrets(self) -> ClientState:
        """Return a copy that may be kept, without the secrets of secure aggregation."""
        kept = {name: t for name, t in self.tensors.items() if not is_secret(name)}
        return ClientState(kept, dict(self.values))

    def compact(self) -> ClientState:
        """Return a copy on the CPU whose tensors own their memory.

        A tensor of a stacked client is a view into the memory of all clients, which
        pickle would write once for every client. Those of hashed groups are not copied,
        so that pickle writes once what clients share.
        """
        own, _ = self.divided()
        kept = {
            name: t.detach().to("cpu", copy=True) if name in own else t.cpu()
            for name, t in self.tensors.items()
        }
        return ClientState(kept, dict(self.values))

    def divided(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """Return the tensors outside hashed groups, and those of each group by its hash."""
        hashes = hashed_groups(self.values)
        groups: dict[str, dict[str, Tensor]] = {found: {} for found in hashes.values()}
        own = {}
        for name, tensor in self.tensors.items():
            prefix = name
            while prefix and prefix not in hashes:
                prefix = prefix.rpartition("/")[0]
            if prefix:
                groups[hashes[prefix]][name.removeprefix(f"{prefix}/")] = tensor
            else:
                own[name] = tensor
        return own, groups

    def set_group(
        self, prefix: str, tensors: Mapping[str, Tensor], *, is_copied: bool = True
    ) -> None:
        """Replace the tensors under ``prefix/`` by copies of ``tensors``, which are dense.

        The groups ``model`` and ``optimizer`` and the value ``round`` belong to the base
        class. Tensors that nobody changes need not be copied.
        """
        start = prefix + "/"
        for name, t in tensors.items():
            if not isinstance(t, Tensor) or t.layout != torch.strided:
                raise TypeError(
                    f"client state {start}{name} must be a dense tensor, got "
                    f"{type(t).__name__}"
                )
        kept = {k: v for k, v in self.tensors.items() if not k.startswith(start)}
        if str(self.values.get(prefix, "")).startswith(HASHED):
            del self.values[prefix]
        self.tensors = kept | {
            start + name: t.detach().clone() if is_copied else t.detach()
            for name, t in tensors.items()
        }

    def split(self) -> dict[int, ClientState]:
        """Return the states of clients that are stored as this one, by partition-id."""
        found: dict[int, ClientState] = {}
        for kind in ("tensors", "values"):
            for path, entry in getattr(self, kind).items():
                number, _, name = path.partition("/")
                if number.isdigit():
                    state = found.setdefault(int(number), ClientState())
                    getattr(state, kind)[name] = entry
        return found

    def join(self, states: Mapping[int, ClientState]) -> None:
        """Become the state of several clients, by partition-id, see :meth:`split`.

        ``round`` is the latest of them. It claims to be the next version of what it was:
        a store refuses it if another process has stored that version.
        """
        version = int(self.values.get(ANSWERED + TOGETHER, 0)) + 1
        self.tensors, self.values = {}, {}
        for number, state in states.items():
            self.tensors |= {f"{number}/{n}": t for n, t in state.tensors.items()}
            self.values |= {f"{number}/{n}": v for n, v in state.values.items()}
        rounds = [int(state.values.get("round", 0)) for state in states.values()]
        self.values["round"] = max(rounds, default=0)
        self.values[ANSWERED + TOGETHER] = version
        self.claimed = TOGETHER

    def set_hashed_group(self, prefix: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace a group that seldom changes, and set the value of this name to its hash.

        It has a file of its own, which clients with the same group share, and which no
        round writes again.
        """
        self.set_group(prefix, tensors)
        own = part_of(self.tensors, f"{prefix}/")  # copies: none share their memory
        packed = save({name: t.cpu().contiguous() for name, t in own.items()})
        digest = hashlib.blake2b(packed, digest_size=16)
        self.values[prefix] = f"{HASHED}{digest.hexdigest()}"


def part_of(entries: Mapping[str, Entry], prefix: str) -> dict[str, Entry]:
    """Return the entries whose names begin with ``prefix``, by the rest of their names."""
    return {
        name.removeprefix(prefix): entry
        for name, entry in entries.items()
        if name.startswith(prefix)
    }


def split_prefix(
    entries: Mapping[str, Entry], prefix: str
) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """Return the other entries, and those of :func:`part_of`."""
    others = {n: entry for n, entry in entries.items() if not n.startswith(prefix)}
    return others, part_of(entries, prefix)


class StateStore(ABC):
    """Store of client states."""

    @abstractmethod
    def load(self, context: Context, partition_id: int) -> ClientState:
        """Return a client's state, empty before the first save; RunError if damaged."""

    def save(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Store a client's state atomically; RunError if a file cannot be written.

        Values are bool, int, float or str, which every store can keep; else TypeError.
        """
        for key, value in state.values.items():
            if type(value) not in (bool, int, float, str):
                raise TypeError(
                    f"client state value {key} must be a bool, int, float or str, got "
                    f"{type(value).__name__}. Store tensors with set_group."
                )
        self._store(context, partition_id, state)

    def note(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Store only the round that ``state`` claims, and none of its other changes."""
        key = ANSWERED + state.claimed
        kept = self.load(context, partition_id)
        kept.values[key] = state.values[key]
        kept.claimed = state.claimed
        self.save(context, partition_id, kept)

    @abstractmethod
    def _store(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Store a checked state atomically."""


class MemoryStates(StateStore):
    """Keep states in this process, for the local engine."""

    def __init__(self) -> None:
        self._states: dict[tuple[int, int], ClientState] = {}
        self.is_changed = False

    def load(self, context: Context, partition_id: int) -> ClientState:
        """Return a shallow copy, so that a failed message leaves the stored state as is."""
        state = self._states.get((context.run_id, partition_id), ClientState())
        return ClientState(dict(state.tensors), dict(state.values))

    def _store(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Store the state object."""
        self._states[context.run_id, partition_id] = state
        self.is_changed = True

    def of_run(self, run_id: int) -> dict[int, ClientState]:
        """Return the states of a run by partition-id."""
        return {pid: s for (run, pid), s in self._states.items() if run == run_id}

    def restore(self, run_id: int, states: Mapping[int, ClientState]) -> None:
        """Replace the states of a run."""
        self._states = {key: s for key, s in self._states.items() if key[0] != run_id}
        self._states |= {(run_id, pid): state for pid, state in states.items()}

    def save_states(self, run_id: int, folder: Path) -> None:
        """Write every state of a run to a folder without secrets, one file per client."""
        folder.mkdir(parents=True, exist_ok=True)
        for partition_id, state in self.of_run(run_id).items():
            path = folder / f"{partition_id:06d}.safetensors"
            write_state(path, state.without_secrets())

    def load_states(self, run_id: int, folder: Path) -> None:
        """Replace the states of a run by those of a folder; RunError if one is damaged."""
        paths = folder.glob("*.safetensors")
        self.restore(run_id, {int(path.stem): read_state(path) for path in paths})


class FileStates(StateStore):
    """Keep each state in a file of a folder that on a cluster all machines must share.

    With ``keep_every`` rounds between the server's checkpoints, a client's states at the
    last two checkpoints are kept beside its current one, so that it can be rewound with
    the server; 0 keeps only the current state. ``owner`` is the name of a data owner's
    files: its partition-id comes from the server and must not change in a run, since
    under another number it would have an empty state. ``is_synced`` states outlive a
    power failure, and take about 3 ms each.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_every: int = 0,
        owner: str = "",
        is_synced: bool = False,
    ) -> None:
        self.folder = folder
        self.keep_every = keep_every
        self.owner = owner
        self.is_synced = is_synced

    def _path(self, context: Context, partition_id: int) -> Path:
        """Return the file of a client, whose number in this run never changes."""
        if self.owner and partition_id >= 0:
            self._bind(context.run_id, partition_id)
        return state_file(self.folder, context.run_id, partition_id, self.owner)

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Let other processes wait; an OSError becomes a RunError that names the file."""
        try:
            make_private_folder(self.folder)
            with FileLock(f"{path}.lock"):
                yield
        except OSError as error:
            raise RunError(
                f"Cannot write client state {path}: {error}. Check state-dir."
            ) from error

    def _bind(self, run_id: int, partition_id: int) -> None:
        """Keep the first partition-id that a data owner got in a run; refuse others."""
        place = self.folder / f"{run_id}-owner-{self.owner}.txt"
        with self._locked(place):
            if not place.exists():
                write_file(place, str(partition_id).encode(), is_private=True)
            bound = place.read_text()
        if bound != str(partition_id):
            raise PayloadError(
                f"the message gives this data owner the partition-id {partition_id}, but "
                f"in this run it is {bound}"
            )

    def load(self, context: Context, partition_id: int) -> ClientState:
        """Read the client's file."""
        path = self._path(context, partition_id)
        return read_state(path) if path.exists() else ClientState()

    def _store(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Write the file atomically, unless the stored state is of a later round.

        PayloadError if a message claims a round and another process has since answered it
        or a later one: nothing would remember this answer.
        """
        # a late worker must not undo what the client has since trained in another process
        path = self._path(context, partition_id)
        with self._locked(path):
            stored = _stored(path)
            kept = None if stored is None else int(stored[0].get("round", 0))
            new = int(state.values.get("round", 0))
            if state.claimed and stored is not None:
                _merge_answers(*stored, state)
                if kept is not None and kept > new:
                    raise PayloadError(
                        f'round {new} of the exchange "{state.claimed}" is refused: '
                        f"the client has stored its state of round {kept}"
                    )
            if kept is None or kept <= new:
                # an evaluation changes the file, too, of a client that did not train
                evaluated = int(state.values.get(ANSWERED + "evaluate", 0))
                self._keep(path, kept, max(new, evaluated))
                write_state(path, state, is_synced=self.is_synced)

    def _keep(self, path: Path, kept: int | None, new: int) -> None:
        """Keep a checkpoint's state, without secrets, before a round overwrites it."""
        if not self.keep_every or kept is None:
            return
        newest = (new - 1) // self.keep_every * self.keep_every
        rounds = (newest - self.keep_every, newest)
        points = [_kept_at(path, number) for number in rounds if number > 0]
        missing = [
            point
            for point in points
            if kept <= int(point.stem[-6:]) and not point.exists()
        ]
        for point in missing:
            keep_file(path, point)
        if missing:  # a search of the folder would read the names of all clients
            for number in range(rounds[0] - self.keep_every, 0, -self.keep_every):
                _kept_at(path, number).unlink(missing_ok=True)

    def rewind(
        self, context: Context, partition_id: int, run_id: int, server_round: int
    ) -> None:
        """Restore the state of a round of the interrupted run ``run_id``.

        It is empty if the client had not trained yet; ``context`` is of the resumed run.
        """
        path = self._path(context, partition_id)
        source = state_file(self.folder, run_id, partition_id, self.owner)
        with self._locked(path):
            self._restore(source, path, server_round)

    def _restore(self, source: Path, path: Path, server_round: int) -> None:
        """Replace a client's state by that of a round in the interrupted run."""
        stored = _stored(source)
        newest = None if stored is None else int(stored[0].get("round", 0))
        if source != path and source.exists():
            keep_file(source, source)  # the interrupted run needs no secrets
        if _kept_at(source, server_round).exists():
            link_file(_kept_at(source, server_round), path)
        elif newest is not None and newest <= server_round:
            link_file(source, path)
        else:
            path.unlink(missing_ok=True)
        if path.exists():
            self._forget_later(path, server_round)

    def _forget_later(self, path: Path, server_round: int) -> None:
        """Let a rewound client answer the rounds after the checkpoint again.

        A round that failed is answered, too, while the state is still of the one before.
        """
        state = read_state(path)
        before = dict(state.values)
        for key, value in before.items():
            if key.startswith((f"{ANSWERED}train", f"{ANSWERED}evaluate")):
                state.values[key] = min(int(value), server_round)
        if state.values != before:
            write_state(path, state, is_synced=self.is_synced)


def read_state(path: Path) -> ClientState:
    """Read a file of :func:`write_state`; RunError if it is missing or damaged."""
    try:
        try:  # as arrays they are read in a third of the time
            tensors, values = _read(path, "np")
        except TypeError:  # NumPy has no bfloat16
            tensors, values = _read(path, "pt")
        for prefix, digest in hashed_groups(values).items():
            group = _read_group(group_file(path.parent, digest))
            tensors |= {f"{prefix}/{name}": tensor for name, tensor in group.items()}
    except (OSError, SafetensorError, ValueError) as error:
        raise RunError(f"Cannot read client state {path}: {error}.") from error
    return ClientState(tensors, values)


def _read(path: Path, framework: str) -> tuple[dict[str, Tensor], dict[str, Scalar]]:
    """Read the tensors and the values of one file."""
    with safe_open(path, framework) as file:
        tensors = {n: torch.as_tensor(file.get_tensor(n)) for n in file.keys()}  # noqa: SIM118 (not a dict)
        return tensors, _values(file)


@lru_cache(maxsize=2)
def _read_group(path: Path) -> dict[str, Tensor]:
    """Read the file of a hashed group, once for clients in turn that share it."""
    return _read(path, "pt")[0]


def write_state(path: Path, state: ClientState, *, is_synced: bool = False) -> None:
    """Write a client's state atomically, readable only by the owner of the process.

    Hashed groups are written unless a whole file of this name exists.
    """
    own, groups = state.divided()
    for digest, tensors in groups.items():
        place = group_file(path.parent, digest)
        if not is_whole(place):
            make_private_folder(place.parent)
            _write(place, tensors, {}, is_synced=is_synced)
    _write(path, own, state.values, is_synced=is_synced)


def _write(
    path: Path,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Scalar],
    *,
    is_synced: bool,
) -> None:
    """Write one file of tensors and values."""
    tensors = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
    # safetensors' own writer reports a full disk by another error, and keeps a part
    about = {"values": json.dumps(values)}
    try:  # arrays are packed in a third of the time
        data = save_arrays({n: t.numpy() for n, t in tensors.items()}, about)
    except TypeError:  # NumPy has no bfloat16
        data = save(tensors, about)
    write_file(path, data, is_private=True, is_synced=is_synced)


def _kept_at(path: Path, server_round: int) -> Path:
    """Return the path of the state kept for a checkpoint's round."""
    return path.with_name(f"{path.stem}.at-{server_round:06d}.safetensors")


def _merge_answers(
    stored: Mapping[str, Scalar], last: Tensor | None, state: ClientState
) -> None:
    """Take over what other processes have answered since ``state`` was loaded.

    ``stored`` and ``last`` are those of :func:`_stored`. PayloadError if one has answered
    the round that ``state`` claims, or a later one.
    """
    key = ANSWERED + state.claimed
    if int(stored.get(key, -1)) >= int(state.values[key]):
        raise PayloadError(
            f'the exchange "{state.claimed}" is refused: another process has answered '
            "this round"
        )
    for name, value in stored.items():
        if name.startswith(ANSWERED):
            own = int(state.values.get(name, value))
            state.values[name] = max(int(value), own)
    if last is not None:
        state.tensors[MASKED] = torch.maximum(last, state.tensors.get(MASKED, last))


def _stored(path: Path) -> tuple[dict[str, Scalar], Tensor | None] | None:
    """Read the values of a state file, and the last round that was masked.

    ``None`` if the file is missing or unreadable.
    """
    try:
        with safe_open(path, "pt") as file:
            last = file.get_tensor(MASKED) if MASKED in file.keys() else None  # noqa: SIM118 (not a dict)
            return _values(file), last
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
        if "state-tensors" not in context.state:
            return ClientState()
        values = config_record(context.state, "state-values")
        return ClientState(
            read_tensors(context.state, "state-tensors", is_checked=False),
            dict(values),  # type: ignore[arg-type]
        )

    def _store(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Pack the state into two records."""
        context.state["state-tensors"] = write_tensors(state.tensors)
        context.state["state-values"] = ConfigRecord(dict(state.values))

    def note(self, context: Context, partition_id: int, state: ClientState) -> None:
        """Store the claimed round without unpacking the tensors."""
        if "state-values" not in context.state:
            super().note(context, partition_id, state)
            return
        key = ANSWERED + state.claimed
        config_record(context.state, "state-values")[key] = state.values[key]
