"""What a method's server half overrides, with defaults, and what it calls."""

import json
import logging
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_fgl.core.calibration import Calibration
from flower_fgl.core.checks.rules import least_uploads, num_sampled
from flower_fgl.core.config import RunConfig
from flower_fgl.core.seeds import SERVER, numpy_generator
from flower_fgl.core.settings import MIN_SECURE_CLIENTS
from flower_fgl.methods import METHODS
from flower_fgl.protocols.base import (
    METRICS,
    Empty,
    Payload,
    read_payload,
    write_tensors,
)
from flower_fgl.protocols.differential_privacy import check_clipped, numbers_of
from flower_fgl.runs.checkpoints import Checkpoints, Snapshot
from flower_fgl.runs.writer import RunWriter
from flower_fgl.strategies.federation import Federation
from flower_fgl.strategies.rounds.loop_state import LoopState, without_paused
from flower_fgl.strategies.rounds.messenger import Messenger, Upload
from flower_fgl.strategies.rounds.round_log import RoundLog
from flower_fgl.strategies.rounds.secure_aggregation import SecureExchanges

__all__ = ["ServerHooks"]

log = logging.getLogger(__name__)
MANY = 8
"""Replies from which reading them together saves time."""
FAR = 1000.0
"""Ratio of the largest numbers of two uploads from which one is to blame for a failure."""


class ServerHooks(Strategy):
    """The hooks of a server half, and the exchanges that these may send.

    A method sets ``down`` and ``up``, overrides :meth:`prepare`, :meth:`download`,
    :meth:`upload_spec` and :meth:`aggregate`, and others where it differs. Extra exchanges
    send with :meth:`train_messages`, ``self.messenger.exchange`` and
    ``self.messenger.ask``, inside ``with self.phase(name, …)`` where they happen outside
    a round.

    A checkpoint stores ``loop``. Below ``least_replies`` usable replies a round fails:
    ``min-replies``, or more if the ``aggregation`` needs more. ``secure`` is ``None``
    without secure aggregation.
    """

    down: ClassVar[type[Payload]]
    up: ClassVar[type[Payload]]
    scores_uploads: ClassVar[bool] = True
    """Whether the reply that carries an upload also carries the client's scores."""

    kept: ClassVar[tuple[str, ...]] = ()
    """Attributes that :meth:`aggregate` changes and a checkpoint stores, besides those of
    the base classes: nested mappings, lists and payloads of tensors, numbers and texts; and
    networks, with the optimizer that ``optimizers`` has under the attribute's name."""
    optimizers: Mapping[str, Optimizer] = MappingProxyType({})
    calibration: Calibration | None = None
    """Calibration of the aggregated model of :meth:`best_state`, once it is known."""

    def __init__(
        self,
        config: RunConfig,
        recorder: RunWriter | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.config = config
        self.row = METHODS[config.method]
        self.recorder = recorder
        self.checkpoints = checkpoints
        self.loop = LoopState(RoundLog(0))
        self.messenger = Messenger(config, self.loop, recorder)
        self.secure: SecureExchanges | None = None
        self.least_replies = max(config.min_replies, least_uploads(config))

    @property
    def main_score(self) -> str:
        """Score by which rounds are compared: of several numbers the normalised RMSE."""
        is_several = len(self.messenger.spreads) > 1
        return "nrmse" if is_several else self.config.main_score

    def prepare(self) -> None:
        """Build the server's state; ``self.federation`` is known.

        Runs again when a run resumes, before :meth:`load_server_state`. Exchanges that
        clients need only once are then skipped (``self.is_resumed``).
        """

    @abstractmethod
    def download(self, server_round: int, partition_id: int) -> Payload:
        """Return the payload that a client receives before it trains."""

    def scoring_download(self, server_round: int, partition_id: int) -> Payload:
        """Return the payload from which an untrained client is evaluated."""
        return self.download(server_round, partition_id)

    def upload_spec(self, partition_id: int) -> Any:
        """Return the specification that :meth:`Payload.from_record` checks against."""
        return None

    @abstractmethod
    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Aggregate the uploads of a round, keyed by partition-id, ascending."""

    def num_replies(self, uploads: Mapping[int, Upload]) -> int:
        """Count the uploads that ``min-replies`` compares: by default one a client."""
        return len(uploads)

    def complete_round(self, server_round: int) -> bool:
        """Run further exchanges of a round, after the aggregation and before the scores.

        Returns whether the round counts; by default it does.
        """
        return True

    def aggregate_sums(
        self,
        server_round: int,
        sums: Mapping[str, Tensor],
        weights: Mapping[int, float],
    ) -> None:
        """Aggregate the sums of secure aggregation, instead of :meth:`aggregate`.

        A method whose ``up`` is an :class:`AdditivePayload` overrides it. ``sums`` are
        those of the clients' :meth:`AdditivePayload.summands`, float64, and ``weights``
        the clients' (``weight-by``) in them, by partition-id. A PayloadError says that
        the sums are impossible; the round fails then.
        """
        raise NotImplementedError(f"{type(self).__name__} needs more than sums.")

    def global_state(self) -> Mapping[str, Tensor] | None:
        """Return the aggregated model, ``None`` if the method has none."""
        return None

    def best_state(self) -> Mapping[str, Tensor] | None:
        """Return the aggregated model of the best validation round, else the last."""
        if self.loop.best_score is None:
            return self.global_state()
        return self.loop.best_state

    def finish(self) -> None:
        """Run after the last round, e.g. one more exchange."""

    def server_state(self) -> Snapshot:
        """Return all that :meth:`aggregate` changes, for checkpoints and failed rounds.

        By default these are the attributes named in ``kept``. A tensor that changes in
        place, such as a network's weight, is returned as a copy.
        """
        found = {name: getattr(self, name) for name in self._all_kept()}
        for name, value in found.items():
            if isinstance(value, nn.Module):
                found[name] = _training_state(value, self.optimizers[name])
        return Snapshot.of(found)

    def load_server_state(self, state: Snapshot) -> None:
        """Restore what :meth:`server_state` returned, exactly.

        Called after :meth:`prepare`, and after an aggregation that failed at any place.
        KeyError, ValueError and RuntimeError say that the state does not fit.
        """
        found, kept = state.tree(), self._all_kept()
        if found.keys() != set(kept):
            raise ValueError(f"a state of {sorted(found)}, expected {sorted(kept)}")
        for name, value in found.items():
            before = getattr(self, name)
            if isinstance(before, nn.Module):
                _load_training(before, self.optimizers[name], value)
            else:
                setattr(self, name, _alike(before, value))
        self.restored()

    @classmethod
    def _all_kept(cls) -> list[str]:
        """Return the attributes that the classes of the method keep."""
        named = [name for one in cls.__mro__ for name in vars(one).get("kept", ())]
        return [*dict.fromkeys(named)]

    def restored(self) -> None:
        """Compute what follows from the attributes in ``kept``, once they are restored."""

    def sample(self, server_round: int) -> list[int]:
        """Sample the clients that train: all available, unless the settings say fewer."""
        able = self.available(server_round)
        if self.config.participation == 1 and not self.config.participants:
            return able
        count = max(1, num_sampled(self.config, len(self.federation.trainable)))
        if count >= len(able):
            return able
        generator = numpy_generator(self.config.seed, server_round, SERVER, "sample")
        return sorted(int(p) for p in generator.choice(able, count, replace=False))

    def available(self, server_round: int) -> list[int]:
        """Return the trainable clients that a round may sample, by partition-id.

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

    def to_blame(self, uploads: Mapping[int, Upload]) -> dict[int, str]:
        """Return the clients without which a failed aggregation is tried again.

        Each with the reason that the log gives. By default the client whose largest
        number is over ``FAR`` times any other's, if there is one.
        """
        largest = {}
        for pid, upload in uploads.items():
            numbers = numbers_of(upload.payload).values()
            sizes = [float(t.abs().max()) for t in numbers if t.numel()]
            largest[pid] = max(sizes, default=0.0)
        suspect, *others = sorted(largest, key=lambda pid: -largest[pid])
        rest = largest[others[0]] if others else math.inf
        is_far = largest[suspect] > FAR * rest
        return {suspect: "its upload holds by far the largest number"} if is_far else {}

    @property
    def is_resumed(self) -> bool:
        """Whether the run resumes from a checkpoint."""
        return self.checkpoints is not None and self.checkpoints.resumed is not None

    @property
    def federation(self) -> Federation:
        """The clients of the run."""
        return self.loop.federation

    @federation.setter
    def federation(self, federation: Federation) -> None:
        self.loop.federation = federation

    def log(self, **numbers: float) -> None:
        """Add numbers to the line of the current round, e.g. ``self.log(distance=d)``."""
        self.loop.log.numbers |= numbers

    @contextmanager
    def phase(
        self,
        name: str,
        server_round: int,
        *,
        is_scored: bool = False,
        min_replies: int = 1,
    ) -> Iterator[RoundLog]:
        """Log the exchanges inside as a phase of its own, with a line in ``rounds.jsonl``.

        The line has the ``name``, and the number ``server_round``: 0 before round 1,
        ``rounds`` + 1 after the last. It says ``failed`` below ``min_replies`` usable
        replies. ``is_scored`` says that the clients' models are evaluated.
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
        """Address each client's download to it, for an action of the client half.

        By default that is its training, and the replies carry scores in rounds that
        evaluate the clients' own models. ``brings_upload`` says that they carry numbers
        that ``upload-noise`` protects.
        """
        if is_scored is None:
            is_scored = self.loop.log.is_scored
            is_scored &= self.config.evaluate in ("local", "both")
            is_scored &= self.config.eval_policy != "refresh-all"
        settings = ConfigRecord({"server-round": server_round, "evaluate": is_scored})
        downloads = self.messenger.pack(
            {pid: self.download(server_round, pid) for pid in partition_ids}
        )
        if self.secure is not None and not action:
            for pid, content in downloads.items():
                content.update(self.secure.peers[pid].to_record())
        kind = MessageType.TRAIN + (f".{action}" if action else "")
        messages = self.messenger.address(downloads, kind, settings, server_round)
        self.loop.log.expect(partition_ids, ["local"] if is_scored else [])
        if brings_upload:
            self.messenger.note_release(server_round, downloads)
        return messages

    def train_again(
        self, server_round: int, partition_ids: Sequence[int], action: str
    ) -> bool:
        """Let clients train what they score in a second exchange of the round.

        Returns whether at least ``min-replies`` did: :meth:`complete_round` of a method
        whose first exchange collects uploads without scores.
        """
        self.loop.log.forget(self.loop.trained)
        self.loop.trained.clear()
        messages = self.train_messages(
            server_round, partition_ids, action=action, brings_upload=False
        )
        trained = self.read_uploads(self.messenger.exchange(messages), Empty)
        return len(trained) >= self.config.min_replies

    def evaluate_messages(
        self, server_round: int, *, is_local: bool, is_global: bool
    ) -> list[Message]:
        """Ask for the scores of the clients' own models, the aggregated one, or both.

        With ``is_local`` clients that have not sent scores in this round evaluate their own
        model. With ``eval-policy = "refresh"`` they evaluate a copy trained from the next
        download, with ``"refresh-all"`` all clients do. A client that never trained
        receives that download too. With ``evaluate = "mixed"`` all clients evaluate that
        download as it is. A calibrated model is that of :meth:`best_state`.

        Not asked are, in the few-shot setting, clients without test nodes; silent clients,
        until their pause is over; and clients that answered an earlier evaluation without
        any score, because their node config demands it.
        """
        shared = None
        if is_global:
            is_plain = self.calibration is None
            state = self.global_state() if is_plain else self.best_state()
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
        is_mixed = is_local and self.config.evaluate == "mixed"
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

        @cache  # clients of the same settings share one record
        def settings_for(*modes: str, refresh: bool) -> ConfigRecord:
            record = ConfigRecord({"server-round": server_round})
            record["modes"], record["refresh"] = list(modes), refresh
            if is_mixed:
                record["mixed"] = True
            if self.calibration is not None:
                record["calibration"] = json.dumps(self.calibration.as_dict())
            return record

        contents, settings = {}, {}
        for pid in clients:
            modes = ["local"] if pid in owing else []
            content = downloads.get(pid, RecordDict())
            if shared is not None:
                modes.append("global")
                content["global"] = shared
            if modes:
                contents[pid] = content
                self.loop.log.expect([pid], modes)
                settings[pid] = settings_for(*modes, refresh=pid in refreshed)
        return self.messenger.address(
            contents, MessageType.EVALUATE, settings, server_round
        )

    def read_uploads(
        self, replies: Mapping[int, Message], up: type[Payload] | None = None
    ) -> dict[int, Upload]:
        """Check every reply; a malformed one is dropped, counted and named.

        ``up`` is the payload to read instead of the method's own.
        """
        known = self._read_alike(replies, up or self.up)

        def read(pid: int, content: RecordDict) -> Payload:
            if pid in known:
                return known[pid]
            number, spec = self.loop.log.number, self.upload_spec(pid)
            if self.secure is not None and up is None:
                return self.secure.unpack(number, content, spec)
            upload = read_payload(up or self.up, content, spec, beside=[METRICS])
            self.check_upload(upload, pid)
            return upload

        return self.messenger.read_uploads(replies, read)

    def check_upload(self, upload: Payload, partition_id: int) -> None:
        """Refuse an upload that exceeds ``upload-clip``, if that is set, and its noise.

        It was clipped around the download of client ``partition_id``.
        """
        config = self.config
        if config.upload_clip:
            start = self.download(self.loop.log.number, partition_id)
            check_clipped(
                upload, start, clip=config.upload_clip, noise=config.upload_noise
            )

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
                if (specs[pid] is spec or specs[pid] == spec)
                and reply.content.keys() == names
            }
            return dict(up.read_alike(contents, spec))
        except Exception as error:  # each reply is read alone and causes its own error
            log.debug("The replies are read one by one: %s", error)
            return {}

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
            if self.main_score != "accuracy":
                row["metric"] = self.main_score
            self.recorder.append_round(row)


def _training_state(
    network: nn.Module, optimizer: Optimizer
) -> dict[str, dict[str, Tensor]]:
    """Copy weights, and what an optimizer keeps, named ``<moment>/<parameter>``."""
    moments = {
        f"{moment}/{name}": tensor.clone()
        for name, parameter in network.named_parameters()
        for moment, tensor in optimizer.state.get(parameter, {}).items()
    }
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    return {"weights": weights, "moments": moments}


def _load_training(
    network: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Restore what :func:`_training_state` returned."""
    network.load_state_dict(state["weights"])
    named = dict(network.named_parameters())
    optimizer.state.clear()
    for path, tensor in state["moments"].items():
        moment, _, name = path.partition("/")
        optimizer.state[named[name]][moment] = tensor.clone()


def _alike(before: Any, value: Any) -> Any:
    """Return a restored value, as a dataclass where the attribute held one."""
    if not is_dataclass(before) or isinstance(before, type):
        return value
    return type(before)(**{n: _alike(getattr(before, n), v) for n, v in value.items()})
