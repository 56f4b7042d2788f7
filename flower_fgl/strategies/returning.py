"""Nodes that appear while a run is under way: taken back, or refused by name.

A SuperNode that was killed and started again without a key has a new node id. It is
known by what it says of itself: the client it was before, with the same graph. Any other
newcomer is refused: the clients of a run are settled before round 1.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flower_fgl.protocols.describe import UNNUMBERED, Description, Unfit
from flower_fgl.strategies.agreement import in_agreed_order
from flower_fgl.strategies.federation import Federation, describe_nodes

if TYPE_CHECKING:
    from flower_fgl.strategies.base import FglStrategy

__all__ = ["Newcomers", "recognise"]

log = logging.getLogger(__name__)


@dataclass
class Newcomers:
    """Nodes that were not there when the run began.

    Parameters
    ----------
    refused : set of int
        Node ids that take no part in this run.
    waiting : dict of int to (int, Description)
        Nodes that say they are a client whose former node still answers: its
        partition-id and what they said. They take over when it fails.
    """

    refused: set[int] = field(default_factory=set)
    waiting: dict[int, tuple[int, Description]] = field(default_factory=dict)

    def welcome(self, strategy: FglStrategy) -> None:
        """Look for newcomers between two rounds, and take back who was here before.

        Parameters
        ----------
        strategy : FglStrategy
            Its ``federation`` is changed; the failures of its last round tell which
            clients are lost.
        """
        federation, present = strategy.federation, set(strategy._grid.get_node_ids())
        known = {*federation.nodes.values(), *self.refused, *self.waiting}
        new = sorted(present - known)
        if new:
            config = replace(strategy.config, join_timeout=0.0)
            answers = describe_nodes(strategy._grid, new, config)
            for node, answer in answers.items():
                self._consider(federation, node, answer)
        failed = {failure.partition_id for failure in strategy._round.failures}
        for node, (pid, description) in list(self.waiting.items()):
            if node not in present:
                del self.waiting[node]
            elif pid in failed or strategy.federation.nodes[pid] not in present:
                del self.waiting[node]
                self.refused.add(strategy.federation.nodes[pid])
                _take_back(strategy, pid, node, description)

    def _consider(
        self, federation: Federation, node: int, answer: Description | Unfit | str
    ) -> None:
        """Let a newcomer wait for its place, or refuse it with a reason."""
        found: tuple[int, Description] | str
        if isinstance(answer, Description):
            found = recognise(federation.clients, answer)
        else:
            found = answer.reason if isinstance(answer, Unfit) else answer
        if isinstance(found, str):
            self.refused.add(node)
            log.warning("Node %s takes no part in this run: %s", node, found)
            return
        self.waiting[node] = found
        log.info("Node %s says that it is client %s.", node, found[0])


def _take_back(
    strategy: FglStrategy, partition_id: int, node: int, description: Description
) -> None:
    """Let another node be a client from now on: its SuperNode was started anew."""
    nodes = {**strategy.federation.nodes, partition_id: node}
    strategy.federation = replace(strategy.federation, nodes=nodes)
    strategy._trained.pop(partition_id, None)  # its memory may be lost: to be sent anew
    if strategy.secure is not None:
        strategy.secure.renew(partition_id, description.public_key)
    log.warning("Client %s is back, as node %s.", partition_id, node)


def recognise(
    clients: Mapping[int, Description], newcomer: Description
) -> tuple[int, Description] | str:
    """Find the client that a newcomer was before.

    Parameters
    ----------
    clients : mapping of int to Description
        Of the run, by partition-id.
    newcomer : Description
        What a node says of itself.

    Returns
    -------
    tuple of int and Description, or str
        Partition-id and description as agreed; or why it cannot take part.
    """
    called = newcomer.name or f"partition-id {newcomer.partition_id}"
    same = [
        pid
        for pid, client in clients.items()
        if client.is_owned == newcomer.is_owned
        and client.name == newcomer.name
        and newcomer.partition_id in (UNNUMBERED, pid)
    ]
    if not same:
        return (
            f"{called} was not among the clients when the run began. It can take part in "
            "the next run."
        )
    for pid in same:
        client = clients[pid]
        told = newcomer
        if client.is_owned and set(newcomer.class_names) <= set(client.class_names):
            told = replace(
                in_agreed_order(newcomer, client.class_names),
                partition_id=pid,
                num_partitions=client.num_partitions,
                model=client.model,
            )
        if replace(told, public_key=b"") == replace(client, public_key=b""):
            return pid, told
    return (
        f"{called} has another graph than the client of that name had when the run began. "
        "Bring that graph back, or start a new run."
    )
