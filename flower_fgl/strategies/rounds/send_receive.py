"""One exchange of messages with the clients, whatever runs them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid

from flower_fgl.core.errors import PayloadError, RunError
from flower_fgl.protocols.base import check_size

__all__ = ["Exchange", "Failure", "send_receive"]

POLL_SECONDS = 0.005


@dataclass(frozen=True)
class Failure:
    """A reply that could not be used.

    Parameters
    ----------
    partition_id : int
        Client that should have replied.
    reason : str
        Why, in one line.
    """

    partition_id: int
    reason: str


@dataclass(frozen=True)
class Exchange:
    """What came back from one exchange.

    Parameters
    ----------
    replies : dict of int to Message
        Replies with content, by partition-id, ascending.
    failures : list of Failure
        Clients that failed or did not answer.
    seconds_send, seconds_wait : float
        Until all messages were handed over, and from then until the last reply.
    """

    replies: dict[int, Message]
    failures: list[Failure] = field(default_factory=list)
    seconds_send: float = 0.0
    seconds_wait: float = 0.0


def send_receive(
    grid: Grid,
    messages: Mapping[int, Message],
    *,
    timeout: float,
    max_mb: float = math.inf,
) -> Exchange:
    """Send one message to each client and wait for the replies.

    Parameters
    ----------
    grid : Grid
        Any of Flower's grids, or the local engine's.
    messages : mapping of int to Message
        One message per partition-id.
    timeout : float
        Seconds after which missing replies count as failures.
    max_mb : float
        ``max-message-mb``: a larger reply counts as a failure.

    Returns
    -------
    Exchange

    Raises
    ------
    RunError
        If a worker process of the simulation died: Flower keeps a dead worker and loses
        most of the later messages to it.

    Notes
    -----
    1. ``Grid.send_and_receive`` sleeps 3 s (deployment) or 0.1 s (simulation) between
       pulls; this loop asks every 5 ms, less often the longer the answer takes.
    2. A message that Flower could not store has an empty id, or none of the batch has
       one.
    3. Error replies made by Flower itself carry no client's node id, so replies are told
       apart by the message they answer.
    """
    if not messages:
        return Exchange({})
    start = time.perf_counter()
    order = sorted(messages)
    ids = list(grid.push_messages([messages[pid] for pid in order]))
    ids += [""] * (len(order) - len(ids))
    waiting = {key: pid for key, pid in zip(ids, order, strict=True) if key}
    sent = time.perf_counter()
    replies: dict[int, Message] = {}
    failures = [
        Failure(pid, "the message could not be delivered: its node is gone")
        for key, pid in zip(ids, order, strict=True)
        if not key
    ]
    pause = POLL_SECONDS
    while waiting:
        got = list(grid.pull_messages(list(waiting)))
        for reply in got:
            pid = waiting.pop(reply.metadata.reply_to_message_id, None)
            if pid is None:
                continue
            if reply.has_error():
                failures.append(Failure(pid, _one_line(reply.error.reason)))
                continue
            try:
                check_size(reply.content, max_mb)
            except PayloadError as error:
                failures.append(Failure(pid, str(error)))
            else:
                replies[pid] = reply
        elapsed = time.perf_counter() - sent
        if not waiting or elapsed > timeout:
            break
        if not got:
            pause = min(max(POLL_SECONDS, elapsed / 50), 0.25)
            time.sleep(pause)
    failures += [
        Failure(pid, f"no reply within {timeout:g} s") for pid in waiting.values()
    ]
    _refuse_dead_workers(failures)
    return Exchange(
        {pid: replies[pid] for pid in sorted(replies)},
        sorted(failures, key=lambda failure: failure.partition_id),
        seconds_send=sent - start,
        seconds_wait=time.perf_counter() - sent,
    )


def _one_line(reason: str | None) -> str:
    """Keep what a person needs of an error reply: its last line, shortened."""
    lines = [
        line.strip() for line in (reason or "unknown").splitlines() if line.strip()
    ]
    return lines[-1][:300] if lines else "unknown"


def _refuse_dead_workers(failures: list[Failure]) -> None:
    """Stop when a simulation worker is gone."""
    for failure in failures:
        text = failure.reason.lower()
        if "actordied" in text or "actor died" in text or "actor is dead" in text:
            raise RunError(
                f"The worker process that ran client {failure.partition_id} died "
                f"({failure.reason}). Often it ran out of memory: run fewer clients at "
                "once (--workers 1), or a smaller model."
            )
