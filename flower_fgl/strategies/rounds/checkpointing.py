"""Checkpoints of the server's state: packing, and restoring when a run resumes."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from flwr.app import ConfigRecord, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import Result

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError, first_of, one_line
from flower_fgl.protocols.base import INFO, RESUME, find_record
from flower_fgl.protocols.describe import Description
from flower_fgl.protocols.exchanges import SCALE
from flower_fgl.runs.checkpoints import Checkpoint, Snapshot
from flower_fgl.strategies.federation import Federation
from flower_fgl.strategies.rounds.loop_state import LoopState, Silence
from flower_fgl.strategies.rounds.messenger import Messenger, send_receive

__all__ = ["client_descriptions", "clients_to_await", "pack_run", "resume_run"]

log = logging.getLogger(__name__)
KEPT = ["trained", "failed_in_a_row", "owes_scores", "any_scored", "silent"]
KEPT += ["best_score", "best_state", "best_round"]
"""Entries of the loop's state that a checkpoint stores."""
MAX_ROUND = 2**31
"""Largest round that a client's reply may name."""


def client_descriptions(federation: Federation) -> list[dict[str, Any]]:
    """Return the clients' descriptions as JSON stores them, without their public keys."""
    return [
        {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(client).items()
            if key != "public_key"
        }
        for client in federation.clients.values()
    ]


def clients_to_await(
    checkpoint: Checkpoint, config: RunConfig
) -> dict[int, Description] | None:
    """Return the clients, by partition-id, of a run that had fewer than all."""
    most = config.clients or int(checkpoint.clients[0]["num_partitions"])
    if not config.min_clients and len(checkpoint.clients) >= most:
        return None
    clients = {}
    for about in checkpoint.clients:
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in about.items()
        }
        clients[int(values["partition_id"])] = Description(**values)
    return clients


def pack_run(loop: LoopState, method: Snapshot, result: Result) -> Snapshot:
    """Collect what the following rounds depend on, with the method's own state."""
    values: dict[str, Any] = {name: getattr(loop, name) for name in KEPT}
    values[SCALE] = loop.federation.scale
    values["metrics"] = result.train_metrics_clientapp
    values["scores"] = {
        number: {k: v for k, v in scores.items() if v == v}  # NaN: no nodes
        for number, scores in result.evaluate_metrics_clientapp.items()
    }
    return Snapshot.join({"method": method, "loop": Snapshot.of(values)})


def resume_run(
    messenger: Messenger,
    checkpoint: Checkpoint,
    result: Result,
    load_server_state: Callable[[Snapshot], None],
    *,
    restores_states: bool,
) -> None:
    """Restore a prepared strategy as it was after the round of a checkpoint.

    ``result`` receives the metrics of the earlier rounds. ``restores_states`` says that
    the engine has already restored the clients' states.
    """
    loop = messenger.loop
    _check_clients(loop.federation, checkpoint)
    try:
        values = checkpoint.snapshot.part("loop").tree()
        for name in KEPT:
            setattr(loop, name, values[name])
        loop.best_score = values["best_score"] and tuple(values["best_score"])
        loop.silent = {pid: Silence(**one) for pid, one in values["silent"].items()}
        for number, metrics in values["metrics"].items():
            result.train_metrics_clientapp[number] = MetricRecord(metrics)
        for number, scores in values["scores"].items():
            result.evaluate_metrics_clientapp[number] = MetricRecord(scores)
        load_server_state(checkpoint.snapshot.part("method"))
    except (KeyError, ValueError, RuntimeError) as error:
        raise RunError(
            f"Checkpoint {checkpoint.folder} does not fit {messenger.config.method}: "
            f"{error}. Other code has written it: start a new run."
        ) from error
    for pid, number in _resume_clients(messenger, checkpoint, restores_states).items():
        due = loop.trained.get(pid, 0)
        if number != due:
            log.warning(
                "Client %s has %s, but the checkpoint of round %s expects that of round "
                "%s. The run resumes; its numbers will differ from an uninterrupted run.",
                pid,
                f"its state of round {number}" if number else "no state",
                checkpoint.server_round,
                due,
            )
        if not number:
            loop.trained.pop(pid, None)  # no state: the client needs the download again


def _check_clients(federation: Federation, checkpoint: Checkpoint) -> None:
    """Reject clients whose descriptions have changed."""
    before = {client["partition_id"]: client for client in checkpoint.clients}
    now = {client["partition_id"]: client for client in client_descriptions(federation)}
    changed: list[str] = []
    if before.keys() != now.keys():
        changed.append(f"clients {sorted(now)} (were {sorted(before)})")
    for pid in sorted(before.keys() & now.keys()):
        changed += [
            f"client {pid}: {key} = {value!r} (was {before[pid].get(key)!r})"
            for key, value in now[pid].items()
            # checkpoints of earlier versions lack some keys
            if key in before[pid] and before[pid][key] != value
        ]
    if changed:
        raise RunError(
            "The run cannot resume with other clients or data: "
            f"{first_of(changed, 3, '; ')}. Restore the clients of the run, or start a "
            "new run."
        )


def _resume_clients(
    messenger: Messenger, checkpoint: Checkpoint, restores_states: bool
) -> Mapping[int, int | None]:
    """Rewind all clients; return the rounds of their states (0: none; None: no reply)."""
    point = ConfigRecord(
        {
            "run-id": str(checkpoint.run_id),
            "server-round": checkpoint.server_round,
            "is-restored": restores_states,
        }
    )
    messages = messenger.by_receiver(
        messenger.address(
            {pid: RecordDict() for pid in messenger.loop.federation.nodes},
            f"{MessageType.QUERY}.{RESUME}",
            point,
            checkpoint.server_round,
        )
    )
    config = messenger.config
    exchange = send_receive(
        messenger.grid,
        messages,
        timeout=max(config.round_timeout, config.join_timeout),
        max_mb=config.max_message_mb,
    )
    for failure in exchange.failures:
        log.warning("Client %s: %s", failure.partition_id, failure.reason)
    found: dict[int, int | None] = dict.fromkeys(messages)
    for pid, reply in exchange.replies.items():
        info = find_record(reply.content, INFO, ConfigRecord) or ConfigRecord()
        number = info.get("round")
        if isinstance(number, int) and 0 <= number <= MAX_ROUND:
            found[pid] = int(number)
        else:
            text = one_line(f"expected the round of its state, got {number!r}")
            log.warning("Client %s: %s", pid, text)
    return found
