"""Who takes part: the describe exchange before round 1, and what must agree.

Clients that hold partitions of one data set must all be there and agree: anything else is
an error, but that with ``min-clients`` some may join later. Of owners who bring their own
graphs, one that does not fit is refused by name and the run goes on with the others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flower_fgl.core.config import RunConfig
from flower_fgl.protocols.describe import ClassAgreement, Description, Rejection

__all__ = ["Federation", "called", "client_lines"]

log = logging.getLogger(__name__)


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
    turned_away : frozenset of int
        Ids of nodes that were asked and are no clients.
    """

    clients: Mapping[int, Description]
    nodes: Mapping[int, int]
    refused: tuple[Rejection, ...] = ()
    turned_away: frozenset[int] = frozenset()

    @classmethod
    def of(cls, described: Mapping[int, Description], **more: Any) -> Federation:
        """Make one of descriptions by node id, their numbers settled."""
        nodes = {client.partition_id: node for node, client in described.items()}
        return cls(
            {pid: described[nodes[pid]] for pid in sorted(nodes)},
            {pid: nodes[pid] for pid in sorted(nodes)},
            **more,
        )

    def joined_by(self, node: int, client: Description) -> Federation:
        """Return the federation with one client more."""
        described = {self.nodes[pid]: old for pid, old in self.clients.items()}
        more = {"refused": self.refused, "turned_away": self.turned_away}
        return Federation.of({**described, node: client}, **more)

    def places(self, config: RunConfig) -> int:
        """Return how many clients there may be."""
        return config.clients or self.num_partitions

    @property
    def partitions(self) -> dict[int, int]:
        """Partition-id of each of Flower's node ids."""
        return {node: pid for pid, node in self.nodes.items()}

    @property
    def num_partitions(self) -> int:
        """How many numbers there are for clients, whether all have a client or not."""
        return next(iter(self.clients.values())).num_partitions

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

    def agreement(self, partition_id: int) -> ClassAgreement | None:
        """Return what every message to an owner repeats; ``None`` for partitions."""
        client = self.clients[partition_id]
        if not client.is_owned:
            return None
        return ClassAgreement(partition_id, client.num_partitions, self.class_names)

    @property
    def trainable(self) -> list[int]:
        """Partition-ids of the clients that have training nodes."""
        return [pid for pid, client in self.clients.items() if client.num_train > 0]


def called(node: int, description: Description) -> str:
    """Name an owner in a log, so that two of one name can be told apart."""
    return f'"{description.name}" (node {node})'


def client_lines(
    clients: Iterable[Description], server_round: int = 0
) -> list[dict[str, Any]]:
    """Return the lines of ``clients.jsonl`` that describe clients.

    Parameters
    ----------
    clients : iterable of Description
        Who takes part.
    server_round : int
        The first round of clients that joined late, else 0.

    Returns
    -------
    list of dict
    """
    lines = []
    for client in clients:
        about = asdict(client)
        del about["public_key"]  # new in every run, and of no use later
        lines.append({"round": server_round, **about, "trains": client.num_train > 0})
    return lines
