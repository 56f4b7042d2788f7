"""A grid whose nodes host several clients each (``clients-per-node``)."""

import itertools
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping

from flwr.app import Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from flower_fgl.core.errors import PayloadError, one_line
from flower_fgl.core.flower_internals import ErrorCode, FlowerRun, answer_message
from flower_fgl.protocols.parcels import HOSTS, Parcel, read_hosts
from flower_fgl.strategies.rounds.messenger import SILENT, pull

__all__ = ["HostedGrid"]

AGAIN_SECONDS = 1.0
"""Pause before a node that sent no answer is asked again."""


class HostedGrid(Grid):
    """Grid of clients that share the nodes of another grid, the ``carrier``.

    Each client has a node ID of its own, which only this object knows. The messages of an
    exchange to the clients of a node travel as one message, and so do their replies. A
    node hosts at most ``most`` clients, and the reply of each has at most ``max_mb``.
    """

    def __init__(self, carrier: Grid, most: int, max_mb: float) -> None:
        self.carrier = carrier
        self._most, self._max_mb = most, max_mb
        self._clients: dict[int, list[int]] = {}  # of each node that has answered
        self._places: dict[int, tuple[int, int]] = {}  # node and place of each client
        # of the one client of a node that refuses
        self._refusals: dict[int, Error] = {}
        self._queries: dict[str, int] = {}
        self._paused: dict[int, float] = {}
        self._parcels: dict[str, dict[int, tuple[str, Message]]] = {}
        self._ready: dict[str, Message] = {}

    def set_run(self, run: FlowerRun) -> None:
        """Set the run."""
        self.carrier.set_run(run)

    @property
    def run(self) -> FlowerRun:
        """The run."""
        return self.carrier.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message."""
        return self.carrier.create_message(
            content, message_type, dst_node_id, group_id, ttl
        )

    def get_node_ids(self) -> list[int]:
        """Return the IDs of the clients of all nodes that have said how many they host.

        New nodes are asked; their answers are read in a later call.
        """
        present = list(self.carrier.get_node_ids())
        self._read_answers()
        now = time.monotonic()
        known = {*self._clients, *self._queries.values()}
        for node in present:
            if node in known or now < self._paused.get(node, now):
                continue
            self._paused[node] = now + AGAIN_SECONDS
            query = Message(RecordDict(), node, f"{MessageType.QUERY}.{HOSTS}")
            self._queries |= dict.fromkeys(filter(None, self._push(query)), node)
        hosts = [self._clients[node] for node in present if node in self._clients]
        return list(itertools.chain(*hosts))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send each node the messages of its clients in one message.

        Replies to earlier messages are no longer expected.
        """
        self._parcels.clear()
        self._ready.clear()
        parts: dict[tuple[int, str, str], dict[int, tuple[str, Message]]] = {}
        keys = []
        for message in messages:
            about = message.metadata
            keys.append(secrets.token_hex(8))
            if about.dst_node_id in self._refusals:
                self._answer(keys[-1], message, self._refusals[about.dst_node_id])
                continue
            node, place = self._places[about.dst_node_id]
            part = parts.setdefault((node, about.message_type, about.group_id), {})
            part[place] = keys[-1], message
        lost = set()
        for (node, kind, group), part in parts.items():
            parcel = Parcel.pack(
                (place, message) for place, (_, message) in part.items()
            )
            carried = Message(parcel.to_record(), node, kind, group_id=group)
            for key in self._push(carried):
                if key:
                    self._parcels[key] = part
                else:
                    lost |= {own for own, _ in part.values()}
        return ["" if key in lost else key for key in keys]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that have arrived."""
        wanted = list(message_ids)
        waiting = set(wanted)
        carried = [
            key
            for key, part in self._parcels.items()
            if any(own in waiting for own, _ in part.values())
        ]
        got, broken = pull(self.carrier, carried)
        for key, text in broken.items():
            self._fail(self._parcels.pop(key), text)
        for reply in got:
            self._unpack(self._parcels.pop(reply.metadata.reply_to_message_id), reply)
        return [self._ready.pop(key) for key in wanted if key in self._ready]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Refuse: the messenger pushes and pulls."""
        raise NotImplementedError("push_messages and pull_messages replace it")

    def _push(self, message: Message) -> list[str]:
        """Send one message; its ID is empty, if Flower cannot store the message."""
        return list(self.carrier.push_messages([message])) or [""]

    def _read_answers(self) -> None:
        """Give IDs to the clients of the nodes that have answered."""
        got, broken = pull(self.carrier, list(self._queries))
        for key, text in broken.items():
            self._refuse(self._queries.pop(key), text)
        for reply in got:
            node = self._queries.pop(reply.metadata.reply_to_message_id)
            if reply.has_error():
                if reply.error.code not in SILENT:  # those are asked again
                    self._refuse(node, str(reply.error.reason))
                continue
            try:
                number = read_hosts(reply.content, self._most)
            except PayloadError as error:
                self._refuse(node, str(error))
                continue
            self._clients[node] = [secrets.randbits(62) + 2 for _ in range(number)]
            places = enumerate(self._clients[node])
            self._places |= {client: (node, place) for place, client in places}

    def _refuse(self, node: int, reason: str) -> None:
        """Let one client answer every message with the reason of its node."""
        client = secrets.randbits(62) + 2
        self._clients[node] = [client]
        code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        self._refusals[client] = Error(code, reason)

    def _unpack(self, part: Mapping[int, tuple[str, Message]], reply: Message) -> None:
        """Hand out the replies of a node's clients, or its error to all of them."""
        if reply.has_error():
            self._fail(part, str(reply.error.reason), reply.error.code)
            return
        try:
            sender = reply.metadata.src_node_id
            first = next(iter(part.values()))[1].metadata.dst_node_id
            if sender != self._places[first][0]:
                raise PayloadError(f"node {sender} sent the reply")
            parcel = Parcel.from_record(reply.content, self._max_mb * len(part))
            uses = Counter(
                at for *_, names, _ in parcel.letters for at in names.values()
            )
            if any(number > 1 for number in uses.values()):
                raise PayloadError("two clients of its node sent one record")
            answers = list(zip(parcel.letters, parcel.contents(), strict=True))
        except Exception as error:  # any failure concerns the clients of this node only
            self._fail(part, one_line(str(error)))
            return
        left = dict(part)
        for (place, *_, failure), content in answers:
            if place in left:
                answer = content if failure is None else Error(*failure)
                self._answer(*left.pop(place), answer)
        self._fail(left, "its node sent no reply of it")

    def _fail(
        self,
        part: Mapping[int, tuple[str, Message]],
        reason: str,
        code: int = ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
    ) -> None:
        """Answer messages of a node with one error."""
        for key, message in part.values():
            self._answer(key, message, Error(code, reason))

    def _answer(self, key: str, message: Message, answer: RecordDict | Error) -> None:
        """Store the reply to a client's message."""
        self._ready[key] = answer_message(message, key, answer)
