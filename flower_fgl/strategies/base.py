"""The round loop of every server half; methods override hooks."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from flower_fgl.checkpoints import Checkpoints, Snapshot
from flower_fgl.config import RunConfig
from flower_fgl.errors import PayloadError, RunError
from flower_fgl.model_files import ModelCard
from flower_fgl.protocols.base import CONFIG, METRICS, Payload, write_tensors
from flower_fgl.protocols.describe import Description
from flower_fgl.seeds import SERVER, numpy_generator
from flower_fgl.strategies.checkpoint import (
    describe_clients,
    pack_strategy,
    resume_strategy,
)
from flower_fgl.strategies.exchange import Failure, send_receive
from flower_fgl.strategies.federation import Federation, client_lines, discover
from flower_fgl.strategies.returning import Newcomers
from flower_fgl.strategies.rounds import RoundLog
from flower_fgl.strategies.secure import SecureExchanges

__all__ = ["FglStrategy", "Recorder", "Upload"]

log = logging.getLogger(__name__)
MAX_FAILED_ROUNDS = 3


class Recorder(Protocol):
    """Where a strategy writes what happened: the run folder."""

    def append_clients(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add one line per client."""

    def append_round(self, row: Mapping[str, Any]) -> None:
        """Add the line of a round."""

    def append_release(self, row: Mapping[str, Any]) -> None:
        """Add the line of an exchange that asks for noisy uploads."""


@dataclass(frozen=True)
class Upload:
    """What one client sent up.

    Parameters
    ----------
    payload : Payload
        Checked content.
    num_examples : float
        What ``weight-by`` makes the client weigh.
    """

    payload: Any
    num_examples: float


class FglStrategy(Strategy):
    """Base of all server halves.

    A method sets ``down`` and ``up`` and overrides :meth:`prepare`, :meth:`download`,
    :meth:`upload_spec` and :meth:`aggregate`; the loop, sampling, failures, scores and
    bytes are here.

    Parameters
    ----------
    config : RunConfig
        Checked settings.
    recorder : Recorder, optional
        The run folder's writer.
    checkpoints : Checkpoints, optional
        Where the run's state is kept, and where it goes on from.
    """

    down: ClassVar[type[Payload]]
    up: ClassVar[type[Payload]]
    scores_uploads: ClassVar[bool] = True
    """Whether the reply that brings an upload brings the client's scores as well."""

    def __init__(
        self,
        config: RunConfig,
        recorder: Recorder | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.config = config
        self.recorder = recorder
        self.checkpoints = checkpoints
        if config.upload_clip and not self.up.records:
            raise RunError(
                f"{config.method} uploads nothing that upload-clip or upload-noise could "
                "act on: leave them out."
            )
        self.federation: Federation
        self.secure: SecureExchanges | None = None
        self._grid: Grid
        self._round = RoundLog(0)
        self._newcomers = Newcomers()
        self._trained: dict[int, int] = {}  # the round of each client's last upload
        self._failed_in_a_row = 0
        self._owes_scores = False
        self._any_scored = False
        self._best: tuple[tuple[int, float], dict[str, Tensor]] | None = None
        self._best_round = 0

    # ------------------------------------------------------------------ hooks
    def prepare(self) -> None:
        """Build the server's state; ``self.federation`` is known.

        Runs again when a run is resumed, before :meth:`load_server_state`; exchanges
        that clients need but once are left out then (``self.is_resumed``).
        """

    @abstractmethod
    def download(self, server_round: int, partition_id: int) -> Payload:
        """Return what a client gets before it trains."""

    def upload_spec(self, partition_id: int) -> Any:
        """Return what :meth:`Payload.from_record` checks the upload against."""
        return None

    @abstractmethod
    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Take in the uploads of a round, keyed by partition-id, ascending."""

    def complete_round(self, server_round: int) -> bool:
        """Run after the aggregation of a round, before the scores.

        For further exchanges of the round.

        Returns
        -------
        bool
            Whether the round counts; by default it does.
        """
        return True

    def aggregate_sums(
        self,
        server_round: int,
        sums: Mapping[str, Tensor],
        weights: Mapping[int, float],
    ) -> None:
        """Take in what secure aggregation gives, instead of :meth:`aggregate`.

        A method with an :class:`AdditivePayload` as ``up`` overrides it.

        Parameters
        ----------
        server_round : int
            Round, from 1.
        sums : mapping of str to Tensor, float64
            Sums of the clients' :meth:`AdditivePayload.summands`.
        weights : mapping of int to float
            Who is in the sums, by partition-id, and what ``weight-by`` makes each weigh.

        Raises
        ------
        PayloadError
            If the sums cannot be; the round fails then.
        """
        raise NotImplementedError(f"{type(self).__name__} needs more than sums.")

    def global_state(self) -> Mapping[str, Tensor] | None:
        """Return the aggregated model, ``None`` if the method has none."""
        return None

    def finish(self) -> None:
        """Run after the last round, e.g. one more exchange."""

    def server_state(self) -> Snapshot:
        """Return all that :meth:`aggregate` leaves behind for the rounds to come."""
        return Snapshot()

    def load_server_state(self, state: Snapshot) -> None:
        """Take back what :meth:`server_state` returned, after :meth:`prepare`.

        Raises
        ------
        KeyError, ValueError, RuntimeError
            If it does not fit.
        """

    def sample(self, server_round: int) -> list[int]:
        """Draw the clients that train, ⌈participation · K⌉ of those that can."""
        able = self.federation.trainable
        share = self.config.participation
        if share == 1:
            return able
        generator = numpy_generator(self.config.seed, server_round, SERVER, "sample")
        count = max(1, math.ceil(share * len(able) - 1e-9))
        return sorted(int(p) for p in generator.choice(able, count, replace=False))

    @property
    def is_resumed(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self.checkpoints is not None and self.checkpoints.resumed is not None

    # ------------------------------------------------------- Flower's interface
    def summary(self) -> None:
        """Log what is about to run."""
        log.info(
            "%s: %d clients (%d train), %d classes, %d features",
            type(self).__name__,
            len(self.federation.clients),
            len(self.federation.trainable),
            self.federation.num_classes,
            self.federation.num_features,
        )
        if self.config.upload_clip:
            log.info(
                "Uploads are clipped to an L2 norm of %g, noise multiplier %g.",
                self.config.upload_clip,
                self.config.upload_noise,
            )

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord | None = None,
        config: ConfigRecord | None = None,
        grid: Grid | None = None,
    ) -> list[Message]:
        """Address one training message to each sampled client.

        Parameters
        ----------
        server_round : int
            Round, from 1.
        arrays, config, grid
            Part of Flower's interface, not read: the model lives in the strategy.
        """
        partition_ids = self.sample(server_round)
        if self.secure is not None:
            with self._failing_round():
                partition_ids = self.secure.open(server_round, partition_ids)
        return self.train_messages(
            server_round,
            [] if self._round.reason else partition_ids,
            is_scored=None if self.scores_uploads else False,
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, drop what is unusable, aggregate the rest.

        Returns
        -------
        tuple of None and MetricRecord or None
            Number of usable replies and training loss, ``None`` if fewer than
            ``min-replies`` were usable. The aggregated model stays in the strategy.
        """
        clock = time.perf_counter()
        uploads = self.read_uploads(self._by_partition(replies))
        self._round.seconds["receive"] = time.perf_counter() - clock
        if len(uploads) < self.config.min_replies:
            return None, None
        clock = time.perf_counter()
        if self.secure is None:
            self.aggregate(server_round, uploads)
        else:
            with self._failing_round():
                self._aggregate_securely(self.secure, server_round, uploads)
        if self._round.reason:
            return None, None
        self._round.seconds["aggregate"] = time.perf_counter() - clock
        return None, MetricRecord(
            {"num-replies": len(uploads), "loss": self._round.loss}
        )

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord | None = None,
        config: ConfigRecord | None = None,
        grid: Grid | None = None,
    ) -> list[Message]:
        """Ask for the scores that training replies did not bring.

        With ``evaluate`` local or both, clients that sat out score their own model; with
        global or both, every client scores the aggregated one.
        """
        mode = self.config.evaluate
        return self.evaluate_messages(
            server_round, is_local=mode != "global", is_global=mode != "local"
        )

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Take in the scores of an evaluation exchange.

        Returns
        -------
        MetricRecord or None
            Pooled accuracy by ``<mode>/<column>``; ``None`` without any score.
        """
        for pid, reply in self._by_partition(replies).items():
            self._round.add_evaluation(pid, reply)
        flat = {
            f"{mode}/{column}": values["accuracy"]
            for mode, columns in self._round.pooled().items()
            for column, values in columns.items()
        }
        return MetricRecord(flat) if flat else None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run all rounds.

        Parameters
        ----------
        grid : Grid
            Flower's grid, or the local engine's.
        num_rounds : int, optional
            Instead of the setting ``rounds``.
        initial_arrays, timeout, train_config, evaluate_config, evaluate_fn
            Part of Flower's interface; must be left out: the method builds its own model,
            and the settings say the rest.

        Returns
        -------
        Result
            Flower's result: last model and metrics by round.

        Raises
        ------
        RunError
            If the clients do not fit together, if three rounds in a row or all rounds
            brought too few usable replies, or if no round was scored; if a checkpoint
            cannot be written, or the run cannot go on from one.
        """
        given = (initial_arrays, timeout, train_config, evaluate_config, evaluate_fn)
        if any(value is not None for value in given):
            raise RunError(
                f"{type(self).__name__}.start takes only grid and num_rounds: the method "
                "builds its own model, and the settings say the rest."
            )
        self._grid = grid
        if self.checkpoints is not None:
            self.checkpoints.restore_states()  # before clients add new keys to them
        self.federation = discover(grid, self.config)
        # who was asked before round 1 and is no client is not asked again
        clients = set(self.federation.nodes.values())
        self._newcomers.refused |= set(grid.get_node_ids()) - clients
        if self.config.secure_aggregation:
            self.secure = SecureExchanges(self)
        self.summary()
        if self.recorder is not None and not self.is_resumed:
            self.recorder.append_clients(client_lines(self.federation))
        self.prepare()
        result = Result()
        done = self._resume(result)
        rounds = num_rounds or self.config.rounds
        for server_round in range(done + 1, rounds + 1):
            metrics = self.run_round(server_round, is_last=server_round == rounds)
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            self._keep(server_round, result)
        if not result.train_metrics_clientapp:
            raise RunError(f"No round succeeded. {self._round.why_failed()}")
        if not self._any_scored:
            raise RunError(
                "No round that succeeded was scored. Lower evaluate-every, or see the "
                "failures in rounds.jsonl."
            )
        self.finish()
        state = self.global_state()
        if state is not None:
            result.arrays = write_tensors(state)
        return result

    def _resume(self, result: Result) -> int:
        """Go back to the checkpoint, if there is one; return its round, else 0."""
        if self.checkpoints is None or self.checkpoints.resumed is None:
            return 0
        resume_strategy(self, self.checkpoints.resumed, result, self._grid)
        return self.checkpoints.resumed.server_round

    def _keep(self, server_round: int, result: Result) -> None:
        """Write a checkpoint if one is due."""
        if self.checkpoints is not None and self.checkpoints.is_due(server_round):
            clients = describe_clients(self.federation)
            self.checkpoints.save(server_round, pack_strategy(self, result), clients)

    # ----------------------------------------------------------------- one round
    def run_round(self, server_round: int, *, is_last: bool) -> MetricRecord | None:
        """Train, aggregate, evaluate, write the round down.

        Returns
        -------
        MetricRecord or None
            ``None`` if the round failed.

        Raises
        ------
        RunError
            After three failed rounds in a row.
        """
        self._newcomers.welcome(self)
        is_due = is_last or server_round % self.config.evaluate_every == 0
        is_scored = is_due or self._owes_scores
        self._round = RoundLog(server_round, is_scored=is_scored)
        clock = time.perf_counter()
        messages = self.configure_train(server_round)
        self._round.seconds["send"] = time.perf_counter() - clock
        _, metrics = self.aggregate_train(server_round, self.exchange(messages))
        is_ok = metrics is not None and self.complete_round(server_round)
        if is_scored:
            self.evaluate_round(server_round)
        self._owes_scores = is_scored and not is_ok
        self._round.close(is_ok=is_ok, min_replies=self.config.min_replies)
        self.record_round()
        if is_ok:
            self._remember_best()
        self._failed_in_a_row = 0 if is_ok else self._failed_in_a_row + 1
        if self._failed_in_a_row >= MAX_FAILED_ROUNDS:
            raise RunError(
                f"{MAX_FAILED_ROUNDS} rounds in a row failed. {self._round.why_failed()}"
            )
        return metrics if is_ok else None

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
        downloads = self._pack_downloads(server_round, partition_ids)
        messages = []
        for pid, content in downloads.items():
            content[CONFIG] = settings
            if self.secure is not None and not action:
                self.secure.attach(pid, content)
            kind = MessageType.TRAIN + (f".{action}" if action else "")
            messages.append(self._message(pid, content, kind, server_round))
        self._round.add_download(self._addressees(messages))
        if self.config.upload_noise and brings_upload and self.recorder is not None:
            # before they are sent: an upload may be seen even if the run ends here
            asked = {"round": server_round, "clients": list(downloads)}
            self.recorder.append_release(asked)
        return messages

    def exchange(self, messages: Sequence[Message]) -> list[Message]:
        """Send, wait, keep failures and seconds of the round; return the replies."""
        exchange = send_receive(
            self._grid,
            self._addressees(messages),
            timeout=self.config.round_timeout,
            max_mb=self.config.max_message_mb,
        )
        self._round.add_exchange(exchange)
        return list(exchange.replies.values())

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

    def _aggregate_securely(
        self,
        secure: SecureExchanges,
        server_round: int,
        uploads: Mapping[int, Upload],
    ) -> None:
        """Open the sum of masked uploads and take it in."""
        sums = secure.close({pid: upload.payload for pid, upload in uploads.items()})
        weights = {pid: upload.num_examples for pid, upload in uploads.items()}
        self.aggregate_sums(server_round, sums, weights)

    def ask(
        self, server_round: int, action: str, payloads: Mapping[int, Payload]
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
        exchange = send_receive(
            self._grid,
            messages,
            timeout=self.config.round_timeout,
            max_mb=self.config.max_message_mb,
        )
        for pid, reply in exchange.replies.items():
            self._round.count_up(pid, reply.content)
        for failure in exchange.failures:
            self.drop(failure.partition_id, failure.reason)
        return {pid: reply.content for pid, reply in exchange.replies.items()}

    def take_back(self, partition_id: int, node: int, description: Description) -> None:
        """Let another node be a client from now on: its SuperNode was started anew.

        Parameters
        ----------
        partition_id : int
            The client.
        node : int
            Flower's id of its new node.
        description : Description
            What that node says of itself; but for its key, as before.
        """
        nodes = {**self.federation.nodes, partition_id: node}
        self.federation = replace(self.federation, nodes=nodes)
        self._trained.pop(
            partition_id, None
        )  # its memory may be lost: it gets a download
        if self.secure is not None:
            self.secure.renew(partition_id, description.public_key)
        log.warning("Client %s is back, as node %s.", partition_id, node)

    def drop(self, partition_id: int, reason: str) -> None:
        """Count and name a client whose answer cannot be used."""
        log.warning("Round %s: client %s: %s", self._round.number, partition_id, reason)
        self._round.failures.append(Failure(partition_id, reason))

    @contextlib.contextmanager
    def _failing_round(self) -> Iterator[None]:
        """Turn an error of secure aggregation into a round that failed."""
        try:
            yield
        except PayloadError as error:
            log.warning("Round %s: %s", self._round.number, error)
            self._round.reason = str(error)

    def _weight(self, partition_id: int) -> float:
        """Return what ``weight-by`` makes a client weigh."""
        client = self.federation.clients[partition_id]
        weights = {
            "train-nodes": client.num_train,
            "nodes": client.num_nodes,
            "equal": 1,
        }
        return float(weights[self.config.weight_by])

    def _pack_downloads(
        self, server_round: int, partition_ids: Sequence[int]
    ) -> dict[int, RecordDict]:
        """Pack what clients get before they train; equal payloads are packed once."""
        packed: dict[int, tuple[Payload, RecordDict]] = {}
        contents = {}
        for pid in partition_ids:
            payload = self.download(server_round, pid)
            if id(payload) not in packed:
                packed[id(payload)] = (payload, payload.to_record())
            contents[pid] = RecordDict(dict(packed[id(payload)][1]))
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

    # ---------------------------------------------------------------- evaluation
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
            that never trained gets the download it would train from; with
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
        downloads = self._pack_downloads(server_round + 1, sent)
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

    def evaluate_round(self, server_round: int) -> None:
        """Run the evaluation exchange if any score is still owed."""
        clock = time.perf_counter()
        self.evaluate(server_round, self.configure_evaluate(server_round))
        self._round.seconds["evaluate"] = time.perf_counter() - clock

    def evaluate(self, server_round: int, messages: Sequence[Message]) -> None:
        """Send evaluation messages and take in the scores."""
        if messages:
            addressed = self._addressees(messages)
            self._round.add_download(addressed)
            exchange = send_receive(
                self._grid,
                addressed,
                timeout=self.config.round_timeout,
                max_mb=self.config.max_message_mb,
            )
            self._round.failures += exchange.failures
            self.aggregate_evaluate(server_round, exchange.replies.values())

    def _remember_best(self) -> None:
        """Keep the aggregated model of the best validation round.

        As in the summary, rounds that scored fewer validation nodes do not compete.
        """
        self._any_scored |= bool(self._round.pooled())
        state = self.global_state()
        score = self._round.validation()
        if state is None or score is None:
            return
        if self._best is None or score >= self._best[0]:
            self._best = (score, {k: v.clone() for k, v in state.items()})
            self._best_round = self._round.number

    def best_state(self) -> Mapping[str, Tensor] | None:
        """Return the aggregated model of the best validation round, else the last."""
        return self._best[1] if self._best is not None else self.global_state()

    def model_card(self) -> ModelCard:
        """Describe the model that :meth:`best_state` returns."""
        config, federation = self.config, self.federation
        given = "rows" if config.has_unseen else "none"
        return ModelCard(
            method=config.method,
            model=next(iter(federation.clients.values())).model,
            num_features=federation.num_features,
            hidden_channels=config.hidden_channels,
            num_layers=config.num_layers,
            class_names=federation.class_names,
            classifies_graphs=config.classifies_graphs,
            scaling="lost" if config.setting == "inductive" else given,
            round=self._best_round if self._best is not None else self._round.number,
        )

    def record_round(self) -> None:
        """Write the round and its clients to the run folder."""
        if self.recorder is not None:
            self.recorder.append_clients(self._round.client_rows())
            self.recorder.append_round(self._round.row())
