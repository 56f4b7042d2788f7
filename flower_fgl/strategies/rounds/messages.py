"""Messages to the clients and what comes back, counted in the round's log."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import CONFIG, METRICS, Payload, write_tensors
from flower_fgl.runs.checkpoints import Checkpoints
from flower_fgl.strategies.hooks import Recorder, ServerHooks, Upload
from flower_fgl.strategies.rounds.round_log import RoundLog
from flower_fgl.strategies.rounds.secure_aggregation import SecureExchanges
from flower_fgl.strategies.rounds.send_receive import Exchange, Failure, send_receive

__all__ = ["ClientExchanges"]

log = logging.getLogger(__name__)


class ClientExchanges(ServerHooks):
    """What a server half asks its clients, and how it reads their answers.

    Parameters
    ----------
    config, recorder, checkpoints
        See :class:`ServerHooks`.
    """

    def __init__(
        self,
        config: RunConfig,
        recorder: Recorder | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        super().__init__(config, recorder, checkpoints)
        self.secure: SecureExchanges | None = None
        self._grid: Grid
        self._round = RoundLog(0)
        self._trained: dict[int, int] = {}  # the round of each client's last upload

    def train_messages(
        self,
        server_round: int,
        partition_ids: Sequence[int],
        *,
        action: str = "",
        is_scored: bool | None = None,
        brings_upload: bool = True,
    ) -> list[Message]:
        """Address each client's download to it.

        Parameters
        ----------
        server_round : int
            Round.
        partition_ids : sequence of int
            Who gets one.
        action : str
            Named action of the client half, empty for its training.
        is_scored : bool, optional
            Whether the reply brings the client's scores; by default in rounds with
            evaluation of the clients' own models.
        brings_upload : bool
            Whether the reply brings a payload with numbers, which counts against the
            clients' privacy where ``upload-noise`` is set.
        """
        if is_scored is None:
            is_scored = self._round.is_scored and self.config.evaluate != "global"
        settings = ConfigRecord({"server-round": server_round, "evaluate": is_scored})
        downloads = self._pack_downloads(
            {pid: self.download(server_round, pid) for pid in partition_ids}
        )
        messages = []
        for pid, content in downloads.items():
            content[CONFIG] = settings
            if self.secure is not None and not action:
                self.secure.attach(pid, content)
            kind = MessageType.TRAIN + (f".{action}" if action else "")
            messages.append(self._message(pid, content, kind, server_round))
        self._round.add_download(self._addressees(messages))
        if brings_upload:
            self._note_release(server_round, downloads)
        return messages

    def _note_release(self, server_round: int, clients: Iterable[int]) -> None:
        """Write down who is asked for an upload: it may be seen even if the run ends."""
        if self.config.upload_noise and self.recorder is not None:
            asked = {"round": server_round, "clients": list(clients)}
            self.recorder.append_release(asked)

    def evaluate_messages(
        self, server_round: int, *, is_local: bool, is_global: bool
    ) -> list[Message]:
        """Ask for scores.

        Parameters
        ----------
        server_round : int
            Round.
        is_local : bool
            Whether clients whose own model was not scored in this round score it. One
            that never trained gets what it needs of the next download; with
            ``eval-policy = "refresh"`` every one that can train gets it, and scores a
            copy that it trains from there.
        is_global : bool
            Whether every client scores the aggregated model.

        Notes
        -----
        1. With few shots a client without test nodes takes no part: it is not asked.
        """
        state = self.global_state() if is_global else None
        shared = None if state is None else write_tensors(state)
        clients = [
            pid
            for pid, client in self.federation.clients.items()
            if client.num_test or self.config.setting != "few-shot"
        ]
        owing = [p for p in clients if is_local and not self._round.has_scores(p)]
        able = self.federation.trainable
        is_refreshed = self.config.eval_policy == "refresh"
        refreshed = set(owing).intersection(able if is_refreshed else ())
        sent = [p for p in owing if p in refreshed or p not in self._trained]
        downloads = self._pack_downloads(
            {
                pid: (self.download if pid in refreshed else self.scoring_download)(
                    server_round + 1, pid
                )
                for pid in sent
            }
        )
        messages = []
        for pid in clients:
            modes = ["local"] if pid in owing else []
            content = downloads.get(pid, RecordDict())
            if shared is not None:
                modes.append("global")
                content["global"] = shared
            if modes:
                content[CONFIG] = ConfigRecord(
                    {
                        "server-round": server_round,
                        "modes": modes,
                        "refresh": pid in refreshed,
                    }
                )
                kind = MessageType.EVALUATE
                messages.append(self._message(pid, content, kind, server_round))
        return messages

    def exchange(self, messages: Sequence[Message]) -> list[Message]:
        """Send, wait, keep failures and seconds of the round; return the replies."""
        exchange = self._send(self._addressees(messages))
        self._round.add_exchange(exchange)
        return list(exchange.replies.values())

    def _send(self, messages: Mapping[int, Message]) -> Exchange:
        """Send messages by partition-id and wait for the replies."""
        return send_receive(
            self._grid,
            messages,
            timeout=self.config.round_timeout,
            max_mb=self.config.max_message_mb,
        )

    def read_uploads(
        self, replies: Mapping[int, Message], up: type[Payload] | None = None
    ) -> dict[int, Upload]:
        """Check every reply; one that is malformed is dropped, counted and named.

        Parameters
        ----------
        replies : mapping of int to Message
            Replies by partition-id.
        up : type of Payload, optional
            What they carry, instead of the method's own ``up``.

        Returns
        -------
        dict of int to Upload
        """
        uploads = {}
        for pid, reply in replies.items():
            try:
                metrics = reply.content.metric_records.get(METRICS)
                self._round.count_up(pid, reply.content)
                if metrics is None:
                    raise PayloadError(f'the reply has no record "{METRICS}"')
                payload = self._unpack(pid, reply.content, up)
                num_examples = self._weight(pid)
                self._round.add_reply(pid, metrics, num_examples)
            except PayloadError as error:
                self.drop(pid, str(error))
                continue
            uploads[pid] = Upload(payload, num_examples)
        self._trained |= dict.fromkeys(uploads, self._round.number)
        return uploads

    def _unpack(
        self, partition_id: int, content: RecordDict, up: type[Payload] | None
    ) -> Payload:
        """Read a client's upload; the method's own is masked with secure aggregation."""
        spec = self.upload_spec(partition_id)
        if self.secure is None or up is not None:
            return (up or self.up).from_record(content, spec)
        return self.secure.unpack(self._round.number, content, spec)

    def ask(
        self,
        server_round: int,
        action: str,
        payloads: Mapping[int, Payload],
        *,
        brings_upload: bool = False,
    ) -> dict[int, RecordDict]:
        """Send each client a payload beside the training, return what they answer.

        Failures and bytes are the round's.

        Parameters
        ----------
        server_round : int
            Round.
        action : str
            Query action of the client half.
        payloads : mapping of int to Payload
            What each client gets; equal objects are packed once.
        brings_upload : bool
            As in :meth:`train_messages`.

        Returns
        -------
        dict of int to RecordDict
            Answers by partition-id, ascending.
        """
        records = {id(p): p.to_record() for p in payloads.values()}
        settings = ConfigRecord({"server-round": server_round})
        kind = f"{MessageType.QUERY}.{action}"
        messages = {}
        for pid, payload in payloads.items():
            content = RecordDict({CONFIG: settings, **records[id(payload)]})
            messages[pid] = self._message(pid, content, kind, server_round)
        self._round.add_download(messages)
        if brings_upload:
            self._note_release(server_round, payloads)
        exchange = self._send(messages)
        for pid, reply in exchange.replies.items():
            self._round.count_up(pid, reply.content)
        for failure in exchange.failures:
            self.drop(failure.partition_id, failure.reason)
        return {pid: reply.content for pid, reply in exchange.replies.items()}

    def drop(self, partition_id: int, reason: str) -> None:
        """Count a client whose answer cannot be used; the round's end names it."""
        self._round.failures.append(Failure(partition_id, reason))

    def _weight(self, partition_id: int) -> float:
        """Return what ``weight-by`` makes a client weigh."""
        client = self.federation.clients[partition_id]
        weights = {
            "train-nodes": client.num_train,
            "nodes": client.num_nodes,
            "equal": 1,
        }
        return float(weights[self.config.weight_by])

    def _pack_downloads(self, payloads: Mapping[int, Payload]) -> dict[int, RecordDict]:
        """Pack what clients get, by partition-id; equal payloads are packed once."""
        packed: dict[int, RecordDict] = {}
        contents = {}
        for pid, payload in payloads.items():
            if id(payload) not in packed:
                packed[id(payload)] = payload.to_record()
            contents[pid] = RecordDict(dict(packed[id(payload)]))
        return contents

    def _message(
        self, partition_id: int, content: RecordDict, kind: str, server_round: int
    ) -> Message:
        agreement = self.federation.agreement(partition_id)
        if agreement is not None:
            content.update(agreement.to_record())
        return Message(
            content,
            dst_node_id=self.federation.nodes[partition_id],
            message_type=kind,
            group_id=str(server_round),
        )

    def _addressees(self, messages: Iterable[Message]) -> dict[int, Message]:
        """Key messages by the partition-id they go to."""
        by_node = self.federation.partitions
        return {by_node[m.metadata.dst_node_id]: m for m in messages}

    def _by_partition(self, replies: Iterable[Message]) -> dict[int, Message]:
        """Key usable replies by the partition-id they come from, ascending."""
        by_node = self.federation.partitions
        known = {
            by_node[reply.metadata.src_node_id]: reply
            for reply in replies
            if not reply.has_error() and reply.metadata.src_node_id in by_node
        }
        return dict(sorted(known.items()))
