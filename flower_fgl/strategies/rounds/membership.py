"""Decisions on a connecting node: it is a known client, a new one, or rejected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flower_fgl.core.config import RunConfig
from flower_fgl.core.schema import Schema
from flower_fgl.core.targets import differing_unit
from flower_fgl.nn import assign_models
from flower_fgl.protocols.describe import HASHED, UNNUMBERED, Description
from flower_fgl.strategies.federation import Federation
from flower_fgl.strategies.rounds.schema_agreement import (
    differing_features,
    in_agreed_order,
)

__all__ = ["admit_new_client", "match_known_client"]

NEXT_RUN = "It can take part in the next run."


def match_known_client(
    clients: Mapping[int, Description], candidate: Description
) -> tuple[int, Description] | str | None:
    """Find the client of the run that a connecting node is, ``None`` for an unknown node.

    Returns its partition-id and its description in the agreed class order; or the reason
    for a rejection: the node identifies itself as a client but holds another graph. A
    data owner is matched by name and graph: its partition-id may differ from the one in
    its node config if it joined late.
    """
    same = [
        pid
        for pid, client in clients.items()
        if client.is_owned == candidate.is_owned and client.name == candidate.name
    ]
    claimed = [pid for pid in same if candidate.partition_id in (UNNUMBERED, pid)]
    others = [pid for pid in same if candidate.is_owned and pid not in claimed]
    for pid in [*claimed, *others]:
        client, description = clients[pid], candidate
        if client.is_owned and set(candidate.class_names) <= set(client.class_names):
            description = replace(
                in_agreed_order(candidate, client.target, client.feature_names),
                partition_id=pid,
                num_partitions=client.num_partitions,
                model=client.model,
            )
        if replace(description, public_key=b"") == replace(client, public_key=b""):
            return pid, description
    if claimed:
        return (
            f"{_label(candidate)} has another graph than the client of that name had when "
            "the run began. Restore that graph, or start a new run. If it is another "
            "owner, set a name of its own in its node config."
        )
    return None


def admit_new_client(
    federation: Federation, candidate: Description, config: RunConfig
) -> Description | str:
    """Admit an unknown node if it fits and a partition-id is free; or return why not."""
    label = _label(candidate)
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
    check = _check_owner if candidate.is_owned else _check_partition
    client = check(federation, candidate)
    if isinstance(client, str):
        return client
    models = assign_models(config.model, client.num_partitions)
    return replace(client, model=models[client.partition_id])


def _check_partition(
    federation: Federation, candidate: Description
) -> Description | str:
    """Compare a node that holds a partition with the clients; it keeps its number."""
    first = next(iter(federation.clients.values()))
    for what, key in (
        ("partition", "partition_sha256"),
        ("number of partitions", "num_partitions"),
        ("feature width", "num_features"),
        ("list of class names", "class_names"),
    ):
        if getattr(candidate, key) != getattr(first, key):
            return (
                f"{_label(candidate)} has another {what} than the clients of this run. "
                "Start its SuperNode with the same data and num-partitions as the others."
            )
    return candidate


def _check_owner(federation: Federation, candidate: Description) -> Description | str:
    """Compare a data owner's features and classes with the agreed ones; number it."""
    label, names = _label(candidate), federation.class_names
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
    unknown = [name for name in candidate.class_names if name not in names]
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


def _label(candidate: Description) -> str:
    """Return a data owner's name, or the partition-id."""
    return candidate.name or f"partition-id {candidate.partition_id}"
