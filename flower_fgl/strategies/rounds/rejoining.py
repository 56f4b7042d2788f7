"""Nodes that connect during a run; each is reconnected, admitted or rejected.

A SuperNode that was restarted without a key has a new node id. It is matched by its
description to the client it was before.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from flower_fgl.protocols.describe import UNNUMBERED, Description, Rejection
from flower_fgl.strategies.federation import client_lines, node_label
from flower_fgl.strategies.rounds.discovery import Lost, describe_nodes
from flower_fgl.strategies.rounds.membership import admit_new_client, match_known_client
from flower_fgl.strategies.rounds.messenger import Messenger
from flower_fgl.strategies.rounds.schema_agreement import without_own_name
from flower_fgl.strategies.rounds.silence import Silence, note_replies

__all__ = ["LateJoiners"]

log = logging.getLogger(__name__)


@dataclass
class LateJoiners:
    """Nodes that were not connected when the run began, by node id."""

    refused: set[int] = field(default_factory=set)
    """Connected nodes that do not take part. One that disconnects is removed, so that a
    SuperNode with a key is queried again after a restart."""
    waiting: dict[int, tuple[int, Description]] = field(default_factory=dict)
    """Nodes that match a client, by partition-id, and replace its former node when that
    fails."""
    silent: dict[int, Silence] = field(default_factory=dict)
    """New nodes that sent no description."""

    def poll(
        self, messenger: Messenger, present: Collection[int], server_round: int
    ) -> None:
        """Request the descriptions of new nodes; reconnect, admit or reject these.

        ``present`` has the ids of all connected nodes, and ``server_round`` is the next
        round. The failures of the last round show which clients are lost.
        """
        loop = messenger.loop
        self.refused &= set(present)
        known = {*loop.federation.nodes.values(), *self.refused, *self.waiting}
        new = sorted(
            node
            for node in set(present) - known
            if not (node in self.silent and self.silent[node].is_paused(server_round))
        )
        if new:
            config = replace(messenger.config, join_timeout=0.0)
            answers = describe_nodes(messenger.grid, new, config)
            lost = [n for n, answer in answers.items() if isinstance(answer, Lost)]
            note_replies(self.silent, server_round, new, lost, kind="Node")
            answers = {n: a for n, a in answers.items() if n not in lost}
            found = {n: a for n, a in answers.items() if isinstance(a, Description)}
            for node, reason in without_own_name(found).items():
                answers[node] = Rejection(found[node].name, reason)
            for node in sorted(answers, key=lambda node: _order(node, answers[node])):
                self._consider(messenger, server_round, node, answers[node])
        failed = {failure.partition_id for failure in loop.log.failures}
        for node, (pid, description) in list(self.waiting.items()):
            if node not in present:
                del self.waiting[node]
            elif pid in failed or loop.federation.nodes[pid] not in present:
                del self.waiting[node]
                self.refused.add(loop.federation.nodes[pid])
                _reconnect(messenger, pid, node, description)

    def _consider(
        self,
        messenger: Messenger,
        server_round: int,
        node: int,
        answer: Description | Rejection | Lost,
    ) -> None:
        """Put a new node on the waiting list, admit it, or reject it with a reason."""
        federation = messenger.loop.federation
        found: tuple[int, Description] | Description | str | None
        if isinstance(answer, Description):
            found = match_known_client(federation.clients, answer)
            if found is None:
                found = admit_new_client(federation, answer, messenger.config)
        else:
            found = answer.reason
        if isinstance(found, str):
            self.refused.add(node)
            log.warning("Node %s does not take part in this run: %s", node, found)
        elif isinstance(found, Description):
            _admit(messenger, server_round, node, found)
        else:
            self.waiting[node] = found
            log.info("Node %s identifies itself as client %s.", node, found[0])


def _order(node: int, answer: Description | Rejection | Lost) -> tuple[bool, str, int]:
    """Return the sort key of a new node: nodes with a partition-id first, then by name."""
    if not isinstance(answer, Description):
        return True, "", node
    return answer.partition_id == UNNUMBERED, answer.name, node


def _admit(
    messenger: Messenger, server_round: int, node: int, client: Description
) -> None:
    """Make a new node a client from the next round on."""
    loop, pid = messenger.loop, client.partition_id
    loop.federation = loop.federation.joined_by(node, client)
    if messenger.recorder is not None:
        messenger.recorder.append_clients(client_lines([client], server_round))
    owner = f"is data owner {node_label(node, client)} and " if client.is_owned else ""
    log.info("Client %s %sjoins in round %s.", pid, owner, server_round)
    if not client.num_train:
        log.warning("Client %s has no training nodes and is only evaluated.", pid)


def _reconnect(
    messenger: Messenger, partition_id: int, node: int, description: Description
) -> None:
    """Give a client its new node id, after its SuperNode was restarted."""
    loop = messenger.loop
    nodes = {**loop.federation.nodes, partition_id: node}
    loop.federation = replace(loop.federation, nodes=nodes)
    loop.trained.pop(partition_id, None)  # its state may be lost
    loop.silent.pop(partition_id, None)
    if messenger.secure is not None:
        messenger.secure.renew(partition_id, description.public_key)
    log.warning("Client %s reconnected as node %s.", partition_id, node)
