"""The round loop of every server half, and Flower's interface to it."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import PayloadError, RunError
from flower_fgl.core.score_names import SCORES
from flower_fgl.nn.backbone import is_finite
from flower_fgl.protocols.base import write_tensors
from flower_fgl.protocols.exchanges import SCALE, AgreedScale
from flower_fgl.runs.model_file import ModelCard
from flower_fgl.strategies.federation import client_lines, describe_model
from flower_fgl.strategies.hooks import ServerHooks
from flower_fgl.strategies.rounds.checkpointing import (
    client_descriptions,
    clients_to_await,
    pack_run,
    resume_run,
)
from flower_fgl.strategies.rounds.discovery import discover
from flower_fgl.strategies.rounds.messenger import Upload
from flower_fgl.strategies.rounds.rejoining import LateJoiners
from flower_fgl.strategies.rounds.round_log import RoundLog
from flower_fgl.strategies.rounds.secure_aggregation import SecureExchanges

__all__ = ["FglStrategy", "Upload", "is_checkpoint_due"]

log = logging.getLogger(__name__)
MAX_FAILED_ROUNDS = 3


class FglStrategy(ServerHooks):
    """Base of all server halves: the round loop and Flower's interface.

    A method overrides and calls what :class:`ServerHooks` defines.
    """

    _late_joiners: LateJoiners

    def summary(self) -> None:
        """Log the method, the clients and the upload protection."""
        log.info(
            "%s: %d clients (%d train), %s, %d features",
            self.config.method,
            len(self.federation.clients),
            len(self.federation.trainable),
            self.federation.target.counted,
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
        """Address one training message to each sampled client."""
        partition_ids = self.sample(server_round)
        if self.secure is not None:
            with self.loop.log.failing():
                partition_ids = self.secure.open(server_round, partition_ids)
        return self.train_messages(
            server_round,
            [] if self.loop.log.reason else partition_ids,
            is_scored=None if self.scores_uploads else False,
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, drop unusable ones, aggregate the rest.

        Returns number of usable replies and training loss, ``None`` with fewer than
        ``min-replies``. The aggregated model stays in the strategy.
        """
        seconds = self.loop.log.seconds
        clock = time.perf_counter()
        uploads = self.read_uploads(self.messenger.by_sender(replies))
        seconds["receive"] = time.perf_counter() - clock
        if self.num_replies(uploads) < self.least_replies:
            return None, None
        clock = time.perf_counter()
        with self.loop.log.failing():
            if self.secure is None:
                uploads = self._aggregate(server_round, uploads)
            else:
                masked = {pid: upload.payload for pid, upload in uploads.items()}
                weights = {pid: upload.num_examples for pid, upload in uploads.items()}
                sums = self.secure.close(masked)
                self._keep_finite(
                    lambda: self.aggregate_sums(server_round, sums, weights)
                )
        if self.loop.log.reason:
            return None, None
        seconds["aggregate"] = time.perf_counter() - clock
        return None, MetricRecord(
            {"num-replies": len(uploads), "loss": self.loop.log.loss}
        )

    def _aggregate(
        self, server_round: int, uploads: dict[int, Upload]
    ) -> dict[int, Upload]:
        """Aggregate without the uploads to blame if that fails; return those aggregated."""
        try:
            self._keep_finite(lambda: self.aggregate(server_round, uploads))
        except PayloadError as error:
            blamed = self.to_blame(uploads)
            rest = {pid: u for pid, u in uploads.items() if pid not in blamed}
            if not blamed or self.num_replies(rest) < self.config.min_replies:
                raise
            for pid, reason in blamed.items():
                self.messenger.drop(pid, f"{reason}, and with it: {error}")
                self.loop.trained.pop(pid, None)
            self.loop.log.forget(blamed)
            self._keep_finite(lambda: self.aggregate(server_round, rest))
            return rest
        return uploads

    def _keep_finite(self, aggregate: Callable[[], None]) -> None:
        """Aggregate; raise a PayloadError and restore the state unless all is finite."""
        before, numbers = self.server_state(), dict(self.loop.log.numbers)
        try:
            aggregate()
            for name, tensor in self.server_state().tensors.items():
                if not is_finite(tensor):
                    part = name.removeprefix("kept/").partition("/")[0]
                    raise PayloadError(f'the aggregate ("{part}") is not finite')
        except Exception as error:
            self.load_server_state(before)
            self.loop.log.numbers = numbers
            if isinstance(error, RunError):
                raise
            if isinstance(error, PayloadError):
                raise PayloadError(f"{error}; the previous state is kept") from error
            log.exception("The aggregation raised:")
            raise PayloadError(
                f"the aggregation failed, the previous state is kept: {error!r}"
            ) from error

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord | None = None,
        config: ConfigRecord | None = None,
        grid: Grid | None = None,
    ) -> list[Message]:
        """Ask for the scores that the training replies did not carry.

        With ``evaluate`` local or both, clients that were not sampled evaluate their own
        model; with global or both, every client evaluates the aggregated one; with mixed,
        its next download.
        """
        mode = self.config.evaluate
        return self.evaluate_messages(
            server_round,
            is_local=mode != "global",
            is_global=mode in ("global", "both"),
        )

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Store the scores of an exchange; return the main ones by ``<mode>/<column>``."""
        self.messenger.read_evaluations(self.messenger.by_sender(replies))
        return self._pooled_scores()

    def _pooled_scores(self) -> MetricRecord | None:
        """Return the main score of the round so far by ``<mode>/<column>``, if any."""
        main = self.main_score
        flat = {
            f"{mode}/{column}": values.get(main, math.nan)
            for mode, columns in self.loop.log.pooled().items()
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
        should_stop: Callable[[int, Result], bool] | None = None,
    ) -> Result:
        """Run all rounds on Flower's grid, or the local engine's; return Flower's result.

        ``num_rounds`` replaces the setting ``rounds``. ``should_stop`` is called after
        every round with its number and the result so far; if it returns True, the run
        ends as after its last round (Flower's own strategies have this argument since
        version 1.43). The other arguments are part of Flower's interface and refused: the
        settings replace them.

        Raises a RunError if the clients do not fit together; if three rounds in a row, or
        all rounds, had too few usable replies; if no round was scored; if a checkpoint
        cannot be written, or the run cannot resume from one.
        """
        given = (initial_arrays, timeout, train_config, evaluate_config, evaluate_fn)
        if any(value is not None for value in given):
            raise RunError(
                f"{type(self).__name__}.start takes only grid, num_rounds and "
                "should_stop: the method builds its own model, and the settings say the "
                "rest."
            )
        self._connect(grid)
        result = Result()
        first = 1
        if self.checkpoints is not None and self.checkpoints.resumed is not None:
            resumed = self.checkpoints.resumed
            resume_run(
                self.messenger,
                resumed,
                result,
                self.load_server_state,
                restores_states=self.checkpoints.states is not None,
            )
            first = resumed.server_round + 1
        rounds = num_rounds or self.config.rounds
        ends = should_stop or (lambda number, result: False)
        is_over = first > 1 and ends(first - 1, result)
        for server_round in range(first, rounds + 1) if not is_over else ():
            metrics = self.run_round(server_round, is_last=server_round == rounds)
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            scores = self._pooled_scores()
            if scores is not None:
                result.evaluate_metrics_clientapp[server_round] = scores
            is_over = ends(server_round, result)
            if self.checkpoints is not None and (
                is_checkpoint_due(self.config, server_round)
                or (is_over and self.config.keep_checkpoint)
            ):
                self.checkpoints.save(
                    server_round,
                    pack_run(self.loop, self.server_state(), result),
                    client_descriptions(self.federation),
                )
            if is_over:
                break
        if not result.train_metrics_clientapp:
            raise RunError(f"No round succeeded. {self.loop.log.why_failed()}")
        if not self.loop.any_scored:
            raise RunError(
                "No round that succeeded was scored. Lower evaluate-every, or see the "
                "failures in rounds.jsonl."
            )
        self.loop.last_success = max(result.train_metrics_clientapp)
        self._report_withheld()
        self.finish()
        if self.config.calibration == "shared":
            self._calibrate()
        state = self.global_state()
        if state is not None:
            result.arrays = write_tensors(state)
        return result

    def _calibrate(self) -> None:
        """Calibrate the model of :meth:`best_state` with sums over all clients."""
        from flower_fgl.strategies.rounds.exchanges import calibrate

        state, number = self.best_state(), self.config.rounds + 1
        if state is None:
            raise RunError(
                f"{self.config.method} has no global model in this run, which "
                'calibration = "shared" needs. Use calibration = "owner".'
            )
        with self.phase("calibration", number, is_scored=True, min_replies=0):
            with self.loop.log.failing():
                self.calibration = calibrate(self.messenger, self.secure, state, number)
            if self.calibration is not None:
                messages = self.evaluate_messages(
                    number + 1, is_local=False, is_global=True
                )
                self.evaluate(number + 1, messages)

    def _connect(self, grid: Grid) -> None:
        """Find the clients and prepare the method."""
        self.messenger.grid = grid
        before = None
        if self.checkpoints is not None:
            self.checkpoints.restore_states()  # before clients add new keys to them
            if self.checkpoints.resumed:
                before = clients_to_await(self.checkpoints.resumed, self.config)
        self.federation = discover(grid, self.config, before)
        if self.config.predicts_numbers:
            self._agree_on_scale()
        self._late_joiners = LateJoiners(set(self.federation.turned_away))
        if self.config.secure_aggregation:
            self.secure = SecureExchanges(self.messenger, type(self), self.up)
        self.summary()
        if self.recorder is not None and not self.is_resumed:
            lines = client_lines(self.federation.clients.values())
            self.recorder.describe_clients(lines)
        self.prepare()

    def _agree_on_scale(self) -> None:
        """Agree on the scale of the numbers, unless the run resumes with the former one."""
        if self.checkpoints is not None and self.checkpoints.resumed is not None:
            stored = self.checkpoints.resumed.snapshot.part("loop").tree().get(SCALE)
            scale = stored and AgreedScale(tuple(stored["mean"]), tuple(stored["std"]))
            self.federation = replace(self.federation, scale=scale)
        elif self.config.target_scale == "shared":
            from flower_fgl.strategies.rounds.exchanges import agree_on_scale

            with self.phase("targets", 0, min_replies=0):
                self.federation = agree_on_scale(self.messenger)
        known = self.federation.known_scale(self.config)
        unknown = [math.nan] * self.federation.target.width
        self.messenger.spreads = unknown if known is None else known.std.tolist()

    def run_round(self, server_round: int, *, is_last: bool) -> MetricRecord | None:
        """Train, aggregate, evaluate, record; return ``None`` if the round failed.

        The third failed round in a row raises a RunError.
        """
        loop = self.loop
        nodes = set(self.messenger.grid.get_node_ids())
        late = self._late_joiners
        if late.refused or late.waiting or nodes != self.federation.partitions.keys():
            late.poll(self.messenger, self.secure, nodes, server_round)
        is_due = is_last or server_round % self.config.evaluate_every == 0
        is_scored = is_due or loop.owes_scores
        loop.log = RoundLog(server_round, is_scored=is_scored)
        clock = time.perf_counter()
        messages = self.configure_train(server_round)
        loop.log.seconds["send"] = time.perf_counter() - clock
        replies = self.messenger.exchange(messages)
        _, metrics = self.aggregate_train(server_round, replies.values())
        is_ok = metrics is not None and self.complete_round(server_round)
        if is_scored:
            clock = time.perf_counter()
            self.evaluate(server_round, self.configure_evaluate(server_round))
            loop.log.seconds["evaluate"] = time.perf_counter() - clock
        loop.owes_scores = is_scored and not is_ok
        loop.log.close(is_ok=is_ok, min_replies=self.least_replies)
        self.record_round()
        if is_ok:
            loop.any_scored |= bool(loop.log.pooled() or loop.unscored)
            self._keep_best(server_round)
        loop.failed_in_a_row = 0 if is_ok else loop.failed_in_a_row + 1
        if loop.failed_in_a_row >= MAX_FAILED_ROUNDS:
            raise RunError(
                f"{MAX_FAILED_ROUNDS} rounds in a row failed. {loop.log.why_failed()}"
            )
        return metrics if is_ok else None

    def evaluate(self, server_round: int, messages: Sequence[Message]) -> None:
        """Send evaluation messages, if there are any, and store the scores."""
        if messages:
            replies = self.messenger.send(messages).replies
            self.aggregate_evaluate(server_round, replies.values())

    def _report_withheld(self) -> None:
        """Log which scores node configs withheld, and how the best round is selected."""
        loop = self.loop
        has_val = any("val" in columns for columns in loop.log.pooled().values())
        is_expected = any(c.num_val for c in self.federation.clients.values())
        if is_expected and not has_val and loop.log.number == loop.last_success:
            log.warning(
                "No client sent validation scores, as their node configs demand (scores, "
                "min-scored-nodes): no round is selected as the best one, and the global "
                "model is that of the last round."
            )
        elif loop.unscored:
            log.warning(
                "Clients %s sent no scores, as their node configs demand. The best round "
                "follows from the validation scores of the others.",
                ", ".join(map(str, sorted(loop.unscored))),
            )

    def _keep_best(self, server_round: int) -> None:
        """Copy the aggregated model if no round before had a better validation score.

        As in the summary, rounds that scored fewer validation nodes do not compete.
        """
        score = self.loop.log.validation(self.main_score)
        loop, state = self.loop, self.global_state()
        if state is None or score is None:
            return
        sign = -1 if SCORES[self.main_score].is_lower else 1
        (size, value), (most, best) = score, loop.best_score or (0, 0.0)
        if (size, sign * value) >= (most, sign * best):
            loop.best_score, loop.best_round = score, server_round
            loop.best_state = {name: tensor.clone() for name, tensor in state.items()}

    def model_card(self) -> ModelCard:
        """Describe the model that :meth:`best_state` returns."""
        is_last = self.loop.best_score is None
        number = self.loop.last_success if is_last else self.loop.best_round
        card = describe_model(self.config, self.federation, number)
        return replace(card, calibration=self.calibration)


def is_checkpoint_due(config: RunConfig, server_round: int) -> bool:
    """Return whether a checkpoint is written after a round."""
    if config.keep_checkpoint and server_round == config.rounds:
        return True
    every = config.checkpoint_every
    return every > 0 and server_round % every == 0
