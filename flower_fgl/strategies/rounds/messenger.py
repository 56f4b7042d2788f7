"""Messages to the clients and their replies; the round's log counts their bytes."""

import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import PayloadError, RunError, one_line
from flower_fgl.core.flower_internals import ErrorCode, message_like
from flower_fgl.core.score_names import SETTING_COLUMNS
from flower_fgl.core.settings import UNSEEN_SETTINGS
from flower_fgl.protocols.base import (
    CONFIG,
    METRICS,
    STATELESS,
    Empty,
    Payload,
    check_size,
    find_record,
    read_payload,
)
from flower_fgl.protocols.differential_privacy import check_clipped
from flower_fgl.runs.writer import RunWriter
from flower_fgl.strategies.rounds.loop_state import LoopState, note_replies
from flower_fgl.strategies.rounds.round_log import Exchange, Expected, Failure

__all__ = ["SILENT", "Messenger", "Upload", "dead_worker", "pull", "send_receive"]

log = logging.getLogger(__name__)

POLL_SECONDS = 0.005
WEIGHTS = {
    "train-nodes": "num_train",
    "nodes": "num_nodes",
    "entries": "num_entries",
    "equal": "",
}
"""What a client's weight counts, by ``weight-by``."""
SIMULATION_GRIDS = ("InMemoryGrid", "WorkerGrid")
"""Grids whose clients run in worker processes of this machine. Their modules are not
imported, since that takes a second."""
WRAPPED = re.compile(
    r"(?:<class '[\w.]+'>:<'|Exception \w+ occurred\. Message: )(.*)'>"
)
"""How Flower's SuperNode, and its simulation, write the exception of a ClientApp."""
UNDECODABLE = (
    *(ArithmeticError, AttributeError, DecodeError, LookupError, MemoryError),
    *(RecursionError, TypeError, ValueError),
)
"""What Flower raises for a reply that it cannot decode; errors of the connection to the
SuperLink are of other types."""
SILENT = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
)
"""Codes of the errors that Flower reports for a client that sent nothing."""
Content = TypeVar("Content")
Kind = TypeVar("Kind", bound=Payload)
Read = TypeVar("Read")


@dataclass(frozen=True)
class Upload:
    """A checked upload of one client, and its weight by the setting ``weight-by``."""

    payload: Any
    num_examples: float


class Messenger:
    """Address payloads to clients, send them, read the replies.

    ``spreads`` has the standard deviation by which each number to predict is scaled for
    all clients, NaN if every client has its own scale.
    """

    grid: Grid

    def __init__(
        self, config: RunConfig, loop: LoopState, recorder: RunWriter | None = None
    ) -> None:
        self.config = config
        self.loop = loop
        self.recorder = recorder
        self.spreads: Sequence[float] = ()
        self._met: set[int] = set()

    def pack(self, payloads: Mapping[int, Payload]) -> dict[int, RecordDict]:
        """Pack payloads by partition-id; a payload of several clients is packed once."""
        packed: dict[int, RecordDict] = {}
        contents = {}
        for pid, payload in payloads.items():
            if id(payload) not in packed:
                packed[id(payload)] = payload.to_record()
            contents[pid] = packed[id(payload)].copy()
        return contents

    def address(
        self,
        contents: Mapping[int, RecordDict],
        message_type: str,
        settings: Mapping[int, ConfigRecord] | ConfigRecord,
        server_round: int,
    ) -> list[Message]:
        """Build one message per client, and complete its ``contents`` in place.

        ``settings`` is the record ``config``, one for all messages or one per partition-
        id.
        """
        federation = self.loop.federation
        messages: list[Message] = []
        for pid, content in contents.items():
            content[CONFIG] = (
                settings if isinstance(settings, ConfigRecord) else settings[pid]
            )
            if pid in federation.agreements or federation.scale is not None:
                content.update(federation.agreed(pid))
            node = federation.nodes[pid]
            messages.append(
                message_like(messages[0], content, dst_node_id=node)
                if messages
                else Message(
                    content,
                    dst_node_id=node,
                    message_type=message_type,
                    group_id=str(server_round),
                )
            )
        return messages

    def note_release(self, server_round: int, clients: Iterable[int]) -> None:
        """Record the clients that will send a noised upload, before any message is sent."""
        if self.config.upload_noise and self.recorder is not None:
            release = {"round": server_round, "clients": list(clients)}
            self.recorder.append_release(release)

    def exchange(self, messages: Iterable[Message]) -> dict[int, Message]:
        """Send training messages, log their seconds; return the replies in order."""
        exchange = self.send(messages)
        self.loop.log.add_exchange(exchange)
        return exchange.replies

    def ask(
        self,
        server_round: int,
        action: str,
        payloads: Mapping[int, Payload],
        *,
        beside: Mapping[int, Payload] = MappingProxyType({}),
        brings_upload: bool = False,
    ) -> dict[int, RecordDict]:
        """Run a query exchange; return the replies' content by partition-id, ascending.

        Its failures and bytes count for the current round. ``action`` is that of the
        client half; messages also have the payloads ``beside``. With ``brings_upload``
        the reply carries numbers that ``upload-noise`` protects.
        """
        packed = self.pack(payloads)
        for pid, more in beside.items():
            packed[pid].update(more.to_record())
        messages = self.address(
            packed,
            f"{MessageType.QUERY}.{action}",
            ConfigRecord({"server-round": server_round}),
            server_round,
        )
        if brings_upload:
            self.note_release(server_round, payloads)

        def count(pid: int, reply: Message) -> RecordDict:
            self.loop.log.count_up(pid, reply.content)
            return reply.content

        return self.read_each(self.send(messages).replies, count)

    def query(
        self,
        server_round: int,
        action: str,
        payloads: Mapping[int, Payload],
        kind: type[Kind],
        spec: Callable[[int], Any] = lambda _: None,
        *,
        beside: Mapping[int, Payload] = MappingProxyType({}),
        brings_upload: bool = False,
    ) -> dict[int, Kind]:
        """Run a query exchange, and read a payload of each reply, see :meth:`ask`.

        ``spec`` returns the specification of a client's reply by its partition-id. An
        upload that exceeds ``upload-clip``, around zero, and its noise is refused.
        """
        config = self.config

        def read(pid: int, content: RecordDict) -> Kind:
            found = read_payload(kind, content, spec(pid))
            if brings_upload and config.upload_clip:
                check_clipped(
                    found, Empty(), clip=config.upload_clip, noise=config.upload_noise
                )
            return found

        answers = self.ask(
            server_round, action, payloads, beside=beside, brings_upload=brings_upload
        )
        return self.read_each(answers, read)

    def read_each(
        self, contents: Mapping[int, Content], read: Callable[[int, Content], Read]
    ) -> dict[int, Read]:
        """Read replies, their contents or payloads one by one by partition-id.

        A client whose reply raises an exception is dropped, counted and named.
        """
        out = {}
        for pid, content in contents.items():
            try:
                out[pid] = read(pid, content)
            except Exception as error:
                self.loop.log.failures.append(Failure.of(pid, error))
        return out

    def drop(self, partition_id: int, reason: str) -> None:
        """Log a failure of a client whose reply is malformed or missing."""
        self.loop.log.failures.append(Failure(partition_id, reason))

    def send(self, messages: Iterable[Message]) -> Exchange:
        """Send messages, wait for the replies; log bytes, failures and silent clients."""
        loop = self.loop
        addressed = self.by_receiver(messages)
        loop.log.add_download(addressed)
        exchange = send_receive(
            self.grid,
            addressed,
            timeout=self.config.round_timeout,
            max_mb=self.config.max_message_mb,
        )
        loop.log.failures += exchange.failures
        lost = [one.partition_id for one in exchange.failures if one.is_silent]
        if lost or loop.silent:
            note_replies(loop.silent, loop.log.number, set(addressed), lost)
        return exchange

    def read_uploads(
        self, replies: Mapping[int, Message], read: Callable[[int, RecordDict], Payload]
    ) -> dict[int, Upload]:
        """Check every reply and ``read`` its upload; log a failure if it is malformed."""
        round_log = self.loop.log

        def read_one(pid: int, reply: Message) -> Upload:
            round_log.count_up(pid, reply.content)
            payload = read(pid, reply.content)
            client, metrics = self._about(pid), metrics_of(reply)
            round_log.add_reply(pid, metrics, client)
            if STATELESS in metrics and pid in self._met:
                log.warning(
                    "Client %s no longer has its state of earlier rounds: it starts "
                    "anew. Its SuperNode was restarted without state-dir in its node "
                    "config, or that folder is lost.",
                    pid,
                )
            return Upload(payload, client.num_examples)

        uploads = self.read_each(replies, read_one)
        self.loop.trained |= dict.fromkeys(uploads, round_log.number)
        self._met |= uploads.keys()
        return uploads

    def read_evaluations(self, replies: Mapping[int, Message]) -> None:
        """Check the scores of evaluation replies and store them in the round's log."""

        def read_one(pid: int, reply: Message) -> None:
            self.loop.log.count_up(pid, reply.content)
            metrics = metrics_of(reply)
            if len(reply.content) > 1:
                raise PayloadError(f"unexpected records {sorted(reply.content)}")
            if not self.loop.log.add_evaluation(pid, metrics, self._about(pid)):
                self.loop.unscored.add(pid)

        self.read_each(replies, read_one)

    def _about(self, partition_id: int) -> Expected:
        """Return the numbers that a client's metrics are compared with."""
        federation, setting = self.loop.federation, self.config.setting
        about = federation.clients[partition_id]
        columns: dict[str, int | None] = {"val": about.num_val, "test": about.num_test}
        if setting == "few-shot":
            columns["test_masked"] = about.num_test
        if setting in UNSEEN_SETTINGS or partition_id in federation.agreements:
            columns = dict.fromkeys(SETTING_COLUMNS) | columns
        return Expected(self.weight_of(partition_id), columns, self.spreads)

    def by_receiver(self, messages: Iterable[Message]) -> dict[int, Message]:
        """Return messages by the partition-id of their receiver."""
        by_node = self.loop.federation.partitions
        return {by_node[m.metadata.dst_node_id]: m for m in messages}

    def by_sender(self, replies: Iterable[Message]) -> dict[int, Message]:
        """Return replies without errors by the partition-id of their sender, ascending."""
        by_node = self.loop.federation.partitions
        known = {
            by_node[reply.metadata.src_node_id]: reply
            for reply in replies
            if not reply.has_error() and reply.metadata.src_node_id in by_node
        }
        return dict(sorted(known.items()))

    def weight_of(self, partition_id: int) -> float:
        """Return a client's weight by the setting ``weight-by``."""
        client = self.loop.federation.clients[partition_id]
        counted = WEIGHTS[self.config.weight_by]
        return float(getattr(client, counted)) if counted else 1.0


def send_receive(
    grid: Grid,
    messages: Mapping[int, Message],
    *,
    timeout: float,
    max_mb: float = math.inf,
) -> Exchange:
    """Send one message to each client, by partition-id, and wait for the replies.

    A reply counts as a failure if it is missing after ``timeout`` seconds, or larger than
    ``max_mb`` (``max-message-mb``). A RunError says that a worker process of the
    simulation died: Flower keeps sending to it and loses most of the later messages.

    Notes
    -----
    1. ``Grid.send_and_receive`` sleeps 3 s (deployment) or 0.1 s (simulation) between
       pulls. This loop pulls every 5 ms at first, and less often the longer it waits.
    2. Flower returns an empty id for a message it could not store, or no id at all.
    3. Error replies made by Flower itself carry no client's node id. So a reply is
       matched to its client by the id of the message it answers. A reply with content
       must also come from the node that the message went to.
    4. The grids of the local engine have ``always_answers``: every client replies, or
       its process is known to have died. A slow round is waited for.
    """
    if not messages:
        return Exchange({})
    if getattr(grid, "always_answers", False):
        timeout = math.inf
    start = time.perf_counter()
    order = sorted(messages)
    ids = list(grid.push_messages([messages[pid] for pid in order]))
    ids += [""] * (len(order) - len(ids))
    waiting = {key: pid for key, pid in zip(ids, order, strict=True) if key}
    sent = time.perf_counter()
    replies: dict[int, Message] = {}
    failures = [
        Failure(
            pid, "the message could not be delivered: its node has disconnected", True
        )
        for key, pid in zip(ids, order, strict=True)
        if not key
    ]
    while waiting:
        got, broken = pull(grid, list(waiting))
        failures += [Failure(waiting.pop(key), text) for key, text in broken.items()]
        for reply in got:
            pid = waiting.pop(reply.metadata.reply_to_message_id, None)
            if pid is None:
                continue
            try:
                if reply.has_error():
                    error_code, reason = reply.error.code, reply.error.reason
                    is_silent = error_code in SILENT
                    failures.append(Failure(pid, _last_line(reason), is_silent))
                    continue
                sender = reply.metadata.src_node_id
                if sender != messages[pid].metadata.dst_node_id:
                    raise PayloadError(f"node {sender} sent the reply")
                check_size(reply.content, max_mb)
            except Exception as error:
                failures.append(Failure.of(pid, error))
            else:
                replies[pid] = reply
        elapsed = time.perf_counter() - sent
        if not waiting or elapsed > timeout:
            break
        if not got:
            time.sleep(min(max(POLL_SECONDS, elapsed / 50), 0.25))
    failures += [
        Failure(pid, f"no reply within {timeout:g} s", True) for pid in waiting.values()
    ]
    _stop_on_dead_worker(grid, failures)
    return Exchange(
        {pid: replies[pid] for pid in sorted(replies)},
        sorted(failures, key=lambda failure: failure.partition_id),
        seconds_send=sent - start,
        seconds_wait=time.perf_counter() - sent,
    )


def metrics_of(reply: Message) -> MetricRecord:
    """Return the metrics of a reply, which a PayloadError says are missing."""
    metrics = find_record(reply.content, METRICS, MetricRecord)
    if metrics is None:
        raise PayloadError(f'the reply has no record "{METRICS}"')
    return metrics


def pull(grid: Grid, ids: Sequence[str]) -> tuple[list[Message], dict[str, str]]:
    """Pull replies; return them, and why others cannot be decoded, by message id.

    Flower decodes all replies of a pull together and loses all of them if one is
    malformed. Once that has happened, this grid's replies are pulled one by one.
    """
    if not ids:
        return [], {}
    marked: Any = grid
    if not getattr(marked, "pulls_one_by_one", False):
        try:
            return list(grid.pull_messages(ids)), {}
        except UNDECODABLE:
            marked.pulls_one_by_one = True
    got: list[Message] = []
    broken = {}
    for key in ids:
        try:
            got += grid.pull_messages([key])
        except UNDECODABLE as error:
            broken[key] = (
                f"Flower cannot decode the reply: {one_line(repr(error), 200)}"
            )
    return got, broken


def _last_line(reason: str | None) -> str:
    """Return the last line of an error reply, shortened."""
    lines = [line.strip() for line in (reason or "").splitlines() if line.strip()]
    return WRAPPED.sub(r"\1", lines[-1])[:300] if lines else "unknown"


def _stop_on_dead_worker(grid: Grid, failures: Iterable[Failure]) -> None:
    """Stop the run if a worker process of the simulation died.

    In a deployment a client may write any text into its error reply.
    """
    if type(getattr(grid, "carrier", grid)).__name__ not in SIMULATION_GRIDS:
        return
    for failure in failures:
        text = failure.reason.lower()
        if "actordied" in text or "actor died" in text or "actor is dead" in text:
            raise RunError(dead_worker(failure.reason, failure.partition_id))


def dead_worker(reason: str, client: int | None = None) -> str:
    """Return the error of a run one of whose worker processes has ended."""
    which = "" if client is None else f" that ran client {client}"
    return (
        f"The worker process{which} died ({reason}). The usual cause is too little memory: "
        "run fewer clients at once (--workers 1), or use a smaller model. If its machine "
        "stopped, start it and resume the run from its last checkpoint: --resume."
    )
