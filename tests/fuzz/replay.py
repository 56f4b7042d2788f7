"""Record the replies of a run in the local engine, and run the server on mutated ones."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import Context, Message, RecordDict
from torch import Tensor

from flower_fgl.client_apps.dispatch import Dispatcher
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.state import MemoryStates
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import FglError
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.nn.backbone import is_finite
from flower_fgl.protocols.describe import Description
from flower_fgl.runs.checkpoints import Checkpoint, Snapshot
from flower_fgl.simulation.local import run_config_of
from flower_fgl.simulation.local_grid import LocalGrid, task_identity
from flower_fgl.strategies.rounds.checkpointing import (
    client_descriptions,
    pack_run,
    resume_run,
)
from flower_fgl.strategies.rounds.discovery import describe_nodes
from tests.fuzz.mutations import BENIGN, mutate
from tests.support.short_runs import SMALL, shortened

__all__ = ["Key", "Outcome", "Recording", "settings_of", "variants"]

UNRECORDED = "this message has no recorded reply"
RESUME = "query.resume"
DESCRIBE = "query.describe"


@dataclass(frozen=True, order=True)
class Key:
    """A reply: its message type, round, client, and number among equal ones."""

    kind: str
    server_round: int
    partition_id: int
    number: int = 0


@dataclass
class Outcome:
    """What the server did with one mutated reply.

    Parameters
    ----------
    verdict : {"dropped", "accepted", "refused", "crash", "poisoned", "unexplained"}
        ``refused``: the run did not start with this description. ``unexplained``: the
        reply was accepted, but the mutation is not benign.
    detail : str
        Reason or traceback.
    """

    verdict: str
    detail: str = ""


@dataclass
class Rows:
    """Collects the lines of the run folder."""

    rounds: list[Mapping[str, Any]] = field(default_factory=list)

    def describe_clients(self, rows: Any) -> None:
        pass

    def append_clients(self, rows: Any) -> None:
        json.dumps(list(rows))

    def append_round(self, row: Mapping[str, Any]) -> None:
        json.dumps(dict(row))
        self.rounds.append(row)

    def append_release(self, row: Any) -> None:
        pass

    def failures(self) -> list[tuple[int, str]]:
        return [
            (failure["partition_id"], failure["reason"])
            for row in self.rounds
            for failure in row["failures"]
            if failure["reason"] != UNRECORDED
        ]


def variants() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return methods and settings to record, by label: every method, and exchanges that
    only some settings have."""
    secure = {"secure_aggregation": True}
    out: dict[str, tuple[str, dict[str, Any]]] = {m: (m, {}) for m in METHODS}
    out["fedavg, upload-clip"] = ("fedavg", {"upload_clip": 0.5})
    out["fedpg, upload-clip"] = ("fedpg", {"upload_clip": 0.5})
    out["fedavg, evaluate"] = ("fedavg", {"evaluate": "both", "participation": 0.6})
    out["fedpg, evaluate"] = ("fedpg", {"eval_policy": "refresh", "participation": 0.6})
    out["fedavg, finetune"] = ("fedavg", {"fedavg": {"finetune_epochs": 1}})
    out["fedavg, secure"] = ("fedavg", secure)
    out["opfgl, secure"] = ("opfgl", secure)
    return out


def settings_of(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat run config of a short run."""
    short = {**shortened(method, SMALL), **settings, "join_timeout": 0.02}
    return run_config_of(
        method=method, dataset="synthetic", clients=3, seed=4, settings=short
    )


class Recording:
    """The replies of one run, on which the server runs again.

    Parameters
    ----------
    label : str
        Key of :func:`variants`.

    Attributes
    ----------
    replies : dict of Key to RecordDict
        Contents of all replies of the run.
    """

    def __init__(self, label: str) -> None:
        method, settings = variants()[label]
        self.label = label
        self.values = settings_of(method, settings)
        self.config: RunConfig = parse_config(self.values)
        # masks of secure aggregation depend on who takes part: clients must answer
        self.is_live = self.config.secure_aggregation
        self.replies: dict[Key, RecordDict] = {}
        self._session = Session(memory=MemoryStates())
        self._change: Callable[[Key, RecordDict], RecordDict] | None = None
        self._dropped: dict[Key, str] = {}
        self._seen: Counter[tuple[str, int, int]] = Counter()
        self._is_recording = True
        self._is_reached = False
        self._verdict, self.reference, self._reference_rows = self._run()
        assert not self._reference_rows.failures(), self._reference_rows.failures()
        self._record_resume()
        self._is_recording = False

    # ------------------------------------------------------------------ clients
    def __call__(self, message: Message, context: Context) -> Message:
        """Handle a message as a client, from the recording where that is possible."""
        pid = int(context.node_config["partition-id"])  # type: ignore[arg-type]
        kind = message.metadata.message_type
        about = message.content.config_records.get("config", {})
        number = int(about.get("server-round", 0))  # type: ignore[arg-type]
        place = (kind, number, pid)
        key = Key(*place, self._seen[place])
        self._seen[place] += 1
        if self._is_recording or self.is_live:
            content = Dispatcher(self._session)(message, context).content
            if self._is_recording:
                self.replies[key] = RecordDict(dict(content))
        elif key in self.replies:
            content = RecordDict(dict(self.replies[key]))
        else:
            raise FglError(UNRECORDED)
        if self._change is not None:
            content = self._change(key, content)
        return Message(content, reply_to=message)

    def _run(self) -> tuple[str, str, Rows]:
        """Run the server; return an error, a hash of its state, and its lines."""
        rows = Rows()
        self._seen.clear()
        if self.is_live:
            self._session.memory = MemoryStates()
        with task_identity(5):
            grid = LocalGrid(self, 3, self.values, run_id=5)
            method = METHODS[self.config.method]
            strategy = method.load_strategy()(self.config, recorder=rows)
            error = ""
            try:
                result = strategy.start(grid)
                json.dumps(
                    {n: dict(m) for n, m in result.train_metrics_clientapp.items()}
                )
            except FglError as raised:
                error = f"{type(raised).__name__}: {raised}"
        self.strategy = strategy
        return error, fingerprint(strategy, rows), rows

    # ------------------------------------------------------------------ one mutant
    def judge(self, key: Key, name: str, seed: int, reason: str) -> Outcome:
        """Run the server with one mutated reply.

        Parameters
        ----------
        key : Key
            The reply.
        name, seed : str and int
            The mutation and its seed.
        reason : str
            Key of ``BENIGN``, ``""`` if the server must drop the reply.
        """
        assert not reason or reason in BENIGN

        def change(at: Key, old: RecordDict) -> RecordDict:
            return mutate(name, seed, old)[0] if at == key else old

        self._change = change
        try:
            if key.kind == RESUME:
                return self._judge_resume(key)
            if key.kind == DESCRIBE:
                return self._judge_description(key, reason)
            return self._judge_reply(key, reason)
        except Exception as error:
            logging.getLogger(__name__).debug("crash", exc_info=True)
            return Outcome("crash", f"{type(error).__name__}: {str(error)[:300]}")

    def _judge_reply(self, key: Key, reason: str) -> Outcome:
        error, state, rows = self._run()
        found = [text for pid, text in rows.failures() if pid == key.partition_id]
        others = [pid for pid, _ in rows.failures() if pid != key.partition_id]
        for text in found:
            if len(text) > 500 or not text.isprintable():
                return Outcome("unexplained", f"long text: {text!r}")
        if rows.rounds and not is_state_finite(self.strategy):
            return Outcome("poisoned", "the state is not finite")
        is_failed = any(row["status"] == "failed" for row in rows.rounds)
        if self.is_live and reason == "counts" and is_failed:
            return Outcome("accepted", "mask")
        if found:
            if state != self.dropped(key):
                return Outcome(
                    "poisoned", f"dropped, but the state differs: {found[0]}"
                )
            return Outcome("dropped", found[0])
        if error and self.is_live and state == self.dropped(key):
            return Outcome("dropped", error)  # too few clients are left to unmask
        if error.startswith("RunError: fedgcn sums over all clients before round 1"):
            return Outcome("refused", error)  # without one client the sums are wrong
        if error.startswith("RunError") and "Both owners must list an edge" in error:
            return Outcome("refused", error)  # nobody knows which of the owners lies
        if error:
            return Outcome("crash", error)
        if others and not self.is_live and reason != "nothing":
            return Outcome("poisoned", f"clients {others} were dropped instead")
        if not reason and state != self.reference:
            return Outcome("unexplained", "accepted")
        if not reason:
            return Outcome("unexplained", "accepted without an effect")
        return Outcome("accepted", reason)

    def dropped(self, key: Key) -> str:
        """Return the hash of the state when a client answers with an error instead."""
        if key not in self._dropped:

            def change(at: Key, old: RecordDict) -> RecordDict:
                if at == key:
                    raise FglError("no reply")
                return old

            self._change = change
            self._dropped[key] = self._run()[1]
        return self._dropped[key]

    def _judge_description(self, key: Key, reason: str) -> Outcome:
        """Describe the nodes; run the server if the description is accepted."""
        self._seen.clear()
        with task_identity(5):
            grid = LocalGrid(self, 3, self.values, run_id=5)
            nodes = list(grid.contexts)
            answers = describe_nodes(grid, nodes, self.config)
        broken = {
            pid: answer.reason
            for pid, node in enumerate(nodes)
            if not isinstance(answer := answers[node], Description)
        }
        if set(broken) - {key.partition_id}:
            return Outcome("poisoned", "another client was dropped")
        if broken:
            text = broken[key.partition_id]
            if len(text) > 600 or not text.isprintable():
                return Outcome("unexplained", f"the reason is not shortened: {text!r}")
            return Outcome("dropped", text)
        if not reason:
            return Outcome("unexplained", "accepted")
        error, _, rows = self._run()
        if rows.rounds and not is_state_finite(self.strategy):
            return Outcome("poisoned", "the state is not finite")
        if error.startswith("RunError"):
            return Outcome("refused", error)
        if error:
            return Outcome("crash", error)
        if refused := self.strategy.federation.refused:
            return Outcome("dropped", refused[0].reason)
        return Outcome("accepted", reason)

    # ------------------------------------------------------------------ resuming
    def _record_resume(self) -> None:
        """Record the replies to the resume query."""
        strategy = self._resumed = self.strategy
        self._checkpoint = Checkpoint(
            folder=None,  # type: ignore[arg-type]  only named in errors
            server_round=self.config.rounds,
            engine="local",
            run_id=5,
            config={},
            versions={},
            clients=json.loads(json.dumps(client_descriptions(strategy.federation))),
            snapshot=pack_run(strategy.loop, strategy.server_state(), _Result()),
        )
        if not self.is_live:
            self._resume()

    def _resume(self) -> Any:
        self._seen.clear()
        strategy = self._resumed
        with task_identity(5):
            grid = LocalGrid(self, 3, self.values, run_id=5)
            strategy.messenger.grid = grid
            nodes = dict(enumerate(grid.contexts))
            strategy.federation = replace(strategy.federation, nodes=nodes)
            resume_run(
                strategy.messenger,
                self._checkpoint,
                _Result(),  # type: ignore[arg-type]
                strategy.load_server_state,
                restores_states=True,
            )
        return strategy

    def _judge_resume(self, key: Key) -> Outcome:
        before = self._checkpoint.snapshot.part("loop").tree()["trained"]
        strategy = self._resume()
        trained = strategy.loop.trained
        others = {p: n for p, n in before.items() if p != key.partition_id}
        if others != {p: n for p, n in trained.items() if p != key.partition_id}:
            return Outcome("poisoned", "another client's round changed")
        if not is_state_finite(strategy):
            return Outcome("poisoned", "the state is not finite")
        if trained == before:
            return Outcome("accepted", "round")
        return Outcome("dropped", "the client is sent the download again")


class _Result:
    """Flower's result, as far as packing needs it."""

    train_metrics_clientapp: Mapping[int, Any] = {}
    evaluate_metrics_clientapp: Mapping[int, Any] = {}


def is_state_finite(strategy: Any) -> bool:
    """Return whether the server's state and scores hold finite numbers only."""
    own = strategy.server_state().tensors.values()
    best = strategy.loop.best_score
    return all(map(is_finite, own)) and (best is None or all(map(math.isfinite, best)))


def fingerprint(strategy: Any, rows: Rows) -> str:
    """Hash the server's state, its best round, and the scores of all rounds."""
    digest = hashlib.sha256()
    if not hasattr(strategy.loop, "federation"):
        return ""
    # a run that ended before its first exchange has no state
    own = strategy.server_state() if rows.rounds else Snapshot()
    for part in _flat({"tensors": own.tensors, "values": own.values}):
        digest.update(part)
    loop = strategy.loop
    kept = [(row["status"], row.get("metrics"), row["replies"]) for row in rows.rounds]
    about = [kept, loop.trained, loop.best_score, loop.best_round]
    digest.update(repr(about).encode())
    return digest.hexdigest()


def _flat(value: Any) -> Iterator[bytes]:
    """Yield the bytes of all tensors and plain values in a state, in a fixed order."""
    if isinstance(value, Tensor):
        yield value.detach().contiguous().numpy().tobytes()
    elif isinstance(value, Mapping):
        for name in sorted(value, key=repr):
            yield repr(name).encode()
            yield from _flat(value[name])
    elif isinstance(value, set | frozenset):
        yield repr(sorted(value)).encode()
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _flat(one)
    elif isinstance(value, Snapshot):
        yield from _flat([value.tensors, value.values])
    elif hasattr(value, "state") and callable(value.state):
        yield from _flat(value.state())
    elif hasattr(value, "__dataclass_fields__"):
        yield from _flat(vars(value))
    elif value is None or isinstance(value, bool | int | float | str):
        yield repr(value).encode()
