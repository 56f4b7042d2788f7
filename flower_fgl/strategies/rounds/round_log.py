"""The log of one round: scores, seconds, bytes and failures."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, MetricRecord, RecordDict

from flower_fgl.core.errors import FglError, PayloadError, one_line
from flower_fgl.core.metrics import AnyScores, Scores, pool
from flower_fgl.core.score_names import DIAGRAM
from flower_fgl.protocols.base import (
    MAX_NAME,
    NUMBERS,
    ReplyMetrics,
    read_metrics,
    record_bytes,
)

__all__ = ["Exchange", "Expected", "Failure", "RoundLog"]

log = logging.getLogger(__name__)

ModeScores = dict[str, dict[str, Any]]
MAX_RECORDS = 16
"""Names of received records in a round's counts of bytes; further ones are ``other``."""
OTHER = "other"


@dataclass(frozen=True)
class Failure:
    """A missing, failed or malformed reply; ``is_silent`` if the client sent nothing.

    The reason is shortened to one line, since a client may have written it.
    """

    partition_id: int
    reason: str
    is_silent: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", one_line(self.reason))

    @classmethod
    def of(cls, partition_id: int, error: Exception) -> Failure:
        """Describe the exception that reading a client's reply raised."""
        text = str(error) if isinstance(error, FglError) else repr(error)
        return cls(partition_id, text)


@dataclass(frozen=True)
class Exchange:
    """Replies with content of one exchange, by partition-id, ascending, and the failures.

    ``seconds_wait`` counts from the last message pushed to the last reply.
    """

    replies: dict[int, Message]
    failures: list[Failure] = field(default_factory=list)
    seconds_send: float = 0.0
    seconds_wait: float = 0.0


@dataclass(frozen=True)
class Expected:
    """What a reply's metrics are compared with: the client's weight, and its node sets.

    ``columns`` has the number of nodes that the client described for each set that it
    scores, ``None`` if descriptions do not contain the number. If numbers are predicted,
    ``std`` has the spread of each target, NaN if the server does not know it.
    """

    num_examples: float
    columns: Mapping[str, int | None]
    std: Sequence[float] = ()


class RoundLog:
    """Collect a round's numbers and format them as lines of the run folder.

    ``phase`` is ``"train"``, or the name of a method's extra phase.
    """

    def __init__(
        self, number: int, *, is_scored: bool = True, phase: str = "train"
    ) -> None:
        self.number = number
        self.is_scored = is_scored
        self.phase = phase
        self.failures: list[Failure] = []
        self.reason = ""
        self.seconds: dict[str, float] = {}
        self.numbers: dict[str, float] = {}  # further numbers logged by the method
        self.tables: dict[str, Any] = {}  # JSON values logged by the method
        self._started = time.perf_counter()
        self._clients: dict[int, dict[str, Any]] = {}
        self._scores: dict[int, dict[str, dict[str, AnyScores]]] = {}
        self._modes: dict[int, frozenset[str]] = {}
        self._bytes: dict[str, Counter[str]] = {"up": Counter(), "down": Counter()}
        self._client_bytes: dict[int, dict[str, int]] = defaultdict(
            lambda: {"up": 0, "down": 0}
        )
        self._worker_seconds: dict[int, float] = defaultdict(float)  # of each process
        self._pooled: dict[str, ModeScores] | None = None
        self._is_ok = True
        self._min_replies = 0
        self._num_sampled = 0

    def add_download(self, messages: Mapping[int, Message]) -> None:
        """Count the bytes of messages to the clients."""
        counted: dict[int, int] = {}
        for pid, message in messages.items():
            for name, record in message.content.items():
                if id(record) not in counted:  # one record may go to all clients
                    counted[id(record)] = record.count_bytes()
                size = counted[id(record)]
                self._bytes["down"][name] += size
                self._client_bytes[pid]["down"] += size

    def add_exchange(self, exchange: Exchange) -> None:
        """Store the seconds of a training exchange."""
        self._num_sampled = len(exchange.replies) + len(exchange.failures)
        seconds = {"send": exchange.seconds_send, "wait": exchange.seconds_wait}
        for name, spent in {**seconds, "clients": 0.0}.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def forget(self, pids: Iterable[int]) -> None:
        """Discard the replies of clients, but keep their bytes, seconds and scores."""
        for pid in pids:
            self._clients.pop(pid, None)

    def expect(self, pids: Iterable[int], modes: Iterable[str]) -> None:
        """Store which models clients were asked to evaluate; other scores are refused."""
        self._modes |= dict.fromkeys(pids, frozenset(modes))

    def add_reply(self, pid: int, metrics: MetricRecord, client: Expected) -> None:
        """Store loss, scores and seconds of one training reply, if all are as expected."""
        found = read_metrics(metrics)
        self._worker_seconds[found.worker] += sum(found.seconds.values())
        scores = self._check_scores(pid, found, client)
        self._scores.setdefault(pid, {}).update(scores)
        self._pooled = None
        self._clients[pid] = {
            "loss": found.loss,
            "num_examples": client.num_examples,
            "seconds": found.seconds,
        }
        if found.terms:
            self._clients[pid]["terms"] = dict(sorted(found.terms.items()))

    def add_evaluation(self, pid: int, metrics: MetricRecord, client: Expected) -> bool:
        """Store the scores of an evaluation reply, if its node config withholds not all."""
        scores = self._check_scores(pid, read_metrics(metrics), client)
        if scores:
            self._scores.setdefault(pid, {}).update(scores)
            self._pooled = None
        return bool(scores)

    def _check_scores(
        self, pid: int, found: ReplyMetrics, client: Expected
    ) -> dict[str, dict[str, AnyScores]]:
        """Compare scores with what was asked for and with the client's description."""
        asked = self._modes.get(pid)
        if asked is not None and not asked.issuperset(found.scores):
            raise PayloadError(
                f"scores of {sorted(found.scores)}, asked for {sorted(asked) or 'none'}"
            )
        out: dict[str, dict[str, AnyScores]] = {}
        for mode, columns in sorted(found.scores.items()):  # messages have no order
            mine = out.setdefault(mode, {})
            for column, values in sorted(columns.items()):
                where = f"{mode}/{column}"
                scores = _read_scores(where, values, client.std)
                number = scores.num_nodes
                if column not in client.columns:
                    raise PayloadError(f'"{where}" was not asked for')
                if client.columns[column] not in (None, number):
                    raise PayloadError(
                        f'"{where}/num_nodes" is {number}, the client described '
                        f"{client.columns[column]}"
                    )
                mine[column] = scores
        return out

    def count_up(self, pid: int, content: RecordDict) -> None:
        """Count the bytes of a reply, valid or not."""
        counts = self._bytes["up"]
        for name, size in record_bytes(content).items():
            is_new = name not in counts
            is_odd = len(name) > MAX_NAME or not name.isprintable()
            if is_new and (is_odd or len(counts) >= MAX_RECORDS):
                name = OTHER
            counts[name] += size
            self._client_bytes[pid]["up"] += size

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Turn a payload error (e.g. of secure aggregation) into a failed round."""
        try:
            yield
        except PayloadError as error:
            self.reason = one_line(error)
            log.warning("Round %s: %s", self.number, self.reason)

    def has_scores(self, pid: int) -> bool:
        """Return whether the log has scores of a client's personalized model."""
        return "local" in self._scores.get(pid, {})

    def close(self, *, is_ok: bool, min_replies: int) -> None:
        """Stop the clock and store whether the round succeeded."""
        self._is_ok = is_ok
        self._min_replies = min_replies
        if "wait" in self.seconds:
            busiest = max(self._worker_seconds.values(), default=0.0)
            self.seconds["clients"] = busiest
            self.seconds["wait"] = max(0.0, self.seconds["wait"] - busiest)
        self.seconds["total"] = time.perf_counter() - self._started

    @property
    def num_replies(self) -> int:
        """Number of usable replies."""
        return len(self._clients)

    @property
    def loss(self) -> float:
        """Mean loss of the clients that sent one, by aggregation weights; else NaN."""
        pairs = [
            (client["loss"], client["num_examples"])
            for client in self._clients.values()
            if not math.isnan(client["loss"])
        ]
        total = sum(weight for _, weight in pairs)
        return sum(x * w for x, w in pairs) / total if total else math.nan

    def pooled(self) -> dict[str, ModeScores]:
        """Pool the scores over clients, ``{mode: {column: {metric: value}}}``."""
        if self._pooled is not None:
            return self._pooled
        grouped: dict[str, dict[str, list[AnyScores]]] = {}
        for pid in sorted(self._scores):
            for mode, columns in self._scores[pid].items():
                for column, scores in columns.items():
                    grouped.setdefault(mode, {}).setdefault(column, []).append(scores)
        self._pooled = {
            mode: {column: pool(scores) for column, scores in columns.items()}
            for mode, columns in grouped.items()
        }
        return self._pooled

    def validation(self, metric: str = "accuracy") -> tuple[int, float] | None:
        """Return number of nodes and value of the pooled validation score, if there is one.

        The best round is selected by them. They are the scores of the aggregated model if
        it was scored, else of the personalized models.
        """
        pooled = self.pooled()
        columns = pooled.get("global") or pooled.get("local") or {}
        column = columns.get("val", {})
        if not column.get("num_nodes") or math.isnan(column.get(metric, math.nan)):
            return None
        return int(column["num_nodes"]), float(column[metric])

    def lost(self) -> dict[str, set[int]]:
        """Return the clients that failed in training or evaluation, by reason."""
        clients: dict[str, set[int]] = {}
        for failure in self.failures:
            clients.setdefault(failure.reason, set()).add(failure.partition_id)
        return clients

    def why_failed(self) -> str:
        """Describe the failures for an error message."""
        text = "; ".join(
            f"{reason} ({len(ids)} client{'s' * (len(ids) > 1)})"
            for reason, ids in self.lost().items()
        )
        return (
            f"Round {self.number}: {len(self._clients)} usable replies of "
            f"{self._num_sampled} sampled clients, min-replies is {self._min_replies}. "
            f"{' '.join(part for part in (self.reason, text) if part)}".rstrip()
        )

    def row(self) -> dict[str, Any]:
        """Return the line of ``rounds.jsonl``."""
        row: dict[str, Any] = {
            "round": self.number,
            "phase": self.phase,
            "status": "ok" if self._is_ok else "failed",
            "replies": len(self._clients),
            "failures": [
                {"partition_id": f.partition_id, "reason": f.reason}
                for f in self.failures
            ],
            "loss": self.loss,
            "seconds": dict(self.seconds),
            "bytes": {way: dict(counts) for way, counts in self._bytes.items()},
        }
        if self.numbers:
            row["numbers"] = dict(self.numbers)
        row |= self.tables
        if self.reason:
            row["reason"] = self.reason
        pooled = self.pooled()
        if pooled:
            row["metrics"] = pooled
        return row

    def client_rows(self) -> list[dict[str, Any]]:
        """Return the lines of ``clients.jsonl``, by partition-id."""
        rows = []
        for pid in sorted(self._clients.keys() | self._scores.keys()):
            row: dict[str, Any] = {"round": self.number, "partition_id": pid}
            row |= self._clients.get(pid, {})
            if pid in self._scores:
                row["metrics"] = {
                    mode: {column: s.as_dict() for column, s in columns.items()}
                    for mode, columns in self._scores[pid].items()
                }
                row |= _diagrams(self._scores[pid])
            row["bytes"] = dict(self._client_bytes[pid])
            rows.append(row)
        return rows


def _diagrams(scores: Mapping[str, Mapping[str, AnyScores]]) -> dict[str, Any]:
    """Return the reliability diagrams (3, B) of the test items of each mode."""
    found = {}
    for mode, columns in scores.items():
        test = columns.get("test")
        if isinstance(test, Scores) and test.reliability:
            sums, bins = [*test.reliability], DIAGRAM // 6
            rows = [sums[k : k + bins] for k in range(0, DIAGRAM, bins)]
            found[mode] = {"before": rows[:3], "after": rows[3:]}
    return {"reliability": found} if found else {}


def _read_scores(
    where: str, values: Mapping[str, Any], std: Sequence[float]
) -> AnyScores:
    """Return the scores of a node set; PayloadError if they are of another kind."""
    if (NUMBERS in values) != bool(std):
        kinds = ("classes", "numbers") if std else ("numbers", "classes")
        raise PayloadError(
            f'"{where}" has scores of {kinds[0]}, expected those of {kinds[1]}'
        )
    if std:
        from flower_fgl.protocols.number_scores import read_number_scores

        return read_number_scores(where, values, std)
    bins = tuple(values.get("reliability", ()))
    number = int(values["num_nodes"])
    return Scores(**{**values, "num_nodes": number, "reliability": bins})
