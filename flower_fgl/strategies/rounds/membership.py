"""Who a newcomer is: a client of before, one that may join now, or neither."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flower_fgl.core.config import RunConfig
from flower_fgl.nn import assign_models
from flower_fgl.protocols.describe import UNNUMBERED, Description
from flower_fgl.strategies.federation import Federation
from flower_fgl.strategies.rounds.schema_agreement import in_agreed_order

__all__ = ["admit_new_client", "match_known_client"]

NEXT_RUN = "It can take part in the next run."


def match_known_client(
    clients: Mapping[int, Description], newcomer: Description
) -> tuple[int, Description] | str | None:
    """Find the client that a newcomer was before.

    Parameters
    ----------
    clients : mapping of int to Description
        Of the run, by partition-id.
    newcomer : Description
        What a node says of itself.

    Returns
    -------
    tuple of int and Description, str or None
        Partition-id and description as agreed; why it cannot take part, if it says to be
        a client whose graph it does not have; ``None`` if it was none of them.

    Notes
    -----
    1. An owner is known by its name and graph: who joined late may have another number
       than its own.
    """
    same = [
        pid
        for pid, client in clients.items()
        if client.is_owned == newcomer.is_owned and client.name == newcomer.name
    ]
    told = [pid for pid in same if newcomer.partition_id in (UNNUMBERED, pid)]
    others = [pid for pid in same if newcomer.is_owned and pid not in told]
    for pid in [*told, *others]:
        client, description = clients[pid], newcomer
        if client.is_owned and set(newcomer.class_names) <= set(client.class_names):
            description = replace(
                in_agreed_order(newcomer, client.class_names),
                partition_id=pid,
                num_partitions=client.num_partitions,
                model=client.model,
            )
        if replace(description, public_key=b"") == replace(client, public_key=b""):
            return pid, description
    if told:
        return (
            f"{_called(newcomer)} has another graph than the client of that name had when "
            "the run began. Bring that graph back, or start a new run."
        )
    return None


def admit_new_client(
    federation: Federation, newcomer: Description, config: RunConfig
) -> Description | str:
    """Give a place to a newcomer that was no client before, if there is one that it fits.

    Parameters
    ----------
    federation : Federation
        The clients so far.
    newcomer : Description
        What a node says of itself.
    config : RunConfig
        ``clients``, ``min_clients`` and ``model`` are read.

    Returns
    -------
    Description or str
        Its description as agreed, with its number; or why it cannot take part.
    """
    called = _called(newcomer)
    late = f"{called} was not among the clients when the run began"
    places = federation.capacity(config)
    if not config.min_clients:
        return f"{late}. {NEXT_RUN}"
    if len(federation.clients) >= places:
        return f"{late}, and its {places} places are taken. {NEXT_RUN}"
    if newcomer.is_owned != federation.is_owned:
        what = (
            "partitions of a data set" if newcomer.is_owned else "graphs of their own"
        )
        return f"{called} does not fit: the clients of this run hold {what}."
    settle = _place_of_owner if newcomer.is_owned else _place_of_partition
    settled = settle(federation, newcomer)
    if isinstance(settled, str):
        return settled
    models = assign_models(config.model, settled.num_partitions)
    return replace(settled, model=models[settled.partition_id])


def _place_of_partition(
    federation: Federation, newcomer: Description
) -> Description | str:
    """Compare a holder of a partition with the others; its number is its own."""
    first = next(iter(federation.clients.values()))
    for what, key in (
        ("partition", "partition_sha256"),
        ("number of partitions", "num_partitions"),
        ("feature width", "num_features"),
        ("list of class names", "class_names"),
    ):
        if getattr(newcomer, key) != getattr(first, key):
            return (
                f"{_called(newcomer)} has another {what} than the clients of this run. "
                "Start its SuperNode with the data and the num-partitions of the others."
            )
    return newcomer


def _place_of_owner(federation: Federation, newcomer: Description) -> Description | str:
    """Compare an owner's features and classes with what was agreed, and number it."""
    called, names = _called(newcomer), federation.class_names
    if newcomer.num_features != federation.num_features:
        return (
            f"the graph of {called} has {newcomer.num_features} features, the others' "
            f"have {federation.num_features}."
        )
    unknown = [name for name in newcomer.class_names if name not in names]
    if unknown:
        return (
            f"{called} has classes that nobody had when the run began "
            f"({', '.join(unknown[:5])}), and the classes of a run cannot change any "
            f"more: {', '.join(names[:20])}. {NEXT_RUN}"
        )
    total = federation.num_partitions
    free = [pid for pid in range(total) if pid not in federation.clients]
    number = newcomer.partition_id if newcomer.partition_id in free else free[0]
    return replace(
        in_agreed_order(newcomer, names),
        partition_id=number,
        num_partitions=total,
    )


def _called(newcomer: Description) -> str:
    return newcomer.name or f"partition-id {newcomer.partition_id}"
