"""Nodes that appear while a run is under way: taken back, let in, or refused by name.

A SuperNode that was killed and started again without a key has a new node id. It is
known by what it says of itself: the client it was before, with the same graph. Any other
newcomer joins if the run has a place for it, which takes ``min-clients``, else it is
refused: the clients of a run are settled before round 1.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flower_fgl.protocols.describe import UNNUMBERED, Description, Rejection
from flower_fgl.strategies.federation import called, client_lines
from flower_fgl.strategies.rounds.discovery import describe_nodes
from flower_fgl.strategies.rounds.membership import admit_new_client, match_known_client

if TYPE_CHECKING:
    from flower_fgl.strategies.base import FglStrategy

__all__ = ["LateJoiners"]

log = logging.getLogger(__name__)


@dataclass
class LateJoiners:
    """Nodes that were not there when the run began.

    Parameters
    ----------
    refused : set of int
        Node ids that take no part in this run, as long as they are there: a SuperNode
        with a key that was started anew has the same one, and is asked again.
    waiting : dict of int to (int, Description)
        Nodes that say they are a client whose former node still answers: its
        partition-id and what they said. They take over when it fails.
    """

    refused: set[int] = field(default_factory=set)
    waiting: dict[int, tuple[int, Description]] = field(default_factory=dict)

    def poll(self, strategy: FglStrategy, server_round: int) -> None:
        """Look for newcomers between two rounds, and take back who was here before.

        Parameters
        ----------
        strategy : FglStrategy
            Its ``federation`` is changed; the failures of its last round tell which
            clients are lost.
        server_round : int
            The round to come.
        """
        federation, present = strategy.federation, set(strategy._grid.get_node_ids())
        self.refused &= present
        known = {*federation.nodes.values(), *self.refused, *self.waiting}
        new = sorted(present - known)
        if new:
            config = replace(strategy.config, join_timeout=0.0)
            answers = describe_nodes(strategy._grid, new, config)
            for node in sorted(answers, key=lambda node: _turn(node, answers[node])):
                self._consider(strategy, server_round, node, answers[node])
        failed = {failure.partition_id for failure in strategy._round.failures}
        for node, (pid, description) in list(self.waiting.items()):
            if node not in present:
                del self.waiting[node]
            elif pid in failed or strategy.federation.nodes[pid] not in present:
                del self.waiting[node]
                self.refused.add(strategy.federation.nodes[pid])
                _reconnect(strategy, pid, node, description)

    def _consider(
        self,
        strategy: FglStrategy,
        server_round: int,
        node: int,
        answer: Description | Rejection | str,
    ) -> None:
        """Let a newcomer wait for its place or join, or refuse it with a reason."""
        found: tuple[int, Description] | Description | str | None
        if isinstance(answer, Description):
            found = match_known_client(strategy.federation.clients, answer)
            if found is None:
                found = admit_new_client(strategy.federation, answer, strategy.config)
        else:
            found = answer.reason if isinstance(answer, Rejection) else answer
        if isinstance(found, str):
            self.refused.add(node)
            log.warning("Node %s takes no part in this run: %s", node, found)
        elif isinstance(found, Description):
            _admit(strategy, server_round, node, found)
        else:
            self.waiting[node] = found
            log.info("Node %s says that it is client %s.", node, found[0])


def _turn(node: int, answer: Description | Rejection | str) -> tuple[bool, str, int]:
    """Order newcomers of one moment: who has a number first, then by name."""
    if not isinstance(answer, Description):
        return True, "", node
    return answer.partition_id == UNNUMBERED, answer.name, node


def _admit(
    strategy: FglStrategy, server_round: int, node: int, client: Description
) -> None:
    """Make a newcomer a client from the coming round on."""
    pid = client.partition_id
    strategy.federation = strategy.federation.joined_by(node, client)
    if strategy.recorder is not None:
        strategy.recorder.append_clients(client_lines([client], server_round))
    who = f"is owner {called(node, client)} and " if client.is_owned else ""
    log.info("Client %s %sjoins in round %s.", pid, who, server_round)
    if not client.num_train:
        log.warning("Client %s has no training nodes: evaluated only.", pid)


def _reconnect(
    strategy: FglStrategy, partition_id: int, node: int, description: Description
) -> None:
    """Let another node be a client from now on: its SuperNode was started anew."""
    nodes = {**strategy.federation.nodes, partition_id: node}
    strategy.federation = replace(strategy.federation, nodes=nodes)
    strategy._trained.pop(partition_id, None)  # its memory may be lost: to be sent anew
    if strategy.secure is not None:
        strategy.secure.renew(partition_id, description.public_key)
    log.warning("Client %s is back, as node %s.", partition_id, node)
