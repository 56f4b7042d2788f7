"""A Flower ``Grid`` whose nodes run in this process."""

import gc
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid

from flower_fgl.client_apps.dispatch import error_reply, freeze_graphs
from flower_fgl.core.flower_internals import (
    FlowerRun,
    TaskIdentity,
    carried,
    message_like,
    plain_content,
    reply_with,
)
from flower_fgl.core.options import Scalar

__all__ = ["LocalGrid", "OneRunGrid", "carry", "frozen_objects", "task_identity"]

_Record = ArrayRecord | ConfigRecord | MetricRecord


class OneRunGrid(Grid):
    """Grid that serves a single run."""

    def __init__(self, run_id: int) -> None:
        self._run_id = run_id

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


class LocalGrid(OneRunGrid):
    """Grid that runs its nodes in this process, one after the other.

    Messages and replies pass through Flower's wire format, so content that a deployment
    could not transmit fails here as well. ``client_app`` handles a message of a node and
    returns the reply; its method ``handle_all``, if any, all messages of an exchange with
    their contexts. ``freezes`` excludes the clients' graphs from the search for cyclic
    garbage once they are built; the caller undoes it, see :func:`frozen_objects`.
    """

    def __init__(
        self,
        client_app: Callable[[Message, Context], Message],
        num_nodes: int,
        run_config: Mapping[str, Scalar] | None = None,
        run_id: int = 1,
        *,
        freezes: bool = False,
    ) -> None:
        super().__init__(run_id)
        self._app = client_app
        self._pending: dict[str, tuple[Message, RecordDict]] = {}
        self._has_to_freeze = freezes
        self.contexts: dict[int, Context] = {}
        for partition_id in range(num_nodes):
            node_id = secrets.randbits(62) + 2
            self.contexts[node_id] = Context(
                run_id=run_id,
                node_id=node_id,
                node_config={"partition-id": partition_id, "num-partitions": num_nodes},
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

    def get_node_ids(self) -> list[int]:
        """Return the node IDs in arbitrary order."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Serialise messages; clients handle them when their replies are pulled."""
        messages = list(messages)
        known: dict[int, _Record] = {}
        contents = [carry(message.content, known) for message in messages]
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
        replies = [
            _sent_back(message, reply)
            for (message, _), reply in zip(items, handle_all(items), strict=True)
        ]
        kind = items[0][0].metadata.message_type if items else ""
        if kind == MessageType.TRAIN and self._has_to_freeze:
            self._has_to_freeze = False
            freeze_graphs(len(self.contexts))
        return replies

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
        message = message_like(sent, content, message_id=message_id)
        return message, self.contexts[sent.metadata.dst_node_id]


def _sent_back(message: Message, reply: Message) -> Message:
    """Return a reply as the server receives it."""
    if reply.has_error():
        return reply
    try:
        content = carry(reply.content)
    except Exception as error:
        return error_reply(message, error)
    return reply_with(message, content)


def carry(content: RecordDict, known: dict[int, _Record] | None = None) -> RecordDict:
    """Return message content as the receiver gets it, see :func:`carried`.

    It shares no mutable object with ``content``. ``known`` holds the converted records by
    the ``id`` of the record that was sent, and is completed in place: a record that goes
    to many clients is converted once, and the clients must not change it.
    """
    known = {} if known is None else known
    for name, record in content.items():
        if id(record) not in known:
            known[id(record)] = carried(name, record)
    return plain_content({name: known[id(record)] for name, record in content.items()})


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Exclude the objects that exist now from the search for cyclic garbage."""
    thresholds = gc.get_threshold()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


@contextmanager
def task_identity(run_id: int) -> Iterator[None]:
    """Set Flower's task identity, without which no ``Message`` can be built."""
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
