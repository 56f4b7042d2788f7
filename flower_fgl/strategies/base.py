"""The round loop of every server half; methods override hooks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
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

from flower_fgl.config import RunConfig
from flower_fgl.errors import PayloadError, RunError
from flower_fgl.protocols.base import CONFIG, METRICS, Payload, write_tensors
from flower_fgl.seeds import SERVER, numpy_generator
from flower_fgl.strategies.exchange import Exchange, Failure, send_receive
from flower_fgl.strategies.federation import Federation, discover
from flower_fgl.strategies.rounds import RoundLog

__all__ = ["FglStrategy", "Recorder", "Upload"]

log = logging.getLogger(__name__)
MAX_FAILED_ROUNDS = 3


class Recorder(Protocol):
    """Where a strategy writes what happened: the run folder."""

    def append_clients(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add one line per client."""

    def append_round(self, row: Mapping[str, Any]) -> None:
        """Add the line of a round."""


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
    """

    down: ClassVar[type[Payload]]
    up: ClassVar[type[Payload]]

    def __init__(self, config: RunConfig, recorder: Recorder | None = None) -> None:
        self.config = config
        self.recorder = recorder
        self.federation: Federation
        self._grid: Grid
        self._failed_in_a_row = 0
        self._best: tuple[float, dict[str, Tensor]] | None = None
        self._round: RoundLog

    # ------------------------------------------------------------------ hooks
    def prepare(self) -> None:
        """Build the server's state; ``self.federation`` is known."""

    def download(self, server_round: int, partition_id: int) -> Payload:
        """Return what a client gets before it trains."""
        raise NotImplementedError

    def upload_spec(self, partition_id: int) -> Any:
        """Return what :meth:`Payload.from_record` checks the upload against."""
        return None

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Take in the uploads of a round, keyed by partition-id, ascending."""
        raise NotImplementedError

    def global_state(self) -> Mapping[str, Tensor] | None:
        """Return the aggregated model, ``None`` if the method has none."""
        return None

    def finish(self) -> None:
        """Run after the last round, e.g. one more exchange."""

    def sample(self, server_round: int) -> list[int]:
        """Draw the clients that train, ⌈participation · K⌉ of those that can."""
        able = self.federation.trainable
        share = self.config.participation
        if share == 1:
            return able
        generator = numpy_generator(self.config.seed, server_round, SERVER, "sample")
        count = max(1, math.ceil(share * len(able) - 1e-9))
        return sorted(int(p) for p in generator.choice(able, count, replace=False))

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

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Address one training message to each sampled client."""
        messages = self.train_messages(server_round, self.sample(server_round), config)
        return list(messages.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, drop what is unusable, aggregate the rest.

        Returns
        -------
        tuple of ArrayRecord or None, MetricRecord or None
            The aggregated model if the method has one, and the round's loss; both
            ``None`` if fewer than ``min-replies`` replies were usable.
        """
        by_node = {node: pid for pid, node in self.federation.nodes.items()}
        known = {
            by_node[reply.metadata.src_node_id]: reply
            for reply in replies
            if not reply.has_error() and reply.metadata.src_node_id in by_node
        }
        if not hasattr(self, "_round"):
            self._round = RoundLog(server_round)
        uploads = self.read_uploads(dict(sorted(known.items())))
        if len(uploads) < self.config.min_replies:
            return None, None
        self.aggregate(server_round, uploads)
        state = self.global_state()
        loss = self._round.loss
        return (
            None if state is None else write_tensors(state),
            MetricRecord({"num-replies": len(uploads), "loss": loss}),
        )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Address an evaluation message to each client that still owes a score."""
        return list(self.evaluate_messages(server_round).values())

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Pool the scores of an evaluation exchange."""
        by_node = {node: pid for pid, node in self.federation.nodes.items()}
        for reply in replies:
            if not reply.has_error() and reply.metadata.src_node_id in by_node:
                pid = by_node[reply.metadata.src_node_id]
                self._round.add_scores(pid, reply.content.metric_records[METRICS])
        pooled = self._round.pooled()
        flat = {
            f"{mode}/{column}/accuracy": values["accuracy"]
            for mode, columns in pooled.items()
            for column, values in columns.items()
            if values["accuracy"] is not None
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
        initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
            As in Flower; rounds and timeout default to the settings, and the initial
            model is the method's own.

        Returns
        -------
        Result
            Flower's result: last model and metrics by round.

        Raises
        ------
        RunError
            If the clients do not fit together, or three rounds in a row, or the last
            one and all before it, brought too few usable replies.
        """
        self._grid = grid
        self.federation = discover(grid, self.config)
        self.summary()
        self._record_clients()
        self.prepare()
        result = Result()
        rounds = num_rounds or self.config.rounds
        any_ok = False
        for server_round in range(1, rounds + 1):
            metrics = self.run_round(server_round, is_last=server_round == rounds)
            any_ok |= metrics is not None
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
        if not any_ok:
            raise RunError(f"No round succeeded. {self._round.why_failed()}")
        self.finish()
        state = self.global_state()
        if state is not None:
            result.arrays = write_tensors(state)
        return result

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
        is_scored = is_last or server_round % self.config.evaluate_every == 0
        self._round = RoundLog(server_round, is_scored=is_scored)
        clock = time.perf_counter()
        messages = self.train_messages(server_round, self.sample(server_round))
        self._round.add_download(messages)
        self._round.seconds["send"] = time.perf_counter() - clock
        exchange = self.exchange(messages)
        clock = time.perf_counter()
        uploads = self.read_uploads(exchange.replies)
        self._round.seconds["receive"] = time.perf_counter() - clock
        clock = time.perf_counter()
        is_ok = len(uploads) >= self.config.min_replies
        if is_ok:
            self.aggregate(server_round, uploads)
        self._round.seconds["aggregate"] = time.perf_counter() - clock
        if is_scored:
            self.evaluate_round(server_round)
        self._round.close(is_ok=is_ok, min_replies=self.config.min_replies)
        self.record_round()
        self._remember_best()
        self._failed_in_a_row = 0 if is_ok else self._failed_in_a_row + 1
        if self._failed_in_a_row >= MAX_FAILED_ROUNDS:
            raise RunError(
                f"{MAX_FAILED_ROUNDS} rounds in a row failed. {self._round.why_failed()}"
            )
        if not is_ok:
            return None
        return MetricRecord({"num-replies": len(uploads), "loss": self._round.loss})

    def train_messages(
        self,
        server_round: int,
        partition_ids: Sequence[int],
        config: ConfigRecord | None = None,
        *,
        action: str = "",
    ) -> dict[int, Message]:
        """Pack each client's download; equal payloads are packed once."""
        packed: dict[int, tuple[Payload, RecordDict]] = {}
        messages = {}
        kind = MessageType.TRAIN + (f".{action}" if action else "")
        for pid in partition_ids:
            payload = self.download(server_round, pid)
            if id(payload) not in packed:
                packed[id(payload)] = (payload, payload.to_record())
            content = RecordDict(dict(packed[id(payload)][1]))
            content[CONFIG] = ConfigRecord(
                {
                    **(config or {}),
                    "server-round": server_round,
                    "evaluate": self._round.is_scored
                    and self.config.evaluate != "global",
                }
            )
            messages[pid] = Message(
                content,
                dst_node_id=self.federation.nodes[pid],
                message_type=kind,
                group_id=str(server_round),
            )
        return messages

    def exchange(self, messages: Mapping[int, Message]) -> Exchange:
        """Send, wait, and keep failures and seconds of the round."""
        exchange = send_receive(self._grid, messages, timeout=self.config.round_timeout)
        self._round.add_exchange(exchange)
        return exchange

    def read_uploads(self, replies: Mapping[int, Message]) -> dict[int, Upload]:
        """Check every reply; one that is malformed is dropped, counted and named."""
        uploads = {}
        for pid, reply in replies.items():
            try:
                metrics = reply.content.metric_records.get(METRICS)
                if metrics is None:
                    raise PayloadError(f'the reply has no record "{METRICS}"')
                payload = self.up.from_record(reply.content, self.upload_spec(pid))
                num_examples = self._weight(pid)
                self._round.add_reply(pid, reply.content, num_examples)
            except PayloadError as error:
                log.warning("Round %s: client %s: %s", self._round.number, pid, error)
                self._round.failures.append(Failure(pid, str(error)))
                continue
            uploads[pid] = Upload(payload, num_examples)
        return uploads

    def _weight(self, partition_id: int) -> float:
        """Return what ``weight-by`` makes a client weigh."""
        client = self.federation.clients[partition_id]
        weights = {
            "train-nodes": client.num_train,
            "nodes": client.num_nodes,
            "equal": 1,
        }
        return float(weights[self.config.weight_by])

    # ---------------------------------------------------------------- evaluation
    def evaluate_messages(self, server_round: int) -> dict[int, Message]:
        """Ask for the scores that training replies did not bring.

        With ``evaluate`` local or both, clients that sat out score their own model; with
        global or both, every client scores the aggregated one.
        """
        mode = self.config.evaluate
        state = self.global_state() if mode != "local" else None
        shared = None if state is None else write_tensors(state)
        messages = {}
        for pid in self.federation.clients:
            modes = [] if mode == "global" or self._round.has_scores(pid) else ["local"]
            modes += [] if shared is None else ["global"]
            if not modes:
                continue
            content = RecordDict()
            if "local" in modes:
                content = self.download(server_round + 1, pid).to_record()
            if shared is not None:
                content["global"] = shared
            content[CONFIG] = ConfigRecord(
                {"server-round": server_round, "modes": modes}
            )
            messages[pid] = Message(
                content,
                dst_node_id=self.federation.nodes[pid],
                message_type=MessageType.EVALUATE,
                group_id=str(server_round),
            )
        return messages

    def evaluate_round(self, server_round: int) -> None:
        """Run the evaluation exchange if any score is still owed."""
        clock = time.perf_counter()
        messages = self.evaluate_messages(server_round)
        if messages:
            self._round.add_download(messages)
            exchange = send_receive(
                self._grid, messages, timeout=self.config.round_timeout
            )
            self._round.add_evaluation(exchange)
        self._round.seconds["evaluate"] = time.perf_counter() - clock

    def _remember_best(self) -> None:
        """Keep the aggregated model of the best validation round."""
        state = self.global_state()
        score = self._round.validation_accuracy()
        if state is None or score is None:
            return
        if self._best is None or score >= self._best[0]:
            self._best = (score, {k: v.clone() for k, v in state.items()})

    def best_state(self) -> Mapping[str, Tensor] | None:
        """Return the aggregated model of the best validation round, else the last."""
        return self._best[1] if self._best is not None else self.global_state()

    # ------------------------------------------------------------------- records
    def record_round(self) -> None:
        """Write the round and its clients to the run folder."""
        if self.recorder is not None:
            self.recorder.append_clients(self._round.client_rows())
            self.recorder.append_round(self._round.row())

    def _record_clients(self) -> None:
        if self.recorder is None:
            return
        self.recorder.append_clients(
            [
                {
                    "round": 0,
                    "partition_id": pid,
                    "num_nodes": client.num_nodes,
                    "num_edges": client.num_edges,
                    "num_train": client.num_train,
                    "num_val": client.num_val,
                    "num_test": client.num_test,
                    "class_counts": list(client.class_counts),
                    "class_names": list(client.class_names),
                    "model": client.model,
                    "trains": client.num_train > 0,
                }
                for pid, client in self.federation.clients.items()
            ]
        )


def weighted_mean(
    states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]
) -> dict[str, Tensor]:
    """Average model states, ``Σ_i (n_i/n) θ_i``, McMahan et al. 2017, Algorithm 1.

    Parameters
    ----------
    states : sequence of mapping of str to Tensor, float32
        One state per client, with equal names and shapes.
    weights : sequence of float
        n_i, not negative, not all zero.

    Returns
    -------
    dict of str to Tensor, float32

    Raises
    ------
    ValueError
        If no weight is positive.
    """
    total = float(sum(weights))
    if not total > 0:
        raise ValueError(f"At least one weight must be positive, got {list(weights)}.")
    mean = {name: torch.zeros_like(tensor) for name, tensor in states[0].items()}
    for state, weight in zip(states, weights, strict=True):
        for name, tensor in state.items():
            mean[name].add_(tensor, alpha=weight / total)
    return mean
