"""Asking nodes who they are, and waiting until those that a run needs are there."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import PayloadError, RunError
from flower_fgl.protocols.base import DESCRIBE
from flower_fgl.protocols.describe import Description, Rejection
from flower_fgl.strategies.rounds.membership import match_known_client
from flower_fgl.strategies.rounds.messenger import send_receive

__all__ = ["describe_nodes", "wait_for_clients", "wait_for_known_clients"]

log = logging.getLogger(__name__)
POLL_SECONDS = 0.05

Answers = dict[int, Description | Rejection | str]
Gathered = tuple[dict[int, Description], tuple[Rejection, ...], Collection[int]]


def describe_nodes(grid: Grid, nodes: list[int], config: RunConfig) -> Answers:
    """Ask some nodes to describe themselves.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    nodes : list of int
        Flower's node ids.
    config : RunConfig
        The larger of ``round_timeout`` and ``join_timeout`` is waited for.

    Returns
    -------
    dict of int to Description, Unfit or str
        By node id; text stands for the reason why one gave no usable answer.
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
        kind = Rejection if Rejection.is_in(reply.content) else Description
        try:
            out[nodes[index]] = kind.from_record(reply.content)
        except PayloadError as error:
            out[nodes[index]] = f"A client's description is malformed: {error}"
    return out


def wait_for_clients(grid: Grid, config: RunConfig) -> Gathered:
    """Ask every node that connects, until all are there that are expected.

    An owner whose node fails without a word (it may have been restarted, and Flower still
    lists the former one) is given until ``join-timeout`` to come back. Then at least
    ``min-clients`` must be there if that is set, else all.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    config : RunConfig
        ``clients``, ``min_clients`` and ``join_timeout`` are read.

    Returns
    -------
    described : dict of int to Description
        By node id, at least one.
    refused : tuple of Unfit
        Who cannot take part, and why.
    asked : collection of int
        Ids of all nodes that were asked.

    Raises
    ------
    RunError
        If too few or too many nodes connect, or partitions of a data set cannot be read.
    """
    end = time.monotonic() + config.join_timeout
    asked: Answers = {}
    while True:
        new = [node for node in grid.get_node_ids() if node not in asked]
        asked |= describe_nodes(grid, new, config) if new else {}
        described, unfit, lost = _sorted_out(asked)
        is_owned = bool(unfit) or any(d.is_owned for d in described.values())
        if lost and not (is_owned or config.min_clients):
            raise RunError(f"Clients cannot take part: {_reasons(lost)}")
        told = len(described) + len(unfit)
        expected = config.clients or _told_number(described)
        _check_number(told, expected, config)
        is_enough = len(described) >= config.min_clients
        if told and told == expected and is_enough:
            break
        if time.monotonic() > end:
            if described and (
                is_enough if config.min_clients else len(asked) >= expected
            ):
                unfit += tuple(Rejection("a node", reason) for reason in lost)
                break
            raise RunError(_too_few(len(described), told, expected, lost, config))
        time.sleep(POLL_SECONDS)
    if not described:
        text = "; ".join(f"{one.name}: {one.reason}" for one in unfit)
        raise RunError(f"No client can take part. {text}")
    return described, unfit, asked.keys()


def wait_for_known_clients(
    grid: Grid, config: RunConfig, before: Mapping[int, Description]
) -> Gathered:
    """Wait for the clients that a run had, and know each by what it says of itself.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    config : RunConfig
        ``join_timeout`` is read.
    before : mapping of int to Description
        The clients of the run, by partition-id.

    Returns
    -------
    described : dict of int to Description
        By node id, the clients with their numbers of before and nobody else.
    refused : tuple of Unfit
        Who cannot take part, and why.
    asked : collection of int
        Ids of the nodes that are clients, or cannot be. Others may join.

    Raises
    ------
    RunError
        If one is missing.
    """
    end = time.monotonic() + config.join_timeout
    asked: Answers = {}
    found: dict[int, tuple[int, Description]] = {}  # node and description by number
    changed: list[str] = []
    while len(found) < len(before):
        new = [node for node in grid.get_node_ids() if node not in asked]
        answers = describe_nodes(grid, new, config) if new else {}
        asked |= answers
        for node, answer in answers.items():
            known = isinstance(answer, Description) and match_known_client(
                before, answer
            )
            if isinstance(known, tuple):
                found.setdefault(known[0], (node, known[1]))
            elif isinstance(known, str):
                changed.append(f" {known}")
        if len(found) < len(before) and time.monotonic() > end:
            missing = [_named(one) for pid, one in before.items() if pid not in found]
            raise RunError(
                f"The run had {len(before)} clients, {len(found)} of them connected "
                f"within {config.join_timeout:g} s. Missing: {', '.join(missing)}. Start "
                "their SuperNodes with the graphs of before, then resume the run."
                f"{''.join(changed)}"
            )
        time.sleep(POLL_SECONDS)
    described, unfit, _ = _sorted_out(asked)
    settled = dict(found.values())
    strangers = described.keys() - settled.keys()
    return settled, unfit, asked.keys() - strangers


def _sorted_out(
    answers: Answers,
) -> tuple[dict[int, Description], tuple[Rejection, ...], list[str]]:
    """Tell apart who described itself, who cannot take part, and who said nothing."""
    described = {n: d for n, d in answers.items() if isinstance(d, Description)}
    unfit = tuple(u for u in answers.values() if isinstance(u, Rejection))
    return described, unfit, [why for why in answers.values() if isinstance(why, str)]


def _reasons(lost: Collection[str]) -> str:
    return "; ".join(f"{why} ({n} clients)" for why, n in Counter(lost).items())


def _told_number(described: Mapping[int, Description]) -> int:
    """Return how many clients there are by their own word, 0 before anybody said so."""
    number = max((d.num_partitions for d in described.values()), default=0)
    if described and not number:
        raise RunError(
            "Owners bring their own graphs, so nobody but you knows how many there are: "
            "set clients to the number of SuperNodes to wait for."
        )
    return number


def _check_number(told: int, expected: int, config: RunConfig) -> None:
    """Refuse more nodes than clients, and fewer clients than must be there."""
    if told > expected > 0:
        raise RunError(
            f"{told} nodes are connected, but clients = {expected}. Set "
            "clients to their number, or to 0."
        )
    if config.min_clients > expected > 0:
        raise RunError(
            f"min-clients = {config.min_clients}, but by their own word there are "
            f"{expected} clients. Set min-clients to that or less."
        )


def _too_few(
    described: int, told: int, expected: int, lost: Collection[str], config: RunConfig
) -> str:
    """Say how many are missing when the time is over."""
    if config.min_clients:
        why = f" {_reasons(lost)}" if lost else ""
        return (
            f"Only {described} of {expected or 'any'} clients could take part within "
            f"{config.join_timeout:g} s, but min-clients = {config.min_clients}.{why}"
        )
    return (
        f"Only {told} of {expected or 'any'} clients connected within "
        f"{config.join_timeout:g} s. In a simulation set the number of "
        'supernodes (--federation-config "num-supernodes='
        f'{expected or 10}"); clients=0 takes as many as there are.'
    )


def _named(client: Description) -> str:
    """Call a client by its number, an owner by its name as well."""
    name = f' ("{client.name}")' if client.name else ""
    return f"client {client.partition_id}{name}"
