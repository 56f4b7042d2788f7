"""The per-process cache shared by all messages, which opens a message's client."""

import contextlib
import ctypes
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from flwr.app import (
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.data import (
    ClientData,
    agreed_place,
    broken_by_data,
    client_label,
    file_stamps,
    node_place,
    open_client_data,
    owner_key,
    read_agreement,
)
from flower_fgl.client_apps.runtime.model_store import copy_model_of_run
from flower_fgl.client_apps.runtime.protection import limited
from flower_fgl.client_apps.runtime.releases import (
    ReleaseLedger,
    SplitRecord,
    SumLedger,
)
from flower_fgl.client_apps.runtime.state import (
    ClientState,
    ContextStates,
    FileStates,
    MemoryStates,
    StateStore,
)
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import PayloadError, RunError
from flower_fgl.core.held_kind import with_held_kind
from flower_fgl.core.metrics import AnyScores
from flower_fgl.core.node_settings import NodeSettings, broken_floors, parse_node_config
from flower_fgl.core.options import Scalar
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.nn.sparse import memo_bytes
from flower_fgl.protocols.base import DESCRIBE, INFO, round_settings, write_metrics
from flower_fgl.protocols.describe import AGREEMENT
from flower_fgl.protocols.exchanges import TARGETS
from flower_fgl.protocols.secure_aggregation.history import SumHistory
from flower_fgl.runs.state_files import state_folder

__all__ = ["DataCache", "Opened", "Session", "choose_device", "keep_freed_memory"]

CACHE_BYTES = 2 << 30
SUMS = "secure-sums"
"""Value of a client's state that holds the history of its secure sums."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of options of glibc's ``mallopt``."""
LARGEST_REUSED, MOST_UNUSED = 32 << 20, 256 << 20
"""Bytes of the largest block that glibc takes from freed memory, and freed bytes at the
end of its memory that it keeps."""


@cache
def keep_freed_memory() -> bool:
    """Let glibc reuse the memory of freed tensors, for the rest of the process.

    By default it returns large blocks to the operating system, which clears every page
    when a tensor of the next training step takes it again. That takes a third of a round
    on Cora. Options of the environment (``MALLOC_…_``, ``GLIBC_TUNABLES``) have priority;
    false if nothing was set.
    """
    names = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
    if not sys.platform.startswith("linux") or os.environ.keys() & names:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and (
        mallopt(M_MMAP_THRESHOLD, LARGEST_REUSED) == 1
        and mallopt(M_TRIM_THRESHOLD, MOST_UNUSED) == 1
    )


Data = TypeVar("Data")


def data_bytes(data: ClientData) -> int:
    """Estimate the memory of a client's data with cached operators and memo, in bytes."""
    return data.graph_bytes + memo_bytes(data.memo) + memo_bytes(data.training.fields)


class DataCache(Generic[Data]):
    """Graphs of a process; the oldest are dropped above ``limit`` bytes by ``size_of``."""

    def __init__(
        self, limit: int = CACHE_BYTES, size_of: Callable[[Any], int] = data_bytes
    ) -> None:
        self._limit, self._size_of = limit, size_of
        self._entries: OrderedDict[tuple[Any, ...], Data] = OrderedDict()
        self._sizes: dict[tuple[Any, ...], int] = {}
        self._total = 0

    def get(self, key: tuple[Any, ...], build: Callable[[], Data]) -> Data:
        """Return the graph cached under ``key``, else build and cache it."""
        if self._entries:
            # methods add results to the memo after the graph was returned
            self._measure(next(reversed(self._entries)))
        if key not in self._entries:
            self._entries[key] = build()
            self._measure(key)
        self._entries.move_to_end(key)
        while self._total > self._limit and len(self._entries) > 1:
            oldest, _ = self._entries.popitem(last=False)
            self._total -= self._sizes.pop(oldest)
        return self._entries[key]

    def _measure(self, key: tuple[Any, ...]) -> None:
        """Estimate a graph's memory."""
        size = self._size_of(self._entries[key])
        self._total += size - self._sizes.get(key, 0)
        self._sizes[key] = size


DESCRIBES = f"{MessageType.QUERY}.{DESCRIBE}"
UNSCALED = (DESCRIBES, f"{MessageType.QUERY}.{TARGETS}")
"""Types of the messages that a client receives before the scale of numbers is known."""
FLOORS = ("floors that the data break",)
"""Key in the memo of a client's data."""


@dataclass
class Session:
    """Per-process cache shared by all messages.

    ``memory`` holds the client states of the local engine and is ``None`` elsewhere;
    ``accepted`` are pairs of a run config and a node config whose floors the run keeps.
    """

    graphs: DataCache[ClientData] = field(default_factory=DataCache)
    memory: MemoryStates | None = None
    configs: dict[tuple[Any, ...], RunConfig] = field(default_factory=dict)
    accepted: set[tuple[Any, ...]] = field(default_factory=set)
    nodes: dict[tuple[Any, ...], NodeSettings] = field(default_factory=dict)
    _hosted: MemoryStates | None = field(default=None, init=False)
    _last: tuple[dict[str, Scalar], Any, RunConfig] | None = field(
        default=None, init=False
    )

    def __post_init__(self) -> None:
        keep_freed_memory()

    def add_config(self, values: Mapping[str, Scalar], config: RunConfig) -> None:
        """Store settings that the caller has checked already."""
        self.configs[tuple(sorted(values.items()))] = config

    def clear(self) -> None:
        """Forget graphs and states now, without waiting for the garbage collector."""
        self.graphs, self.memory = DataCache(), None

    def config(self, context: Context) -> RunConfig:
        """Return the checked settings; each run config is parsed once per process.

        Every message passes here, so that a server cannot lower a setting below a data
        owner's floor after it described the client: RunError if the run is weaker.
        """
        values, own = context.run_config, context.node_config.get("graph")
        # comparing with the settings of the last message is faster than sorting them
        if self._last is None or self._last[:2] != (values, own):
            known = values  # a data owner's own file says what "auto" is
            if own is not None:
                known = dict(with_held_kind(values, [Path(str(own))]))
            key = tuple(sorted(known.items()))
            if key not in self.configs:
                self.configs[key] = parse_config(known)
            self._last = dict(values), own, self.configs[key]
        config = self._last[2]
        pair = (id(config), tuple(sorted(context.node_config.items())))
        if pair not in self.accepted:
            broken = broken_floors(
                self.node(context),
                config.flat(),
                uploads=METHODS[config.method].uploads,
                predicts_numbers=config.predicts_numbers,
                known_methods=METHODS,
            )
            _refuse(broken, context)
            self.accepted.add(pair)
        return config

    def node(self, context: Context) -> NodeSettings:
        """Return the checked node config; each is parsed once per process."""
        values = context.node_config
        key = tuple((name, type(value), value) for name, value in values.items())
        if key not in self.nodes:
            self.nodes[key] = parse_node_config(values)
        return self.nodes[key]

    def pack_metrics(
        self,
        context: Context,
        scores: Mapping[str, Mapping[str, AnyScores]],
        seconds: Mapping[str, float],
        *,
        loss: float | None = None,
        terms: Mapping[str, float] | None = None,
    ) -> MetricRecord:
        """Pack loss, scores and seconds of a reply, as far as the node sends them."""
        limits = self.node(context)
        if limits.hides_numbers:
            scores, loss, terms = limited(limits, scores, loss, terms)
        return write_metrics(scores, seconds, loss, terms)

    def releases(self, context: Context) -> ReleaseLedger | None:
        """Return the counter of the node's ``max-releases``, ``None`` without it."""
        if "max-releases" not in context.node_config:
            return None
        node = context.node_config
        settings = self.node(context)
        return ReleaseLedger(
            Path(settings.state_dir), owner_key(node), settings.max_releases
        )

    @contextlib.contextmanager
    def sums(self, context: Context, state: ClientState) -> Iterator[SumHistory]:
        """Open the history of a client's secure sums, and keep what is added to it.

        It is in the node's ``state-dir``, for all runs, or in the client's state.
        """
        settings = self.node(context)
        is_fixed = settings.fixed_roster
        if settings.state_dir:
            ledger = SumLedger(Path(settings.state_dir), owner_key(context.node_config))
            with ledger.held(is_fixed=is_fixed) as history:
                yield history
            return
        text = str(state.values.get(SUMS, "{}"))
        history = SumHistory.from_json(text, is_fixed=is_fixed)
        yield history
        if history.sums:
            state.values[SUMS] = history.to_json()

    def split_record(self, data: ClientData, context: Context) -> SplitRecord | None:
        """Return the record of the owner's first split, ``None`` if there is none to keep.

        That is so without ``state-dir``, with ``own-split = false``, and for a partition
        of a dataset.
        """
        node = context.node_config
        if not data.graph.drawn_from or not node.get("state-dir"):
            return None
        settings = self.node(context)
        if not settings.own_split:
            return None
        return SplitRecord(
            Path(settings.state_dir),
            owner_key(node),
            client_label(node),
            data.graph.drawn_from,
        )

    @contextlib.contextmanager
    def hosted_states(self, context: Context) -> Iterator[None]:
        """Keep the states of the clients that a node hosts together, as one state.

        They are stored when the block ends, if a client has changed its own. PayloadError
        if another process has stored them in the meantime.
        """
        place, _ = node_place(context.node_config)
        store = self.states(self.config(context), context)
        together = store.load(context, place)
        self._hosted = memory = MemoryStates()
        memory.restore(context.run_id, together.split())
        try:
            yield
        finally:
            self._hosted = None
        if memory.is_changed:
            together.join(memory.of_run(context.run_id))
            store.save(context, place, together)

    def states(self, config: RunConfig, context: Context) -> StateStore:
        """Choose the store of client states; an owner's folder is from its node config."""
        if self._hosted is not None:
            return self._hosted
        if self.memory is not None:
            return self.memory
        folder = state_folder(context.node_config, config.state_dir)
        if not folder:
            return ContextStates()
        is_owned = "graph" in context.node_config
        return FileStates(
            Path(folder),
            keep_every=config.checkpoint_every,
            owner=owner_key(context.node_config) if is_owned else "",
            is_synced=is_owned,
        )

    def rewind(self, message: Message, context: Context) -> Message:
        """Rewind a client to a run id and round; reply with its last trained round, or 0.

        A client rewinds at most once in a run, and before its first answer, else
        PayloadError: the server could get a second answer to the same round.
        """
        if "graph" in context.node_config:
            self.open(message, context)  # checks the limits that depend on the graph
        point = round_settings(message.content)
        partition_id, _ = agreed_place(message, context)
        store = self.states(self.config(context), context)
        current = store.load(context, partition_id)
        keys = current.group("secure")
        run_id, server_round = int(point["run-id"]), int(point["server-round"])  # type: ignore[arg-type]
        if not point["is-restored"]:
            if current.has_answered:
                raise PayloadError(
                    "the client has answered messages of this run and does not rewind"
                )
            if isinstance(store, FileStates):  # the others end with the run
                store.rewind(context, partition_id, run_id, server_round)
        copy_model_of_run(context, partition_id, run_id, server_round)
        state = store.load(context, partition_id)
        if keys:  # drawn when the run resumed; the server knows only these
            answered = state.group("secure").get("masked-round", torch.tensor(0))
            # a round that was answered in this run stays answered
            keys["masked-round"] = max(answered, keys.get("masked-round", answered))
            state.set_group("secure", keys)
            store.save(context, partition_id, state)
        info = ConfigRecord({"round": int(state.values.get("round", 0))})
        return Message(RecordDict({INFO: info}), reply_to=message)

    def open(self, message: Message, context: Context) -> tuple[Client, StateStore]:
        """Open a client's graph, settings and state.

        FglError if one of them cannot be read, or if the owner does not let this run draw
        the split that it draws.
        """
        node, content = context.node_config, message.content
        kind = message.metadata.message_type
        # most clients hold a partition: they have neither
        agreement = read_agreement(message) if AGREEMENT in content else None
        stamps = file_stamps(node) if "graph" in node else ()
        if "graph" in node and agreement is None and kind != DESCRIBES:
            raise PayloadError("the message lacks the agreement with the data owners")
        config = self.config(context)
        if torch.get_num_threads() != config.threads:
            torch.set_num_threads(config.threads)
        device = choose_device(config.device)
        key = (id(config), str(device), tuple(sorted(node.items())), agreement, stamps)
        data = self.graphs.get(
            key, lambda: open_client_data(config, context, device, agreement)
        )
        if FLOORS not in data.memo:  # the key above has all that decides it
            data.memo[FLOORS] = broken_by_data(self.node(context), config, data)
        _refuse(data.memo[FLOORS], context)
        record = self.split_record(data, context)
        if record is not None:
            record.require()
        has_values = data.graph.graph.targets is not None  # labels or numbers
        if has_values and config.predicts_numbers and kind not in UNSCALED:
            # other tasks do not load the code of numbers
            from flower_fgl.client_apps.runtime.target_scaling import scaled

            data = scaled(data, config, content)
        partition_id, num_partitions = data.place
        store = self.states(config, context)
        state = store.load(context, partition_id)
        return Client(config, partition_id, num_partitions, data, state, device), store


@dataclass(eq=False)
class Opened:
    """A client during a message that it answers once, and a training's download."""

    message: Message
    context: Context
    client: Client
    store: StateStore
    server_round: int
    download: Any = None


def _refuse(broken: list[str], context: Context) -> None:
    """Raise an error that names the owner if a run breaks any of its limits."""
    if broken:
        raise RunError(
            f"{client_label(context.node_config)} refuses the run: the run has "
            f"{'; it has '.join(broken)}."
        )


def choose_device(name: str) -> torch.device:
    """Return the torch device of the setting; RunError if this machine lacks it."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    found = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise RunError(
            f'device = "{name}", but torch sees {found} GPUs here. Use device = "auto"; '
            "under Ray a client sees a GPU only with --client-gpus."
        )
    return device
