"""Functions that wait for the nodes of a run and request their descriptions."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.protocols.base import DESCRIBE
from flower_fgl.protocols.describe import Description, Rejection
from flower_fgl.strategies.rounds.membership import match_known_client
from flower_fgl.strategies.rounds.messenger import send_receive
from flower_fgl.strategies.rounds.round_log import Failure

__all__ = ["describe_nodes", "wait_for_clients", "wait_for_known_clients"]

log = logging.getLogger(__name__)
POLL_SECONDS = 0.05

Answers = dict[int, Description | Rejection | str]
Gathered = tuple[dict[int, Description], tuple[Rejection, ...], Collection[int]]


def describe_nodes(grid: Grid, nodes: list[int], config: RunConfig) -> Answers:
    """Request the descriptions of nodes, given and returned by Flower's node ids.

    A str in place of a description is the reason why a node gave no usable answer. The
    timeout is the larger of ``round_timeout`` and ``join_timeout``.
    """
    messages = {
        index: Message(
            RecordDict(),
            dst_node_id=node,
            message_type=f"{MessageType.QUERY}.{DESCRIBE}",
        )
        for index, node in enumerate(nodes)
    }
    # the first message waits for worker processes to start and graphs to be loaded
    timeout = max(config.round_timeout, config.join_timeout)
    exchange = send_receive(
        grid, messages, timeout=timeout, max_mb=config.max_message_mb
    )
    out: Answers = {
        nodes[failure.partition_id]: failure.reason for failure in exchange.failures
    }
    for index, reply in exchange.replies.items():
        try:
            kind = Rejection if Rejection.is_in(reply.content) else Description
            out[nodes[index]] = kind.from_record(reply.content)
        except Exception as error:  # any failure concerns this reply only
            reason = Failure.of(index, error).reason
            out[nodes[index]] = f"A client's description is malformed: {reason}"
    return out


def wait_for_clients(grid: Grid, config: RunConfig) -> Gathered:
    """Wait until all expected clients are connected and have described themselves.

    After ``join-timeout`` it suffices that ``min-clients`` nodes can take part. If
    ``min-clients`` is unset, all expected nodes must have received the query; those that
    failed are rejected.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    config : RunConfig
        Settings ``clients``, ``min_clients`` and ``join_timeout``.

    Returns
    -------
    described : dict of int to Description
        Descriptions by node id, at least one.
    rejected : tuple of Rejection
        Nodes that cannot take part, with the reason.
    queried : collection of int
        Ids of all nodes that received the query.

    Raises
    ------
    RunError
        If too few or too many nodes connect, or a partition of a dataset cannot be read.

    Notes
    -----
    1. A data owner's node that fails without a reason may have been restarted: Flower
       still lists its former node id. So such a failure is final only after
       ``join-timeout``.
    """
    end = time.monotonic() + config.join_timeout
    answers: Answers = {}
    while True:
        new = [node for node in grid.get_node_ids() if node not in answers]
        answers |= describe_nodes(grid, new, config) if new else {}
        described, rejected, failed = _split_answers(answers)
        is_owned = bool(rejected) or any(d.is_owned for d in described.values())
        if failed and not (is_owned or config.min_clients):
            raise RunError(f"Clients cannot take part: {_reasons(failed)}")
        answered = len(described) + len(rejected)
        expected = config.clients or _num_partitions(described)
        _check_number(answered, expected, config)
        is_enough = len(described) >= config.min_clients
        if answered and answered == expected and is_enough:
            break
        if time.monotonic() > end:
            if described and (
                is_enough if config.min_clients else len(answers) >= expected
            ):
                rejected += tuple(Rejection("a node", reason) for reason in failed)
                break
            raise RunError(_too_few(len(described), answered, expected, failed, config))
        time.sleep(POLL_SECONDS)
    if not described:
        text = "; ".join(f"{one.name}: {one.reason}" for one in rejected)
        raise RunError(f"No client can take part. {text}")
    return described, rejected, answers.keys()


def wait_for_known_clients(
    grid: Grid, config: RunConfig, before: Mapping[int, Description]
) -> Gathered:
    """Wait for the clients of an interrupted run, and match them by their descriptions.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    config : RunConfig
        Setting ``join_timeout``.
    before : mapping of int to Description
        The clients of the interrupted run, by partition-id.

    Returns
    -------
    described : dict of int to Description
        The clients of the interrupted run with their former partition-ids, by node id.
    rejected : tuple of Rejection
        Nodes that cannot take part, with the reason.
    queried : collection of int
        Ids of the nodes that are clients or cannot take part. The other nodes that
        received the query may join later.

    Raises
    ------
    RunError
        If a client is missing.
    """
    end = time.monotonic() + config.join_timeout
    answers: Answers = {}
    found: dict[int, tuple[int, Description]] = {}  # by partition-id
    changed: list[str] = []
    while len(found) < len(before):
        new = [node for node in grid.get_node_ids() if node not in answers]
        received = describe_nodes(grid, new, config) if new else {}
        answers |= received
        for node, answer in received.items():
            known = isinstance(answer, Description) and match_known_client(
                before, answer
            )
            if isinstance(known, tuple):
                found.setdefault(known[0], (node, known[1]))
            elif isinstance(known, str):
                changed.append(f" {known}")
        if len(found) < len(before) and time.monotonic() > end:
            missing = [_label(one) for pid, one in before.items() if pid not in found]
            raise RunError(
                f"The run had {len(before)} clients, {len(found)} of them connected "
                f"within {config.join_timeout:g} s. Missing: {', '.join(missing)}. Start "
                "their SuperNodes with the same graphs as before, then resume the run."
                f"{''.join(changed)}"
            )
        time.sleep(POLL_SECONDS)
    described, rejected, _ = _split_answers(answers)
    clients = dict(found.values())
    others = described.keys() - clients.keys()
    return clients, rejected, answers.keys() - others


def _split_answers(
    answers: Answers,
) -> tuple[dict[int, Description], tuple[Rejection, ...], list[str]]:
    """Split answers into descriptions, rejections and reasons of failures."""
    described = {n: d for n, d in answers.items() if isinstance(d, Description)}
    rejected = tuple(r for r in answers.values() if isinstance(r, Rejection))
    failed = [reason for reason in answers.values() if isinstance(reason, str)]
    return described, rejected, failed


def _reasons(failed: Collection[str]) -> str:
    """Format each reason with its number of clients."""
    return "; ".join(f"{why} ({n} clients)" for why, n in Counter(failed).items())


def _num_partitions(described: Mapping[int, Description]) -> int:
    """Return the number of partitions that nodes report, 0 before the first report."""
    number = max((d.num_partitions for d in described.values()), default=0)
    if described and not number:
        raise RunError(
            "Data owners with their own graphs do not report how many clients there are. "
            "Set clients to the number of SuperNodes to wait for."
        )
    return number


def _check_number(answered: int, expected: int, config: RunConfig) -> None:
    """Reject more nodes than clients, and fewer clients than ``min-clients``."""
    if answered > expected > 0:
        raise RunError(
            f"{answered} nodes are connected, but clients = {expected}. Set "
            f"clients to {answered}, or to 0."
        )
    if config.min_clients > expected > 0:
        raise RunError(
            f"min-clients = {config.min_clients}, but the run has {expected} clients. "
            f"Set min-clients to at most {expected}."
        )


def _too_few(
    described: int,
    answered: int,
    expected: int,
    failed: Collection[str],
    config: RunConfig,
) -> str:
    """Describe how many clients are missing after ``join-timeout``."""
    if config.min_clients:
        why = f" {_reasons(failed)}" if failed else ""
        return (
            f"Only {described} of {expected or 'any'} clients could take part within "
            f"{config.join_timeout:g} s, but min-clients = {config.min_clients}.{why}"
        )
    return (
        f"Only {answered} of {expected or 'any'} clients connected within "
        f"{config.join_timeout:g} s. In a simulation, set the number of "
        'supernodes (--federation-config "num-supernodes='
        f'{expected or 10}"). With clients = 0 the run takes all connected nodes.'
    )


def _label(client: Description) -> str:
    """Return a client's partition-id, and the name of a data owner."""
    name = f' ("{client.name}")' if client.name else ""
    return f"client {client.partition_id}{name}"
