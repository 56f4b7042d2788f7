"""The local engine: all clients in this process, messages serialised for real."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run as FlowerRun
from flwr.supercore.task_identity import TaskIdentity

from flower_fgl.client_app import DispatchingClientApp
from flower_fgl.client_apps.state import MemoryStates
from flower_fgl.client_apps.workplace import Workplace
from flower_fgl.config import RunConfig
from flower_fgl.datasets.store import open_store
from flower_fgl.errors import ConfigError, FglError
from flower_fgl.methods import METHODS
from flower_fgl.options import Scalar, kebab
from flower_fgl.runs import Run
from flower_fgl.server_app import OnRound, run_server

__all__ = [
    "LocalGrid",
    "check_run",
    "run_config_of",
    "run_local",
    "simulate",
    "task_identity",
]

CLIENT_RAISED = 2
"""Flower's error code of a client that raised."""


class LocalGrid(Grid):
    """A Grid whose nodes live in this process, one after the other.

    Messages and replies pass through Flower's own wire format, so nothing goes through
    that a deployment would not carry.

    Parameters
    ----------
    client_app : ClientApp
        Handles every node's messages.
    num_nodes : int
        Number of clients.
    run_config : mapping
        Flat run config that clients see.
    run_id : int
        Number of the run.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        run_config: Mapping[str, Scalar] | None = None,
        run_id: int = 1,
    ) -> None:
        self._app = client_app
        self._run_id = run_id
        self._pending: dict[str, tuple[Message, RecordDict]] = {}
        self.contexts: dict[int, Context] = {}
        for partition_id in range(num_nodes):
            node_id = secrets.randbits(62) + 2
            self.contexts[node_id] = Context(
                run_id=run_id,
                node_id=node_id,
                node_config={
                    "partition-id": partition_id,
                    "num-partitions": num_nodes,
                },
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )

    def set_run(self, run: FlowerRun) -> None:
        """Do nothing: the run is this one."""

    @property
    def run(self) -> FlowerRun:
        """The run, of which only the number is known."""
        return FlowerRun.create_empty(run_id=self._run_id)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Return the node ids, in no meaningful order."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Serialise messages; they are handled when their replies are pulled."""
        messages = list(messages)
        contents = [carry(message.content) for message in messages]
        ids = [secrets.token_hex(8) for _ in messages]
        self._pending |= zip(ids, zip(messages, contents, strict=True), strict=True)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Handle the messages that are pending and return their replies."""
        return [
            self._handle(message_id, *self._pending.pop(message_id))
            for message_id in message_ids
            if message_id in self._pending
        ]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Push, then pull."""
        return self.pull_messages(self.push_messages(messages))

    def _handle(self, message_id: str, sent: Message, content: RecordDict) -> Message:
        message = Message(
            content,
            sent.metadata.dst_node_id,
            sent.metadata.message_type,
            group_id=sent.metadata.group_id,
        )
        message.metadata.__dict__["_message_id"] = message_id
        context = self.contexts[sent.metadata.dst_node_id]
        try:
            reply = self._app(message, context)
            return Message(carry(reply.content), reply_to=message)
        except Exception as error:
            text = str(error) if isinstance(error, FglError) else repr(error)
            return Message(Error(CLIENT_RAISED, text), reply_to=message)


def carry(content: RecordDict) -> RecordDict:
    """Return what arrives at the other end of Flower's wire.

    Numbers and settings go through Flower's protobuf form. Arrays are bytes already: they
    arrive as new Array objects around the same bytes, their fields checked, since
    copying megabytes through protobuf would show nothing more.

    Parameters
    ----------
    content : RecordDict
        What is sent.

    Returns
    -------
    RecordDict
        Shares nothing that can be changed with ``content``.

    Raises
    ------
    TypeError, ValueError
        If something in it cannot be serialised.
    """
    plain = RecordDict(
        {k: v for k, v in content.items() if not isinstance(v, ArrayRecord)}
    )
    data = recorddict_to_proto(plain).SerializeToString()
    arrived = recorddict_from_proto(ProtoRecordDict.FromString(data))
    for name, record in content.array_records.items():
        arrived[name] = ArrayRecord.from_array_dict(dict(record.items()))
    return arrived


@contextmanager
def task_identity(run_id: int) -> Iterator[None]:
    """Tell Flower which run messages belong to, and put back what it knew.

    Flower refuses to build a Message outside a run.
    """
    before = {name: _known(name) for name in ("task_id", "run_id", "node_id")}
    TaskIdentity.task_id = 1
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = 1
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)


def _known(name: str) -> int | None:
    """Read one of Flower's identities, ``None`` while it is not set."""
    try:
        value: int = getattr(TaskIdentity, name)
    except RuntimeError:
        return None
    return value


def run_config_of(
    *, method: str, dataset: str, clients: int, seed: int, settings: Mapping[str, Any]
) -> dict[str, Scalar]:
    """Turn Python keywords into a flat run config.

    Parameters
    ----------
    method, dataset, clients, seed
        The four everybody names.
    settings : mapping
        Other settings: ``local_epochs=1``, ``{"fedprox.mu": 0.1}``, or a mapping under a
        table's name, ``fedprox={"mu": 0.1}``.

    Returns
    -------
    dict
        Kebab-case keys.
    """
    flat: dict[str, Scalar] = {
        "method": method,
        "dataset": dataset,
        "clients": clients,
        "seed": seed,
    }
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= {f"{kebab(key)}.{kebab(k)}": v for k, v in value.items()}
        else:
            flat[kebab(key)] = value
    return flat


def check_run(values: Mapping[str, Scalar]) -> RunConfig:
    """Check settings and make the clients' graphs before anything starts.

    Parameters
    ----------
    values : mapping of str to bool, int, float or str
        Flat run config; ``clients`` must be at least 1.

    Returns
    -------
    RunConfig

    Raises
    ------
    ConfigError
        If a setting is wrong.
    DataError
        If the data are missing or cannot be cut into so many clients.
    """
    config = RunConfig.parse(values, METHODS)
    if config.clients < 1:
        raise ConfigError(f"clients must be at least 1, got {config.clients}.")
    open_store(config, config.clients)
    return config


def simulate(
    method: str = "fedavg",
    dataset: str = "synthetic",
    *,
    clients: int = 10,
    seed: int = 0,
    on_round: OnRound | None = None,
    **settings: Any,
) -> Run:
    """Run a method over the clients of a partitioned data set, in this process.

    Parameters
    ----------
    method : str
        A name in ``METHODS``.
    dataset : str
        A data set, ``tu:NAME``, or the path of a graph file.
    clients : int
        Number of clients K, at least 1.
    seed : int
        Seed of the run; the partition has its own (``partition_seed``).
    on_round : callable, optional
        Called with each round's line, e.g. to draw progress.
    **settings
        Any other setting with ``_`` for ``-``, and a mapping for a method's own:
        ``simulate("fedprox", fedprox={"mu": 0.1}, local_epochs=1)``.

    Returns
    -------
    Run
        The run folder, read.

    Raises
    ------
    ConfigError
        If a setting is unknown, of the wrong type or out of range.
    DataError
        If the data are missing or cannot be cut into so many clients.
    RunError
        If the run cannot go on, e.g. because no client replied.
    """
    values = run_config_of(
        method=method, dataset=dataset, clients=clients, seed=seed, settings=settings
    )
    return run_local(values, on_round=on_round)


def run_local(values: Mapping[str, Scalar], *, on_round: OnRound | None = None) -> Run:
    """Run a flat run config in this process; see :func:`simulate`.

    Parameters
    ----------
    values : mapping of str to bool, int, float or str
        Flat run config; ``clients`` must be at least 1.
    on_round : callable, optional
        Called with each round's line.

    Returns
    -------
    Run

    Raises
    ------
    FglError
        As :func:`simulate`.
    """
    config = check_run(values)
    run_id = secrets.randbits(62) + 1
    threads = torch.get_num_threads()
    workplace = Workplace(memory=MemoryStates())
    try:
        with task_identity(run_id):
            grid = LocalGrid(
                DispatchingClientApp(workplace), config.clients, values, run_id=run_id
            )
            folder = run_server(
                grid,
                values,
                engine="local",
                states=workplace.memory,
                on_round=on_round,
            )
    finally:
        torch.set_num_threads(threads)
    return Run.load(folder)
