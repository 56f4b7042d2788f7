"""The server's state as a checkpoint holds it, and the way back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flower_fgl.core.errors import RunError
from flower_fgl.protocols.base import CONFIG, INFO, RESUME
from flower_fgl.protocols.describe import Description
from flower_fgl.runs.checkpoints import Checkpoint, Snapshot
from flower_fgl.strategies.federation import Federation
from flower_fgl.strategies.rounds.best_model import BestModel
from flower_fgl.strategies.rounds.send_receive import send_receive

if TYPE_CHECKING:
    from flower_fgl.strategies.base import FglStrategy

__all__ = [
    "describe_clients",
    "pack_strategy",
    "read_clients",
    "resume_strategy",
]

log = logging.getLogger(__name__)


def describe_clients(federation: Federation) -> list[dict[str, Any]]:
    """Return what the clients said of themselves, as JSON gives it back.

    Without their keys for secure aggregation: those are new whenever a run goes on.
    """
    return [
        {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(client).items()
            if key != "public_key"
        }
        for client in federation.clients.values()
    ]


def read_clients(checkpoint: Checkpoint) -> dict[int, Description]:
    """Return the clients that a checkpoint names, by partition-id."""
    clients = {}
    for about in checkpoint.clients:
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in about.items()
        }
        clients[int(values["partition_id"])] = Description(**values)
    return clients


def pack_strategy(strategy: FglStrategy, result: Result) -> Snapshot:
    """Gather all that the rounds to come depend on, between two rounds.

    Parameters
    ----------
    strategy : FglStrategy
        A method's server half.
    result : Result
        Flower's result so far.

    Returns
    -------
    Snapshot
        Parts ``method`` (what :meth:`FglStrategy.server_state` returns), ``loop`` and
        ``best``.
    """
    best = strategy._best
    loop = {
        "trained": {str(pid): number for pid, number in strategy._trained.items()},
        "failed_in_a_row": strategy._failed_in_a_row,
        "owes_scores": strategy._owes_scores,
        "any_scored": strategy._any_scored,
        "metrics": {
            str(number): dict(metrics)
            for number, metrics in result.train_metrics_clientapp.items()
        },
    }
    parts = {"method": strategy.server_state(), "loop": Snapshot(values=loop)}
    if best.score is not None:
        about = {"score": list(best.score), "round": best.server_round}
        parts["best"] = Snapshot(best.state, about)
    return Snapshot.join(parts)


def resume_strategy(
    strategy: FglStrategy, checkpoint: Checkpoint, result: Result, grid: Grid
) -> None:
    """Put a strategy that was prepared where it was after the checkpoint's round.

    Parameters
    ----------
    strategy : FglStrategy
        Its ``federation`` is known and :meth:`FglStrategy.prepare` has run.
    checkpoint : Checkpoint
        Where to go on.
    result : Result
        Takes the metrics of the rounds before.
    grid : Grid
        Asks the clients for the round of their own state.

    Raises
    ------
    RunError
        If the clients are not those of the checkpoint, or its state does not fit.
    """
    _check_clients(strategy.federation, checkpoint)
    loop = checkpoint.snapshot.part("loop").values
    strategy._trained = {int(pid): number for pid, number in loop["trained"].items()}
    strategy._failed_in_a_row = loop["failed_in_a_row"]
    strategy._owes_scores = loop["owes_scores"]
    strategy._any_scored = loop["any_scored"]
    for number, metrics in loop["metrics"].items():
        result.train_metrics_clientapp[int(number)] = MetricRecord(metrics)
    best = checkpoint.snapshot.part("best")
    if best.values:
        num_nodes, accuracy = best.values["score"]
        strategy._best = BestModel(
            (num_nodes, accuracy), dict(best.tensors), best.values["round"]
        )
    try:
        strategy.load_server_state(checkpoint.snapshot.part("method"))
    except (KeyError, ValueError, RuntimeError) as error:
        raise RunError(
            f"Checkpoint {checkpoint.folder} does not fit {type(strategy).__name__}: "
            f"{error}. It was written by other code: start a new run."
        ) from error
    rounds = _resume_clients(strategy, checkpoint, grid)
    _warn_of_other_rounds(strategy._trained, rounds, checkpoint.server_round)
    for pid, number in rounds.items():
        if not number:
            strategy._trained.pop(pid, None)  # it has nothing: to be sent anew


def _check_clients(federation: Federation, checkpoint: Checkpoint) -> None:
    """Refuse clients that describe themselves otherwise than before."""
    before = {client["partition_id"]: client for client in checkpoint.clients}
    now = {client["partition_id"]: client for client in describe_clients(federation)}
    changed: list[str] = []
    if before.keys() != now.keys():
        changed.append(f"clients {sorted(now)} (were {sorted(before)})")
    for pid in sorted(before.keys() & now.keys()):
        changed += [
            f"client {pid}: {key} = {value!r} (was {before[pid].get(key)!r})"
            for key, value in now[pid].items()
            if before[pid].get(key) != value
        ]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise RunError(
            "The run cannot go on with other clients or data: "
            f"{'; '.join(changed[:3])}{more}. Bring back those of the run, or start a "
            "new one."
        )


def _resume_clients(
    strategy: FglStrategy, checkpoint: Checkpoint, grid: Grid
) -> Mapping[int, int | None]:
    """Tell each client where the run goes on; return the rounds of their states.

    Returns
    -------
    mapping of int to int or None
        By partition-id: the round of the client's last training, 0 without a state,
        ``None`` if it did not say.
    """
    engine_has_states = strategy.checkpoints and strategy.checkpoints.states is not None
    point = ConfigRecord(
        {
            "run-id": str(checkpoint.run_id),
            "server-round": checkpoint.server_round,
            "is-restored": bool(engine_has_states),
        }
    )
    messages = {
        pid: Message(
            _addressed(strategy.federation, pid, point),
            dst_node_id=node,
            message_type=f"{MessageType.QUERY}.{RESUME}",
        )
        for pid, node in strategy.federation.nodes.items()
    }
    timeout = max(strategy.config.round_timeout, strategy.config.join_timeout)
    exchange = send_receive(
        grid, messages, timeout=timeout, max_mb=strategy.config.max_message_mb
    )
    for failure in exchange.failures:
        log.warning("Client %s: %s", failure.partition_id, failure.reason)
    found: dict[int, int | None] = dict.fromkeys(messages)
    for pid, reply in exchange.replies.items():
        number = reply.content.config_records.get(INFO, ConfigRecord()).get("round")
        found[pid] = number if isinstance(number, int) else None
    return found


def _addressed(federation: Federation, pid: int, point: ConfigRecord) -> RecordDict:
    agreement = federation.agreement(pid)
    told = {} if agreement is None else agreement.to_record()
    return RecordDict({CONFIG: point, **told})


def _warn_of_other_rounds(
    expected: Mapping[int, int], found: Mapping[int, int | None], server_round: int
) -> None:
    """Name the clients whose state is not that of the checkpoint."""
    for pid, number in found.items():
        if number != expected.get(pid, 0):
            what = "nothing" if not number else f"its state of round {number}"
            log.warning(
                "Client %s has %s, the checkpoint of round %s expects that of round %s: "
                "the run goes on, but its numbers will not be those of a run that was "
                "not interrupted.",
                pid,
                what,
                server_round,
                expected.get(pid, 0),
            )
