"""Who takes part: the describe exchange before round 1, and what must agree."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from flower_fgl.config import RunConfig
from flower_fgl.errors import PayloadError, RunError
from flower_fgl.protocols.base import DESCRIBE
from flower_fgl.protocols.describe import Description
from flower_fgl.strategies.exchange import send_receive

__all__ = ["Federation", "client_lines", "discover"]

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
    """

    clients: Mapping[int, Description]
    nodes: Mapping[int, int]

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
    end = time.monotonic() + config.join_timeout
    described: dict[int, Description] = {}
    expected = config.clients
    while True:
        new = [node for node in grid.get_node_ids() if node not in described]
        described |= _describe(grid, new, config) if new else {}
        if described and not config.clients:
            expected = max(d.num_partitions for d in described.values())
        if len(described) > expected > 0:
            raise RunError(
                f"{len(described)} nodes are connected, but clients = {expected}. Set "
                "clients to their number, or to 0."
            )
        if described and len(described) == expected:
            break
        if time.monotonic() > end:
            raise RunError(
                f"Only {len(described)} of {expected or 'any'} clients connected within "
                f"{config.join_timeout:g} s. In a simulation set the number of "
                'supernodes (--federation-config "num-supernodes='
                f'{expected or 10}"); clients=0 takes as many as there are.'
            )
        time.sleep(POLL_SECONDS)
    by_partition = {d.partition_id: node for node, d in described.items()}
    if len(by_partition) < len(described):
        _refuse_twins(described)
    clients = {d.partition_id: d for d in described.values()}
    federation = Federation(
        {pid: clients[pid] for pid in sorted(clients)},
        {pid: by_partition[pid] for pid in sorted(by_partition)},
    )
    _agree(federation, "feature width", lambda d: d.num_features)
    _agree(federation, "class names", lambda d: d.class_names)
    _agree(federation, "partition", lambda d: d.partition_sha256)
    _refuse_untrainable(federation)
    return federation


def _describe(
    grid: Grid, nodes: list[int], config: RunConfig
) -> dict[int, Description]:
    """Ask some nodes; every one must answer well."""
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
    exchange = send_receive(grid, messages, timeout=timeout)
    if exchange.failures:
        reasons = Counter(failure.reason for failure in exchange.failures)
        text = "; ".join(f"{reason} ({n} clients)" for reason, n in reasons.items())
        raise RunError(f"Clients cannot take part: {text}")
    out = {}
    for index, reply in exchange.replies.items():
        try:
            out[nodes[index]] = Description.from_record(reply.content)
        except PayloadError as error:
            raise RunError(f"A client's description is malformed: {error}") from error
    return out


def _refuse_twins(described: Mapping[int, Description]) -> None:
    counts = Counter(d.partition_id for d in described.values())
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


def _refuse_untrainable(federation: Federation) -> None:
    idle = [pid for pid in federation.clients if pid not in federation.trainable]
    if not federation.trainable:
        raise RunError(
            "No client has a training node. Check the split "
            "and the labels, or use fewer clients."
        )
    if idle:
        log.warning("Clients %s have no training nodes: evaluated only.", idle)


def client_lines(federation: Federation) -> list[dict[str, Any]]:
    """Return the lines of ``clients.jsonl`` that describe the clients, as round 0."""
    lines = []
    for client in federation.clients.values():
        about = asdict(client)
        del about["public_key"]  # new in every run, and of no use later
        lines.append({"round": 0, **about, "trains": client.num_train > 0})
    return lines
