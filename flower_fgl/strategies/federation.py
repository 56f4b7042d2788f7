"""Who takes part: the describe exchange before round 1, and what must agree.

Clients that hold partitions of one data set must all be there and agree: anything else is
an error. Of owners who bring their own graphs, one that does not fit is refused by name
and the run goes on with the others.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from flower_fgl.config import RunConfig
from flower_fgl.errors import PayloadError, RunError
from flower_fgl.nn import deal_models
from flower_fgl.protocols.base import DESCRIBE
from flower_fgl.protocols.describe import Agreement, Description, Unfit
from flower_fgl.strategies.agreement import (
    agree_classes,
    agree_width,
    in_agreed_order,
    number_owners,
)
from flower_fgl.strategies.exchange import send_receive

__all__ = ["Federation", "client_lines", "describe_nodes", "discover"]

log = logging.getLogger(__name__)
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Federation:
    """The clients of a run.

    Parameters
    ----------
    clients : mapping of int to Description
        By partition-id, ascending.
    nodes : mapping of int to int
        Flower's node id of each partition-id.
    refused : tuple of Unfit
        Owners that do not take part, and why.
    """

    clients: Mapping[int, Description]
    nodes: Mapping[int, int]
    refused: tuple[Unfit, ...] = ()

    @property
    def partitions(self) -> dict[int, int]:
        """Partition-id of each of Flower's node ids."""
        return {node: pid for pid, node in self.nodes.items()}

    @property
    def num_features(self) -> int:
        """Feature width d, the same on all clients."""
        return next(iter(self.clients.values())).num_features

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the C classes, the same on all clients."""
        return next(iter(self.clients.values())).class_names

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return len(self.class_names)

    @property
    def partition_sha256(self) -> str:
        """Hash of the partition, empty when owners bring their own graphs."""
        return next(iter(self.clients.values())).partition_sha256

    @property
    def is_owned(self) -> bool:
        """Whether owners bring their own graphs."""
        return next(iter(self.clients.values())).is_owned

    def agreement(self, partition_id: int) -> Agreement | None:
        """Return what every message to an owner repeats; ``None`` for partitions."""
        client = self.clients[partition_id]
        if not client.is_owned:
            return None
        return Agreement(partition_id, client.num_partitions, self.class_names)

    @property
    def trainable(self) -> list[int]:
        """Partition-ids of the clients that have training nodes."""
        return [pid for pid, client in self.clients.items() if client.num_train > 0]


def discover(grid: Grid, config: RunConfig) -> Federation:
    """Wait for the clients, ask each to describe itself, and compare.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    config : RunConfig
        ``clients`` and ``join_timeout`` are read.

    Returns
    -------
    Federation

    Raises
    ------
    RunError
        If too few nodes connect, a node cannot describe itself, two nodes hold the same
        partition, or they disagree on features, classes or partition.
    """
    described, refused = _gather(grid, config)
    owned = sum(d.is_owned for d in described.values())
    if 0 < owned < len(described):
        raise RunError(
            f"{owned} nodes bring their own graphs and {len(described) - owned} hold "
            "partitions of a data set. Start all SuperNodes with graph=..., or none."
        )
    if owned:
        described, refused = _settle(described, refused, config)
    counts = Counter(d.partition_id for d in described.values())
    if len(counts) < len(described):
        _refuse_twins(counts)
    nodes = {d.partition_id: node for node, d in described.items()}
    federation = Federation(
        {pid: described[nodes[pid]] for pid in sorted(nodes)},
        {pid: nodes[pid] for pid in sorted(nodes)},
        refused,
    )
    _agree(federation, "feature width", lambda d: d.num_features)
    _agree(federation, "class names", lambda d: d.class_names)
    _agree(federation, "partition", lambda d: d.partition_sha256)
    _refuse_untrainable(federation, config)
    if config.setting == "few-shot":
        _tell_overlap(federation)
    return federation


def _gather(
    grid: Grid, config: RunConfig
) -> tuple[dict[int, Description], tuple[Unfit, ...]]:
    """Ask every node that connects, until all are there that are expected.

    An owner whose node fails without a word (it may have been restarted, and Flower still
    lists the former one) is given until ``join-timeout`` to come back.
    """
    end = time.monotonic() + config.join_timeout
    asked: dict[int, Description | Unfit | str] = {}
    while True:
        new = [node for node in grid.get_node_ids() if node not in asked]
        asked |= describe_nodes(grid, new, config) if new else {}
        described = {n: d for n, d in asked.items() if isinstance(d, Description)}
        unfit = tuple(u for u in asked.values() if isinstance(u, Unfit))
        lost = [reason for reason in asked.values() if isinstance(reason, str)]
        if lost and not (unfit or any(d.is_owned for d in described.values())):
            text = "; ".join(f"{why} ({n} clients)" for why, n in Counter(lost).items())
            raise RunError(f"Clients cannot take part: {text}")
        told = len(described) + len(unfit)
        expected = config.clients or _told_number(described)
        if told > expected > 0:
            raise RunError(
                f"{told} nodes are connected, but clients = {expected}. Set "
                "clients to their number, or to 0."
            )
        if told and told == expected:
            break
        if time.monotonic() > end:
            if described and len(asked) >= expected:
                unfit += tuple(Unfit("a node", reason) for reason in lost)
                break
            raise RunError(
                f"Only {told} of {expected or 'any'} clients connected within "
                f"{config.join_timeout:g} s. In a simulation set the number of "
                'supernodes (--federation-config "num-supernodes='
                f'{expected or 10}"); clients=0 takes as many as there are.'
            )
        time.sleep(POLL_SECONDS)
    if not described:
        text = "; ".join(f"{one.name}: {one.reason}" for one in unfit)
        raise RunError(f"No client can take part. {text}")
    return described, unfit


def _told_number(described: Mapping[int, Description]) -> int:
    """Return how many clients there are by their own word, 0 before anybody said so."""
    number = max((d.num_partitions for d in described.values()), default=0)
    if described and not number:
        raise RunError(
            "Owners bring their own graphs, so nobody but you knows how many there are: "
            "set clients to the number of SuperNodes to wait for."
        )
    return number


def _settle(
    described: Mapping[int, Description], unfit: tuple[Unfit, ...], config: RunConfig
) -> tuple[dict[int, Description], tuple[Unfit, ...]]:
    """Drop owners whose features do not fit, number the others, agree on classes."""
    called = {node: _called(node, d) for node, d in described.items()}
    width = agree_width({called[n]: d.num_features for n, d in described.items()})
    fit = {n: d for n, d in described.items() if d.num_features == width}
    unfit += tuple(
        Unfit(
            d.name,
            f"its graph has {d.num_features} features, the others' have {width}.",
        )
        for node, d in described.items()
        if node not in fit
    )
    for one in unfit:
        log.warning("Owner %s does not take part: %s", one.name, one.reason)
    if len(fit) < config.min_replies:
        text = "; ".join(f"{one.name}: {one.reason}" for one in unfit)
        raise RunError(
            f"{len(fit)} owners can take part, but min-replies = {config.min_replies}. "
            f"{text}"
        )
    numbers = number_owners(fit)
    total = max(max(numbers.values()) + 1, *(d.num_partitions for d in fit.values()))
    models = deal_models(config.model, total)
    ordered = sorted(fit, key=lambda node: (numbers[node], node))
    class_names = agree_classes([fit[node].class_names for node in ordered])
    settled = {
        node: replace(
            in_agreed_order(fit[node], class_names),
            partition_id=numbers[node],
            num_partitions=total,
            model=models[numbers[node]],
        )
        for node in ordered
    }
    for node in ordered:
        log.info("Client %s is owner %s.", numbers[node], called[node])
    return settled, unfit


def _called(node: int, description: Description) -> str:
    """Name an owner in a log, so that two of one name can be told apart."""
    return f'"{description.name}" (node {node})'


def describe_nodes(
    grid: Grid, nodes: list[int], config: RunConfig
) -> dict[int, Description | Unfit | str]:
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
    out: dict[int, Description | Unfit | str] = {
        nodes[failure.partition_id]: failure.reason for failure in exchange.failures
    }
    for index, reply in exchange.replies.items():
        kind = Unfit if Unfit.is_in(reply.content) else Description
        try:
            out[nodes[index]] = kind.from_record(reply.content)
        except PayloadError as error:
            out[nodes[index]] = f"A client's description is malformed: {error}"
    return out


def _refuse_twins(counts: Mapping[int, int]) -> None:
    twins = sorted(pid for pid, count in counts.items() if count > 1)
    raise RunError(
        f"Several nodes hold the same partition: {twins}. Give every SuperNode its own "
        "partition-id."
    )


def _agree(
    federation: Federation, what: str, value: Callable[[Description], object]
) -> None:
    """Compare one property over all clients."""
    groups: dict[object, list[int]] = {}
    for pid, description in federation.clients.items():
        groups.setdefault(value(description), []).append(pid)
    if len(groups) > 1:
        text = "; ".join(f"{v!r} on clients {pids}" for v, pids in groups.items())
        raise RunError(f"The clients disagree on the {what}: {text}.")


def _refuse_untrainable(federation: Federation, config: RunConfig) -> None:
    idle = [pid for pid in federation.clients if pid not in federation.trainable]
    is_few_shot = config.setting == "few-shot"
    if not federation.trainable:
        raise RunError(
            "No client has two classes with more than 25 nodes each. Use fewer clients."
            if is_few_shot
            else "No client has a training node. Check the split "
            "and the labels, or use fewer clients."
        )
    if idle and is_few_shot:
        log.warning(
            "Clients %s take no part: fewer than two of their classes have more than 25 "
            "nodes.",
            idle,
        )
    elif idle:
        log.warning("Clients %s have no training nodes: evaluated only.", idle)


def _tell_overlap(federation: Federation) -> None:
    """Say if no class is trained by two clients, where clients tell what they train."""
    counts = [d.class_counts for d in federation.clients.values()]
    trains = [sum(n > 0 for n in column) for column in zip(*counts, strict=True)]
    if all(counts) and len(federation.trainable) > 1 and max(trains) < 2:
        log.warning(
            "No class is trained by two clients: their label spaces do not overlap."
        )


def client_lines(federation: Federation) -> list[dict[str, Any]]:
    """Return the lines of ``clients.jsonl`` that describe the clients, as round 0."""
    lines = []
    for client in federation.clients.values():
        about = asdict(client)
        del about["public_key"]  # new in every run, and of no use later
        lines.append({"round": 0, **about, "trains": client.num_train > 0})
    return lines
