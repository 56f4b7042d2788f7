"""The round loop of every server half: what each method has in common."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.protocols.base import write_tensors
from flower_fgl.runs.checkpoints import Checkpoints
from flower_fgl.runs.model_file import ModelCard
from flower_fgl.strategies.federation import client_lines
from flower_fgl.strategies.hooks import Recorder, Upload
from flower_fgl.strategies.rounds.best_model import BestModel, describe_model
from flower_fgl.strategies.rounds.checkpointing import (
    describe_clients,
    pack_strategy,
    read_clients,
    resume_strategy,
)
from flower_fgl.strategies.rounds.describe_exchange import discover
from flower_fgl.strategies.rounds.messages import ClientExchanges
from flower_fgl.strategies.rounds.rejoining import LateJoiners
from flower_fgl.strategies.rounds.round_log import RoundLog
from flower_fgl.strategies.rounds.secure_aggregation import SecureExchanges

__all__ = ["FglStrategy", "Upload"]

log = logging.getLogger(__name__)
MAX_FAILED_ROUNDS = 3


class FglStrategy(ClientExchanges):
    """Base of all server halves.

    A method overrides hooks of :class:`ServerHooks`; what it may send of its own is in
    :class:`ClientExchanges`. The loop, Flower's interface and the scores are here.

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
        self._newcomers = LateJoiners()
        self._failed_in_a_row = 0
        self._owes_scores = False
        self._any_scored = False
        self._last_success = 0
        self._best = BestModel()

    # ------------------------------------------------------- Flower's interface
    def summary(self) -> None:
        """Log what is about to run."""
        log.info(
            "%s: %d clients (%d train), %d classes, %d features",
            self.config.method,
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
            with self._round.failing():
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
        if self.num_replies(uploads) < self.config.min_replies:
            return None, None
        clock = time.perf_counter()
        if self.secure is None:
            self.aggregate(server_round, uploads)
        else:
            with self._round.failing():
                masked = {pid: upload.payload for pid, upload in uploads.items()}
                weights = {pid: upload.num_examples for pid, upload in uploads.items()}
                self.aggregate_sums(server_round, self.secure.close(masked), weights)
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
        resumed = None
        if self.checkpoints is not None:
            self.checkpoints.restore_states()  # before clients add new keys to them
            resumed = self.checkpoints.resumed
        before = read_clients(resumed) if resumed and self.config.min_clients else None
        self.federation = discover(grid, self.config, before)
        self._newcomers.refused |= self.federation.turned_away  # not asked again
        if self.config.secure_aggregation:
            self.secure = SecureExchanges(self)
        self.summary()
        if self.recorder is not None and not self.is_resumed:
            self.recorder.append_clients(client_lines(self.federation.clients.values()))
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
        self._last_success = max(result.train_metrics_clientapp)
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
        self._newcomers.poll(self, server_round)
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
            self._any_scored |= bool(self._round.pooled())
            score = self._round.validation()
            self._best.offer(server_round, score, self.global_state())
        self._failed_in_a_row = 0 if is_ok else self._failed_in_a_row + 1
        if self._failed_in_a_row >= MAX_FAILED_ROUNDS:
            raise RunError(
                f"{MAX_FAILED_ROUNDS} rounds in a row failed. {self._round.why_failed()}"
            )
        return metrics if is_ok else None

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
            exchange = self._send(addressed)
            self._round.failures += exchange.failures
            self.aggregate_evaluate(server_round, exchange.replies.values())

    # ------------------------------------------------------------- what is kept
    def best_state(self) -> Mapping[str, Tensor] | None:
        """Return the aggregated model of the best validation round, else the last."""
        return self.global_state() if self._best.score is None else self._best.state

    def model_card(self) -> ModelCard:
        """Describe the model that :meth:`best_state` returns."""
        best = self._best
        number = self._last_success if best.score is None else best.server_round
        return describe_model(self.config, self.federation, number)

    def record_round(self) -> None:
        """Write the round and its clients to the run folder; log who failed."""
        for reason, ids in self._round.lost().items():
            who = "client" + "s" * (len(ids) > 1)
            log.warning(
                "Round %s: %s %s: %s",
                self._round.number,
                who,
                ", ".join(map(str, sorted(ids))),
                reason,
            )
        if self.recorder is not None:
            self.recorder.append_clients(self._round.client_rows())
            self.recorder.append_round(self._round.row())
