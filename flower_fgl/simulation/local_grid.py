"""A Flower ``Grid`` whose nodes run in this process."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run as FlowerRun
from flwr.supercore.task_identity import TaskIdentity

from flower_fgl.client_apps.dispatch import error_reply
from flower_fgl.core.options import Scalar

__all__ = ["LocalGrid", "carry", "task_identity"]

_Record = ArrayRecord | ConfigRecord | MetricRecord


class LocalGrid(Grid):
    """Grid that runs its nodes in this process, one after the other.

    Messages and replies pass through Flower's wire format, so content that a deployment
    could not transmit fails here as well.

    Parameters
    ----------
    client_app : callable
        Handles a message of a node and returns the reply. If it has a method
        ``handle_all``, that gets all messages of an exchange, each with its node's
        context, and returns all replies.
    num_nodes : int
        Number of clients.
    run_config : mapping of str to bool, int, float or str
        Flat run config that clients receive.
    run_id : int
        Run ID.
    """

    def __init__(
        self,
        client_app: Callable[[Message, Context], Message],
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

    @property
    def partitions(self) -> dict[int, int]:
        """Partition-id of every node ID."""
        return {
            node_id: int(context.node_config["partition-id"])
            for node_id, context in self.contexts.items()
        }

    def set_run(self, run: FlowerRun) -> None:
        """Do nothing: the grid serves a single run."""

    @property
    def run(self) -> FlowerRun:
        """The run, with only its ID set."""
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
        """Return the node IDs in arbitrary order."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Serialise messages; clients handle them when their replies are pulled."""
        messages = list(messages)
        carried: dict[int, _Record] = {}
        contents = [carry(message.content, carried) for message in messages]
        ids = [secrets.token_hex(8) for _ in messages]
        self._pending |= zip(ids, zip(messages, contents, strict=True), strict=True)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Let clients handle the pending messages and return the replies."""
        items = [
            self._arrived(message_id, *self._pending.pop(message_id))
            for message_id in message_ids
            if message_id in self._pending
        ]
        handle_all = getattr(self._app, "handle_all", self._handle_each)
        return [
            _sent_back(message, reply)
            for (message, _), reply in zip(items, handle_all(items), strict=True)
        ]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Push messages and pull their replies."""
        return self.pull_messages(self.push_messages(messages))

    def _handle_each(self, items: Iterable[tuple[Message, Context]]) -> list[Message]:
        """Let a client app without ``handle_all`` handle one message after the other."""
        replies = []
        for message, context in items:
            try:
                replies.append(self._app(message, context))
            except Exception as error:
                replies.append(error_reply(message, error))
        return replies

    def _arrived(
        self, message_id: str, sent: Message, content: RecordDict
    ) -> tuple[Message, Context]:
        """Return a message as its client receives it, and the client's context."""
        message = Message(
            content,
            sent.metadata.dst_node_id,
            sent.metadata.message_type,
            group_id=sent.metadata.group_id,
        )
        message.metadata.__dict__["_message_id"] = message_id
        return message, self.contexts[sent.metadata.dst_node_id]


def _sent_back(message: Message, reply: Message) -> Message:
    """Return a reply as the server receives it."""
    if reply.has_error():
        return reply
    try:
        return Message(carry(reply.content), reply_to=message)
    except Exception as error:
        return error_reply(message, error)


def carry(content: RecordDict, carried: dict[int, _Record] | None = None) -> RecordDict:
    """Return message content as the receiver gets it through Flower's wire format.

    Numbers and settings are converted to protobuf and back. Arrays hold bytes already, so
    they become new, checked ``Array`` objects around the same bytes: copying megabytes
    through protobuf would test nothing more.

    Parameters
    ----------
    content : RecordDict
        Content to send.
    carried : dict of int to record, optional
        Converted records by the ``id`` of the record that was sent, completed in place.
        A record that goes to many clients is converted once; the clients must not change
        it.

    Returns
    -------
    RecordDict
        Content that shares no mutable object with ``content``.

    Raises
    ------
    TypeError, ValueError
        If an entry cannot be serialised.
    """
    carried = {} if carried is None else carried
    records = dict(content.items())
    plain: dict[str, _Record] = {
        name: record
        for name, record in records.items()
        if id(record) not in carried and not isinstance(record, ArrayRecord)
    }
    if plain:
        data = recorddict_to_proto(RecordDict(plain)).SerializeToString()
        arrived = recorddict_from_proto(ProtoRecordDict.FromString(data))
        carried |= {id(record): arrived[name] for name, record in plain.items()}
    for record in records.values():
        if isinstance(record, ArrayRecord) and id(record) not in carried:
            carried[id(record)] = ArrayRecord.from_array_dict(dict(record.items()))
    return RecordDict({name: carried[id(record)] for name, record in records.items()})


@contextmanager
def task_identity(run_id: int) -> Iterator[None]:
    """Set Flower's task identity inside the context and restore it afterwards.

    Flower cannot build a ``Message`` outside a run.

    Parameters
    ----------
    run_id : int
        Run ID that messages carry.
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
    """Return a field of Flower's task identity, ``None`` if it is not set."""
    try:
        value: int = getattr(TaskIdentity, name)
    except RuntimeError:
        return None
    return value
