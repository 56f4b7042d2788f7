"""Nodes that connect during a run; each is reconnected, admitted or rejected.

A SuperNode that was restarted without a key has a new node id. It is matched by its
description to the client it was before.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from flower_fgl.core.config import RunConfig
from flower_fgl.core.schema import Schema
from flower_fgl.core.targets import differing_unit
from flower_fgl.nn import assign_models
from flower_fgl.protocols.describe import HASHED, UNNUMBERED, Description, Rejection
from flower_fgl.strategies.federation import Federation, client_lines, node_label
from flower_fgl.strategies.rounds.candidates import (
    differing_features,
    in_agreed_order,
    match_known_client,
    shared,
    without_own_name,
)
from flower_fgl.strategies.rounds.discovery import Lost, describe_nodes
from flower_fgl.strategies.rounds.loop_state import LoopState, Silence, note_replies
from flower_fgl.strategies.rounds.messenger import Messenger
from flower_fgl.strategies.rounds.secure_aggregation import SecureExchanges

__all__ = ["LateJoiners", "admit_new_client"]

log = logging.getLogger(__name__)
NEXT_RUN = "It can take part in the next run."


def admit_new_client(
    federation: Federation, candidate: Description, config: RunConfig
) -> Description | str:
    """Admit an unknown node if it fits and a partition-id is free; or return why not."""
    label = candidate.shown
    late = f"{label} was not among the clients when the run began"
    capacity = federation.capacity(config)
    if not config.min_clients:
        return f"{late}. {NEXT_RUN}"
    if len(federation.clients) >= capacity:
        return f"{late}, and all {capacity} partition-ids are taken. {NEXT_RUN}"
    if candidate.is_owned != federation.is_owned:
        what = (
            "partitions of a dataset" if candidate.is_owned else "graphs of their own"
        )
        return f"{label} does not fit: the clients of this run hold {what}."
    client = (
        _check_owner(federation, candidate)
        if candidate.is_owned
        else _check_partition(federation, candidate, config)
    )
    if isinstance(client, str):
        return client
    models = assign_models(config.model, client.num_partitions)
    return replace(client, model=models[client.partition_id])


def _check_partition(
    federation: Federation, candidate: Description, config: RunConfig
) -> Description | str:
    """Compare a node that holds a partition with the clients; it keeps its number."""
    first = next(iter(federation.clients.values()))
    for what, value in shared(config).items():
        if value(candidate) != value(first):
            return (
                f"{candidate.shown} has another {what} than the clients of this run. "
                "Start its SuperNode with the same data and num-partitions as the others."
            )
    return candidate


def _check_owner(federation: Federation, candidate: Description) -> Description | str:
    """Compare a data owner's features and classes with the agreed ones; number it."""
    label, names = candidate.shown, federation.target.names
    if candidate.num_features != federation.num_features:
        return (
            f"the graph of {label} has {candidate.num_features} features, the graphs of "
            f"the other clients have {federation.num_features}."
        )
    if candidate.num_edge_features != federation.num_edge_features:
        return (
            f"the edges of {label} have {candidate.num_edge_features} features, those of "
            f"the other clients have {federation.num_edge_features}."
        )
    if federation.schema is not None or candidate.schema:
        first = next(iter(federation.clients.values()))
        schema = federation.schema or Schema("", ())
        if unfit := _unfit_schema(candidate, first, schema):
            return f"{label} does not fit: {unfit}"
    named = [d for d in federation.clients.values() if d.features_sha256]
    named.sort(key=lambda d: not d.prepared)  # one with a recipe can be compared
    reason = differing_features(candidate, named[0]) if named else ""
    if reason:
        return f"{label} does not fit: {reason}"
    if candidate.target_kind != federation.target.kind:
        return (
            f"{label} does not fit: its targets are {candidate.target_kind}, those of the "
            f"other clients are {federation.target.kind}."
        )
    unknown = [name for name in candidate.target.names if name not in names]
    if unknown:
        return (
            f"{label} has {candidate.target_kind} that no client had when the run began "
            f"({', '.join(unknown[:5])}). They cannot change during a run: "
            f"{', '.join(names[:20])}. {NEXT_RUN}"
        )
    if other_unit := differing_unit(candidate.target, federation.target):
        return f"{label} does not fit: {other_unit}"
    total = federation.num_partitions
    free = [pid for pid in range(total) if pid not in federation.clients]
    number = candidate.partition_id if candidate.partition_id in free else free[0]
    return replace(
        in_agreed_order(
            candidate, federation.target, named[0].feature_names if named else ()
        ),
        partition_id=number,
        num_partitions=total,
    )


def _unfit_schema(candidate: Description, first: Description, agreed: Schema) -> str:
    """Return why the schema of a late owner does not fit a run; empty if it does."""
    told = candidate.told
    if told is None or first.told is None:
        is_alike = candidate.schema == first.schema
        return "" if is_alike else "its graph is not typed as those of the others."
    if candidate.schema.startswith(HASHED):
        is_alike = candidate.schema == first.schema
        return "" if is_alike else "its kinds of nodes and relations differ."
    known = {*agreed.widths, *agreed.relations}
    unknown = {*told.widths, *told.relations} - known
    if unknown or told.target != agreed.target:
        one = min(map(str, unknown), default=told.target)
        return f"it has {one}, which no client had when the run began."
    return ""


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
        self,
        messenger: Messenger,
        secure: SecureExchanges | None,
        present: Collection[int],
        server_round: int,
    ) -> None:
        """Reconnect, admit or reject the new ones of the connected nodes before a round.

        The failures of the last round show which clients are lost.
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
                _reconnect(messenger.loop, pid, node)
                if secure is not None:
                    secure.renew(pid, description.public_key)

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


def _reconnect(loop: LoopState, partition_id: int, node: int) -> None:
    """Give a client its new node id, after its SuperNode was restarted."""
    nodes = {**loop.federation.nodes, partition_id: node}
    loop.federation = replace(loop.federation, nodes=nodes)
    loop.trained.pop(partition_id, None)  # its state may be lost
    loop.silent.pop(partition_id, None)
    log.warning("Client %s reconnected as node %s.", partition_id, node)
