"""The round loop of every server half."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields, is_dataclass
from typing import Any

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import PayloadError, RunError
from flower_fgl.core.sampling import least_uploads
from flower_fgl.core.settings import MIN_SECURE_CLIENTS
from flower_fgl.protocols.base import METRICS, Payload, read_payload, write_tensors
from flower_fgl.protocols.differential_privacy import check_clipped, numbers_of
from flower_fgl.runs.checkpoints import Checkpoints
from flower_fgl.runs.model_file import ModelCard
from flower_fgl.strategies.federation import Federation, client_lines
from flower_fgl.strategies.hooks import Recorder, ServerHooks, Upload
from flower_fgl.strategies.rounds.checkpointing import (
    client_descriptions,
    clients_to_await,
    pack_run,
    resume_run,
)
from flower_fgl.strategies.rounds.describe_exchange import discover
from flower_fgl.strategies.rounds.loop_state import LoopState
from flower_fgl.strategies.rounds.messenger import Messenger
from flower_fgl.strategies.rounds.model_card import describe_model
from flower_fgl.strategies.rounds.rejoining import LateJoiners
from flower_fgl.strategies.rounds.round_log import RoundLog
from flower_fgl.strategies.rounds.secure_aggregation import SecureExchanges
from flower_fgl.strategies.rounds.silence import without_paused

__all__ = ["FglStrategy", "Upload", "is_checkpoint_due"]

log = logging.getLogger(__name__)
MAX_FAILED_ROUNDS = 3
MANY = 8
"""Replies from which reading them together saves time."""
FAR = 1000.0
"""Ratio of the largest numbers of two uploads from which one is to blame for a failure."""


class FglStrategy(ServerHooks):
    """Base of all server halves: the round loop and Flower's interface.

    A method overrides hooks of :class:`ServerHooks`. Extra exchanges send with
    :meth:`train_messages`, ``self.messenger.exchange`` and ``self.messenger.ask``, inside
    ``with self.phase(name, …)`` where they happen outside a round.

    Parameters
    ----------
    config, recorder, checkpoints
        See :class:`ServerHooks`.

    Attributes
    ----------
    loop : LoopState
        State of the loop that a checkpoint stores.
    messenger : Messenger
        Sends messages and reads replies.
    least_replies : int
        Usable replies below which a round fails: ``min-replies``, or more if the
        ``aggregation`` needs more.
    secure : SecureExchanges or None
        The exchanges of secure aggregation, ``None`` when it is off.
    """

    def __init__(
        self,
        config: RunConfig,
        recorder: Recorder | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        super().__init__(config, recorder, checkpoints)
        self.loop = LoopState()
        self.messenger = Messenger(config, self.loop, recorder)
        self.secure: SecureExchanges | None = None
        self._late_joiners = LateJoiners()
        self.least_replies = max(config.min_replies, least_uploads(config))
        # attributes that a method adds later are its state
        self._plain = frozenset({*vars(self), "_plain"})

    @property
    def federation(self) -> Federation:
        """The clients of the run."""
        return self.loop.federation

    @federation.setter
    def federation(self, federation: Federation) -> None:
        self.loop.federation = federation

    # ----------------------------------------------------------- for the methods
    def log(self, **numbers: float) -> None:
        """Add numbers to the line of the current round, e.g. ``self.log(distance=d)``."""
        self.loop.log.numbers |= numbers

    def to_blame(self, uploads: Mapping[int, Upload]) -> dict[int, str]:
        """Return the clients without which a failed aggregation is tried again.

        Each with the reason that the log gives. By default the client whose largest
        number is over ``FAR`` times any other's, if there is one.
        """
        return _largest_by_far(uploads)

    @contextmanager
    def phase(
        self,
        name: str,
        server_round: int,
        *,
        is_scored: bool = False,
        min_replies: int = 1,
    ) -> Iterator[RoundLog]:
        """Log the exchanges inside as a phase of its own.

        Parameters
        ----------
        name : str
            Value of ``phase`` in ``rounds.jsonl``.
        server_round : int
            Number of the line: 0 before round 1, ``rounds`` + 1 after the last.
        is_scored : bool
            Whether the clients' models are evaluated.
        min_replies : int
            Usable replies below which the line says ``failed``.

        Yields
        ------
        RoundLog
            Log of the phase; written to the run folder at the end.
        """
        phase = self.loop.log = RoundLog(server_round, is_scored=is_scored, phase=name)
        yield phase
        is_ok = phase.num_replies >= min_replies
        phase.close(is_ok=is_ok, min_replies=min_replies)
        self.record_round()

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
            Receivers.
        action : str
            Named action of the client half; empty for its training.
        is_scored : bool, optional
            Whether the replies carry scores; by default in rounds that evaluate the
            clients' own models.
        brings_upload : bool
            Whether the replies carry numbers that ``upload-noise`` protects.
        """
        if is_scored is None:
            is_scored = self.loop.log.is_scored and self.config.evaluate in (
                "local",
                "both",
            )
            is_scored &= self.config.eval_policy != "refresh-all"
        settings = ConfigRecord({"server-round": server_round, "evaluate": is_scored})
        downloads = self.messenger.pack(
            {pid: self.download(server_round, pid) for pid in partition_ids}
        )
        if self.secure is not None and not action:
            for pid, content in downloads.items():
                self.secure.attach(pid, content)
        kind = MessageType.TRAIN + (f".{action}" if action else "")
        messages = self.messenger.address(downloads, kind, settings, server_round)
        self.loop.log.add_download(self.messenger.by_receiver(messages))
        self.loop.log.expect(partition_ids, ["local"] if is_scored else [])
        if brings_upload:
            self.messenger.note_release(server_round, downloads)
        return messages

    def evaluate_messages(
        self, server_round: int, *, is_local: bool, is_global: bool
    ) -> list[Message]:
        """Ask for the scores of the clients' own models, the aggregated one, or both.

        Parameters
        ----------
        server_round : int
            Round.
        is_local : bool
            Whether clients that have not sent scores in this round evaluate their own
            model. With ``eval-policy = "refresh"`` they evaluate a copy trained from the
            next download, with ``"refresh-all"`` all clients do. A client that never
            trained receives that download too. With ``evaluate = "mixed"`` all clients
            evaluate that download as it is.
        is_global : bool
            Whether every client evaluates the aggregated model.

        Notes
        -----
        1. In the few-shot setting, clients without test nodes are not asked. Neither are
           clients that were silent, until their pause is over, and clients that answered
           an earlier evaluation without any score, because their node config demands it.
        """
        state = self.global_state() if is_global else None
        shared = None if state is None else write_tensors(state)
        silent = self.loop.silent
        clients = [
            pid
            for pid, client in self.federation.clients.items()
            if (client.num_test or self.config.setting != "few-shot")
            and pid not in self.loop.unscored
            and not (pid in silent and silent[pid].is_paused(server_round))
        ]
        owing = [p for p in clients if is_local and not self.loop.log.has_scores(p)]
        able = self.federation.trainable
        is_refreshed = self.config.eval_policy != "stale"
        refreshed = set(owing).intersection(able if is_refreshed else ())
        is_mixed = self.config.evaluate == "mixed"
        sent = [
            p for p in owing if is_mixed or p in refreshed or p not in self.loop.trained
        ]
        downloads = self.messenger.pack(
            {
                pid: (self.download if pid in refreshed else self.scoring_download)(
                    server_round + 1, pid
                )
                for pid in sent
            }
        )
        contents, settings = {}, {}
        known: dict[tuple[Any, ...], ConfigRecord] = {}
        for pid in clients:
            modes = ["local"] if pid in owing else []
            content = downloads.get(pid, RecordDict())
            if shared is not None:
                modes.append("global")
                content["global"] = shared
            if modes:
                contents[pid] = content
                self.loop.log.expect([pid], modes)
                key = (*modes, pid in refreshed)
                if key not in known:
                    known[key] = ConfigRecord(
                        {
                            "server-round": server_round,
                            "modes": modes,
                            "refresh": pid in refreshed,
                        }
                    )
                    if is_mixed:
                        known[key]["mixed"] = True
                settings[pid] = known[key]
        return self.messenger.address(
            contents, MessageType.EVALUATE, settings, server_round
        )

    def read_uploads(
        self, replies: Mapping[int, Message], up: type[Payload] | None = None
    ) -> dict[int, Upload]:
        """Check every reply; a malformed one is dropped, counted and named.

        Parameters
        ----------
        replies : mapping of int to Message
            Replies by partition-id.
        up : type of Payload, optional
            Payload to read instead of the method's own ``up``.
        """
        known = self._read_alike(replies, up or self.up)

        def read(pid: int, content: RecordDict) -> Payload:
            if pid in known:
                return known[pid]
            number, spec = self.loop.log.number, self.upload_spec(pid)
            if self.secure is not None and up is None:
                return self.secure.unpack(number, content, spec)
            upload = read_payload(up or self.up, content, spec, beside=[METRICS])
            if self.config.upload_clip:
                check_clipped(
                    upload,
                    self.download(number, pid),
                    clip=self.config.upload_clip,
                    noise=self.config.upload_noise,
                )
            return upload

        return self.messenger.read_uploads(replies, read)

    def _read_alike(
        self, replies: Mapping[int, Message], up: type[Payload]
    ) -> dict[int, Payload]:
        """Read the replies of many clients that are exactly as expected at once."""
        if len(replies) < MANY or self.secure is not None or self.config.upload_clip:
            return {}
        try:
            specs = {pid: self.upload_spec(pid) for pid in replies}
            spec = next(iter(specs.values()))
            names = {*up.records, METRICS}
            contents = {
                pid: reply.content
                for pid, reply in replies.items()
                if specs[pid] is spec and reply.content.keys() == names
            }
            return dict(up.read_alike(contents, spec))
        except Exception as error:  # each reply is read alone and causes its own error
            log.debug("The replies are read one by one: %s", error)
            return {}

    def available(self, server_round: int) -> list[int]:
        """Leave out clients that were silent, but keep enough for the round.

        After its n-th missed round in a row a client is not asked for 2ⁿ⁻¹ rounds (at most
        32). At least ``min-replies`` clients stay available, and as many as secure or
        robust aggregation needs.
        """
        able, silent = self.federation.trainable, self.loop.silent
        if not silent:
            return able
        is_secure = self.config.secure_aggregation
        least = max(self.least_replies, MIN_SECURE_CLIENTS if is_secure else 1)
        return without_paused(able, silent, server_round, least)

    # ------------------------------------------------------- Flower's interface
    def summary(self) -> None:
        """Log the method, the clients and the upload protection."""
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

        ``arrays``, ``config`` and ``grid`` belong to Flower's interface and are not read.
        """
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

        Returns
        -------
        tuple of None and MetricRecord or None
            Number of usable replies and training loss; ``None`` with fewer than
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
        """Aggregate; if that fails, name the uploads to blame and leave them out.

        Returns the uploads that were aggregated.
        """
        try:
            self._keep_finite(lambda: self.aggregate(server_round, uploads))
        except PayloadError as error:
            blamed = self.to_blame(uploads)
            rest = {pid: u for pid, u in uploads.items() if pid not in blamed}
            if not blamed or self.num_replies(rest) < self.config.min_replies:
                raise
            for pid, reason in blamed.items():
                self.messenger.drop(pid, f"{reason}, and with it: {error}")
                self.loop.log.forget_reply(pid)
                self.loop.trained.pop(pid, None)
            self._keep_finite(lambda: self.aggregate(server_round, rest))
            return rest
        return uploads

    def _keep_finite(self, aggregate: Callable[[], None]) -> None:
        """Aggregate; restore the former state if that fails or gives non-finite numbers.

        Raises
        ------
        PayloadError
            If the aggregation raises an exception, or the result is not finite.
        """
        numbers = dict(self.loop.log.numbers)
        mine = {k: v for k, v in vars(self).items() if k not in self._plain}
        before = {k: v.copy() if hasattr(v, "copy") else v for k, v in mine.items()}
        parts = [
            v
            for x in mine.values()
            for v in (x.values() if isinstance(x, dict) else [x])
        ]
        states = [  # networks and optimizers change in place
            (part, deepcopy(part.state_dict()))
            for part in parts
            if isinstance(part, nn.Module | Optimizer)
        ]
        try:
            aggregate()
            for name in vars(self).keys() - self._plain:
                if not is_finite(getattr(self, name)):
                    raise PayloadError(f'the aggregate ("{name}") is not finite')
        except Exception as error:
            for name in vars(self).keys() - self._plain - before.keys():
                delattr(self, name)
            vars(self).update(before)
            for part, state in states:
                part.load_state_dict(state)
            self.loop.log.numbers = numbers
            if isinstance(error, RunError):
                raise
            if not isinstance(error, PayloadError):
                log.exception("The aggregation raised:")
            raise PayloadError(
                f"the aggregation failed, the previous state is kept: {error!r}"
                if not isinstance(error, PayloadError)
                else f"{error}; the previous state is kept"
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
        """Store the scores of an evaluation exchange.

        Returns
        -------
        MetricRecord or None
            Pooled accuracy by ``<mode>/<column>``, or AUROC where ``config.main_score``
            says so; ``None`` without any score.
        """
        self.messenger.read_evaluations(self.messenger.by_sender(replies))
        return self._pooled_scores()

    def _pooled_scores(self) -> MetricRecord | None:
        """Return the main score of the round so far by ``<mode>/<column>``, if any."""
        main = self.config.main_score
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
        """Run all rounds.

        Parameters
        ----------
        grid : Grid
            Flower's grid, or the local engine's.
        num_rounds : int, optional
            Rounds, instead of the setting ``rounds``.
        initial_arrays, timeout, train_config, evaluate_config, evaluate_fn
            Part of Flower's interface, refused: the settings replace them.
        should_stop : callable, optional
            Called after every round with its number and the result so far; if it returns
            True, the run ends as after its last round. Flower's own strategies have this
            argument since version 1.43.

        Returns
        -------
        Result
            Flower's result: last model and metrics by round.

        Raises
        ------
        RunError
            If the clients do not fit together; if three rounds in a row, or all rounds,
            had too few usable replies; if no round was scored; if a checkpoint cannot be
            written, or the run cannot resume from one.
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
        state = self.global_state()
        if state is not None:
            result.arrays = write_tensors(state)
        return result

    def _connect(self, grid: Grid) -> None:
        """Find the clients and prepare the method."""
        self.messenger.grid = grid
        before = None
        if self.checkpoints is not None:
            self.checkpoints.restore_states()  # before clients add new keys to them
            if self.checkpoints.resumed:
                before = clients_to_await(self.checkpoints.resumed, self.config)
        self.federation = discover(grid, self.config, before)
        self._late_joiners.refused |= self.federation.turned_away
        if self.config.secure_aggregation:
            self.secure = SecureExchanges(self.messenger, type(self), self.up)
            self.messenger.secure = self.secure
        self.summary()
        if self.recorder is not None and not self.is_resumed:
            lines = client_lines(self.federation.clients.values())
            self.recorder.describe_clients(lines)
        self.prepare()

    # ----------------------------------------------------------------- one round
    def run_round(self, server_round: int, *, is_last: bool) -> MetricRecord | None:
        """Train, aggregate, evaluate, record.

        Returns
        -------
        MetricRecord or None
            ``None`` if the round failed.

        Raises
        ------
        RunError
            After three failed rounds in a row.
        """
        loop = self.loop
        nodes = set(self.messenger.grid.get_node_ids())
        late = self._late_joiners
        if late.refused or late.waiting or nodes != self.federation.partitions.keys():
            late.poll(self.messenger, nodes, server_round)
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
            self.evaluate_round(server_round)
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

    def evaluate_round(self, server_round: int) -> None:
        """Collect the scores that the training replies did not carry."""
        clock = time.perf_counter()
        self.evaluate(server_round, self.configure_evaluate(server_round))
        self.loop.log.seconds["evaluate"] = time.perf_counter() - clock

    def evaluate(self, server_round: int, messages: Sequence[Message]) -> None:
        """Send evaluation messages, if there are any, and store the scores."""
        if messages:
            replies = self.messenger.evaluate(messages)
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

    def record_round(self) -> None:
        """Write the round and its clients to the run folder; log the failures."""
        for reason, ids in self.loop.log.lost().items():
            log.warning(
                "Round %s: client%s %s: %s",
                self.loop.log.number,
                "s" * (len(ids) > 1),
                ", ".join(map(str, sorted(ids))),
                reason,
            )
        if self.recorder is not None:
            self.recorder.append_clients(self.loop.log.client_rows())
            row = self.loop.log.row()
            if self.config.main_score != "accuracy":
                row["metric"] = self.config.main_score
            self.recorder.append_round(row)

    # ------------------------------------------------------------ the best model
    def _keep_best(self, server_round: int) -> None:
        """Copy the aggregated model if no round before had a better validation score.

        As in the summary, rounds that scored fewer validation nodes do not compete.
        """
        score = self.loop.log.validation(self.config.main_score)
        loop, state = self.loop, self.global_state()
        if state is None or score is None:
            return
        if loop.best_score is None or score >= loop.best_score:
            loop.best_score, loop.best_round = score, server_round
            loop.best_state = {name: tensor.clone() for name, tensor in state.items()}

    def best_state(self) -> Mapping[str, Tensor] | None:
        """Return the aggregated model of the best validation round, else the last."""
        if self.loop.best_score is None:
            return self.global_state()
        return self.loop.best_state

    def model_card(self) -> ModelCard:
        """Describe the model that :meth:`best_state` returns."""
        is_last = self.loop.best_score is None
        number = self.loop.last_success if is_last else self.loop.best_round
        return describe_model(self.config, self.federation, number)


def is_finite(value: object) -> bool:
    """Return whether all numbers in tensors, containers and dataclasses are finite.

    Networks and optimizers count as what they would save.
    """
    if isinstance(value, nn.Module | Optimizer):
        return is_finite(value.state_dict())
    if isinstance(value, Tensor):
        # cheap test first: a non-finite sum needs a non-finite entry, or an overflow
        is_real = value.is_floating_point()
        is_sum_finite = not is_real or math.isfinite(float(value.sum()))
        return is_sum_finite or bool(value.isfinite().all())
    if isinstance(value, Mapping):
        return all(map(is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_finite, value))
    if is_dataclass(value):
        return all(is_finite(getattr(value, f.name)) for f in fields(value))
    return True


def _largest_by_far(uploads: Mapping[int, Upload]) -> dict[int, str]:
    """Name the client whose largest number is over ``FAR`` times any other's."""
    largest = {
        pid: max(
            (float(t.abs().max()) for t in numbers_of(u.payload).values() if t.numel()),
            default=0.0,
        )
        for pid, u in uploads.items()
    }
    suspect, *others = sorted(largest, key=lambda pid: -largest[pid])
    rest = largest[others[0]] if others else math.inf
    is_far = largest[suspect] > FAR * rest
    return {suspect: "its upload holds by far the largest number"} if is_far else {}


def is_checkpoint_due(config: RunConfig, server_round: int) -> bool:
    """Return whether a checkpoint is written after a round."""
    if config.keep_checkpoint and server_round == config.rounds:
        return True
    every = config.checkpoint_every
    return every > 0 and server_round % every == 0
