"""The describe exchange before round 1 and the checks of its replies."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

from flwr.serverapp import Grid

from flower_fgl.core.class_names import agree_classes, classes_apart, odd_spellings
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.core.feature_names import NOT_PREPARED
from flower_fgl.core.sampling import describe_sampling, num_sampled
from flower_fgl.core.settings import has_targets
from flower_fgl.nn import assign_models
from flower_fgl.protocols.describe import (
    MAX_CLASSES,
    UNNUMBERED,
    Description,
    Rejection,
)
from flower_fgl.strategies.federation import Federation, node_label
from flower_fgl.strategies.rounds.discovery import (
    wait_for_clients,
    wait_for_known_clients,
)
from flower_fgl.strategies.rounds.schema_agreement import (
    agree_features,
    agree_width,
    differing_features,
    in_agreed_order,
    number_owners,
    without_own_name,
)

__all__ = ["discover"]

log = logging.getLogger(__name__)

MOST_NAMES = 20
"""Class names that an error message lists."""
MOST_OWNERS = 5
"""Data owners that an error message about classes lists."""
MOST_NUMBERS = 10_000
"""Partition-ids of a run that names no number of clients; some methods have a tensor for
each, and an owner's claim must not fill the server's memory."""
MOST_OWN_CLASSES = 1000
"""Largest number of classes that only one data owner names."""
SHARED: dict[str, Callable[[Description], Hashable]] = {
    "number of partitions": lambda d: d.num_partitions,
    "feature width": lambda d: d.num_features,
    "number of edge features": lambda d: d.num_edge_features,
    "class names": lambda d: d.class_names,
    "partition": lambda d: d.partition_sha256,
}
"""What all clients of a run have in common."""


def _shared(
    config: RunConfig,
) -> dict[str, Callable[[Description], Hashable]]:
    """Return :data:`SHARED` without what the owners' own layers allow to differ."""
    free = {
        "feature width": config.feature_align == "project",
        "class names": config.has_local_heads,
    }
    return {what: value for what, value in SHARED.items() if not free.get(what)}


def discover(
    grid: Grid, config: RunConfig, before: Mapping[int, Description] | None = None
) -> Federation:
    """Wait for the clients, request their descriptions, and check them.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    config : RunConfig
        Settings, among them ``clients``, ``min_clients`` and ``join_timeout``.
    before : mapping of int to Description, optional
        The clients of an interrupted run, by partition-id. The function waits for these
        clients, and they keep their partition-ids.

    Raises
    ------
    RunError
        If too few nodes connect or can take part, no majority decides on features,
        classes or partition, or too few clients can train.

    Notes
    -----
    1. A client that differs from most others in what all must share is left out, with a
       warning: one client must not end the run.
    """
    if before:
        described, refused, queried = wait_for_known_clients(grid, config, before)
    else:
        described, refused, queried = wait_for_clients(grid, config)
        described, refused = _check_and_number(described, refused, config)
    federation = Federation.of(
        described, refused=refused, turned_away=frozenset(queried) - described.keys()
    )
    for what, value in _shared(config).items():
        _require_equal(federation, what, value)
    _reject_untrainable(federation, config)
    if config.positive_class and not config.has_local_heads:
        _require_class(config.positive_class, federation)
    # all classes of a few-shot client have ``shots`` training nodes, so that a larger
    # min-class-count hides every class
    if config.setting == "few-shot" and config.min_class_count <= config.shots:
        _warn_of_disjoint_classes(federation)
    if config.min_clients:
        _warn_of_missing_clients(federation, config)
    return federation


def _check_and_number(
    described: dict[int, Description], refused: tuple[Rejection, ...], config: RunConfig
) -> tuple[dict[int, Description], tuple[Rejection, ...]]:
    """Agree on what all clients share; leave out clients that differ from most others."""
    kinds = {True: "its own graph", False: "a partition of a dataset"}
    described, refused = _keep_majority(
        described, refused, "kind of data", lambda d: kinds[d.is_owned]
    )
    owned = sum(d.is_owned for d in described.values())
    if 0 < owned < len(described):
        raise RunError(
            f"{owned} nodes hold their own graphs and {len(described) - owned} hold "
            "partitions of a dataset. Start all SuperNodes with graph=..., or none."
        )
    if owned:
        described, refused = _agree_on_schema(described, refused, config)
    else:
        described, refused = _agree_on_partition(described, refused, config)
    counts = Counter(d.partition_id for d in described.values())
    if len(counts) < len(described):
        _reject_duplicates(counts)
    return described, refused


def _agree_on_partition(
    described: dict[int, Description], refused: tuple[Rejection, ...], config: RunConfig
) -> tuple[dict[int, Description], tuple[Rejection, ...]]:
    """Leave out nodes with another partition than most, and several nodes with one."""
    number = len(described)
    for what, value in _shared(config).items():
        described, refused = _keep_majority(described, refused, what, value)
    models = assign_models(
        config.model, max(d.num_partitions for d in described.values())
    )
    other_model = {
        node: f'its model is "{one.model}", the run has "{due}" for it.'
        for node, one in described.items()
        if one.model != (due := models[one.partition_id])
    }
    fit, refused = _leave_out(described, refused, other_model)
    fit, refused = _leave_out(fit, refused, _claimed_twice(fit, of=number))
    for out in refused:
        log.warning("%s does not take part: %s", out.name, out.reason)
    _require_enough(len(fit), "clients", refused, config)
    return fit, refused


def _keep_majority(
    described: dict[int, Description],
    refused: tuple[Rejection, ...],
    what: str,
    value: Callable[[Description], Hashable],
) -> tuple[dict[int, Description], tuple[Rejection, ...]]:
    """Leave out the nodes that differ from most in one property; none without majority."""
    (most, number), *_ = Counter(map(value, described.values())).most_common()
    if 2 * number <= len(described) or number == len(described):
        return described, refused
    reasons = {
        node: f"its {what} differs from that of most others: {_short(value(one))} instead "
        f"of {_short(most)}."
        for node, one in described.items()
        if value(one) != most
    }
    return _leave_out(described, refused, reasons)


def _leave_out(
    described: dict[int, Description],
    refused: tuple[Rejection, ...],
    reasons: Mapping[int, str],
) -> tuple[dict[int, Description], tuple[Rejection, ...]]:
    """Remove the nodes that have a reason; append these, in order, to the refused ones."""
    named = {node: _place(node, described[node]) for node in reasons}
    order = sorted(reasons, key=lambda node: (named[node], node))
    out = tuple(Rejection(named[node], reasons[node]) for node in order)
    return {n: d for n, d in described.items() if n not in reasons}, refused + out


def _place(node: int, description: Description) -> str:
    """Name a node in a log: the owner, or the partition."""
    if description.is_owned:
        return description.name
    return f"node {node} (partition {description.partition_id})"


def _short(value: object) -> str:
    """Quote at most 80 characters of a value."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _require_enough(
    number: int, what: str, rejected: tuple[Rejection, ...], config: RunConfig
) -> None:
    """Raise an error if fewer clients can take part than the settings ask for."""
    least, key = max(
        (config.min_replies, "min-replies"), (config.min_clients, "min-clients")
    )
    if number < least:
        text = "; ".join(f"{one.name}: {one.reason}" for one in rejected)
        raise RunError(f"{number} {what} can take part, but {key} = {least}. {text}")


def _agree_on_schema(
    described: dict[int, Description],
    rejected: tuple[Rejection, ...],
    config: RunConfig,
) -> tuple[dict[int, Description], tuple[Rejection, ...]]:
    """Reject data owners with other features; number the others and their classes."""
    most = max(MOST_NUMBERS, config.clients)
    too_many = {
        node: f"it states num-partitions = {d.num_partitions}, this run has at most "
        f"{most}. Correct it, or set clients to the number of owners."
        for node, d in described.items()
        if d.num_partitions > most
    }
    described, rejected = _leave_out(described, rejected, too_many)
    if not described:
        _require_enough(0, "data owners", rejected, config)
    names = {node: node_label(node, d) for node, d in described.items()}
    width = agree_width({names[n]: d.num_features for n, d in described.items()})
    other_width = {
        node: f"its graph has {d.num_features} features, the graphs of the other clients "
        f"have {width}."
        for node, d in described.items()
        if d.num_features != width
    }
    fit, rejected = _leave_out(described, rejected, other_width)
    what = "number of edge features"
    fit, rejected = _keep_majority(fit, rejected, what, SHARED[what])
    agreed_on = agree_features({names[n]: d for n, d in fit.items()})
    if agreed_on is not None:
        differing = {n: differing_features(d, agreed_on) for n, d in fit.items()}
        fit, rejected = _leave_out(
            fit, rejected, {n: reason for n, reason in differing.items() if reason}
        )
        _warn_of_unnamed_features(fit)
    fit, rejected = _leave_out(fit, rejected, _claimed_twice(fit, of=len(described)))
    fit, rejected = _leave_out(fit, rejected, _named_twice(fit, of=len(described)))
    fit, rejected = _leave_out(fit, rejected, _too_many_classes(fit))
    fit, rejected = _leave_out(fit, rejected, _odd_spellings(fit))
    for one in rejected:
        log.warning("Data owner %s does not take part: %s", one.name, one.reason)
    _require_enough(len(fit), "data owners", rejected, config)
    _compare_classes(fit, config)
    numbers = number_owners(fit)
    total = max(max(numbers.values()) + 1, *(d.num_partitions for d in fit.values()))
    if config.min_clients:
        # numbers for clients that join later
        total = max(total, config.clients)
    models = assign_models(config.model, total)
    ordered = sorted(fit, key=lambda node: (numbers[node], node))
    class_names = agree_classes([fit[node].class_names for node in ordered])
    shared = (fit[node].feature_names for node in ordered)
    feature_names: tuple[str, ...] = next(filter(None, shared), ())
    agreed = {
        node: replace(
            in_agreed_order(fit[node], class_names, feature_names),
            partition_id=numbers[node],
            num_partitions=total,
            model=models[numbers[node]],
        )
        for node in ordered
    }
    for node in ordered:
        log.info("Client %s is data owner %s.", numbers[node], names[node])
    return agreed, rejected


def _warn_of_unnamed_features(described: Mapping[int, Description]) -> None:
    """Warn once of graphs whose columns, or recipes, cannot be compared."""
    unnamed = [d.name for d in described.values() if not d.features_sha256]
    if unnamed:
        log.warning(
            "The graphs of %s have no names of their features: the order of their columns "
            "is not checked.",
            ", ".join(sorted(unnamed)),
        )
    others = [d.name for d in described.values() if not d.prepared]
    if len(others) < len(described) and others:
        log.warning(NOT_PREPARED, ", ".join(sorted(others)))


def _too_many_classes(described: Mapping[int, Description]) -> dict[int, str]:
    """Return why owners are left out whose classes would swell or end the run."""
    holders = Counter(name for d in described.values() for name in set(d.class_names))
    reasons = {}
    for node, d in described.items():
        alone = sum(holders[name] == 1 for name in set(d.class_names))
        if alone > MOST_OWN_CLASSES and len(described) > 2:  # of two, which one lies?
            reasons[node] = (
                f"it names {alone:,} classes that no other client has, at most "
                f"{MOST_OWN_CLASSES:,} are allowed. Correct the labels of its graph."
            )
    # several owners together: those with most classes first
    kept = [node for node in described if node not in reasons]
    kept.sort(key=lambda n: (len(described[n].class_names), described[n].name, n))
    while len({c for node in kept for c in described[node].class_names}) > MAX_CLASSES:
        reasons[kept.pop()] = (
            f"the clients name more than {MAX_CLASSES:,} classes together, and it names "
            "most. Correct the labels of its graph."
        )
    return reasons


def _odd_spellings(described: Mapping[int, Description]) -> dict[int, str]:
    """Return why owners are left out that spell a class differently from most.

    Raises
    ------
    RunError
        If at most half of the owners remain without them.
    """
    nodes = {node_label(node, d): node for node, d in described.items()}
    odd = odd_spellings({name: described[n].class_names for name, n in nodes.items()})
    if odd and 2 * len(odd) >= len(described):
        text = " ".join(f"{name}: {odd[name]}" for name in sorted(odd)[:MOST_OWNERS])
        raise RunError(
            f"{len(odd)} of {len(described)} data owners spell a class differently from "
            f"others, without a majority. {text}"
        )
    return {nodes[name]: reason for name, reason in odd.items()}


def _compare_classes(described: Mapping[int, Description], config: RunConfig) -> None:
    """Warn of owners without a class in common with others; reject a run of such owners."""
    lists = {node_label(node, d): d.class_names for node, d in described.items()}
    reason, warnings = classes_apart(lists)
    if reason and config.setting != "few-shot":
        raise RunError(f"{reason}.")
    for warning in warnings:
        log.warning("%s", warning)


def _claimed_twice(described: Mapping[int, Description], *, of: int) -> dict[int, str]:
    """Return why nodes are left out whose partition-id another node has, too.

    Raises
    ------
    RunError
        If at most half of the ``of`` nodes of the run remain without them.
    """
    claims = Counter(d.partition_id for d in described.values())
    claims.pop(UNNUMBERED, None)
    twice = {
        n: d.partition_id for n, d in described.items() if claims[d.partition_id] > 1
    }
    if twice and 2 * (len(described) - len(twice)) <= of:
        _reject_duplicates(claims)
    return {
        node: f"{claims[claimed]} nodes have partition-id = {claimed}. Give every "
        "SuperNode its own."
        for node, claimed in twice.items()
    }


def _named_twice(described: Mapping[int, Description], *, of: int) -> dict[int, str]:
    """Return why data owners are left out whose name another owner has, too.

    Raises
    ------
    RunError
        If at most half of the ``of`` nodes of the run remain without them.
    """
    twice = without_own_name(described)
    if twice and 2 * (len(described) - len(twice)) <= of:
        raise RunError(
            f"No majority of owners can take part: {next(iter(twice.values()))}"
        )
    return twice


def _reject_duplicates(counts: Mapping[int, int]) -> None:
    """Raise an error that names the partitions held by several nodes."""
    duplicates = sorted(pid for pid, count in counts.items() if count > 1)
    raise RunError(
        f"Several nodes hold the same partition: {duplicates}. Give every SuperNode its "
        "own partition-id."
    )


def _require_equal(
    federation: Federation, what: str, value: Callable[[Description], object]
) -> None:
    """Raise an error if clients differ in one property."""
    groups: dict[object, list[int]] = {}
    for pid, description in federation.clients.items():
        groups.setdefault(value(description), []).append(pid)
    if len(groups) > 1:
        text = "; ".join(f"{_short(v)} on clients {p}" for v, p in groups.items())
        raise RunError(f"The clients disagree on the {what}: {text}.")


def _require_class(name: str, federation: Federation) -> None:
    """Reject a positive class that no client has."""
    if name not in federation.class_names:
        known = ", ".join(federation.class_names[:MOST_NAMES])
        raise RunError(
            f'positive-class = "{name}" is no class of the clients. Use one of: {known}.'
        )


def _report_single_class(federation: Federation) -> None:
    """Reject a run with a single class; warn if training items have only one."""
    clients = federation.clients.values()
    names = {name for client in clients for name in client.class_names}
    check = "Check the labels: a model that always predicts it looks perfect."
    if len(names) == 1:
        raise RunError(
            f'All labels are of one class, "{names.pop()}": nothing can be learned. '
            f"{check}"
        )
    counts: Counter[str] = Counter()
    for client in clients:
        counts.update(dict(zip(client.class_names, client.class_counts, strict=False)))
    held = +counts  # without zeros
    if len(held) == 1 and held.total() == sum(client.num_train for client in clients):
        name, number = held.most_common(1)[0]
        log.warning(
            'All %d training items are of the class "%s". %s', number, name, check
        )


def _reject_untrainable(federation: Federation, config: RunConfig) -> None:
    """Raise an error if too few clients can train; warn of clients that cannot."""
    idle = [pid for pid in federation.clients if pid not in federation.trainable]
    is_few_shot = config.setting == "few-shot"
    if not federation.trainable:
        raise RunError(
            "No client has two classes with more than 25 nodes each. Use fewer clients."
            if is_few_shot
            else "No client has a training node. Check the split "
            "and the labels, or use fewer clients."
        )
    if not (config.predicts_links or has_targets(config)):
        _report_single_class(federation)
    able = len(federation.trainable)
    sampled = num_sampled(config, able)
    if sampled < config.min_replies and not config.min_clients:
        raise RunError(
            f"{able} of {len(federation.clients)} clients can train, of which "
            f"{describe_sampling(config)} samples {sampled} per round, but min-replies "
            f"is {config.min_replies}. Lower min-replies, or sample more clients."
        )
    if idle and is_few_shot:
        log.warning(
            "Clients %s do not take part: fewer than two of their classes have more than "
            "25 nodes.",
            idle,
        )
    elif idle:
        log.warning("Clients %s have no training nodes and are only evaluated.", idle)
    for client in federation.clients.values():
        if client.name and not client.is_owned:
            _warn_of_owner(client, config)


def _warn_of_owner(client: Description, config: RunConfig) -> None:
    """Warn of a natural owner that cannot train, select a model or be tested."""
    for what, number in (
        ("training", client.num_train),
        ("validation", client.num_val),
        ("test", client.num_test),
    ):
        if not number:
            kind = "edges" if config.has_pairs else "nodes"
            known = "" if config.predicts_links else "labelled "
            log.warning(
                "Owner %s: There are no %s.", client.name, f"{known}{what} {kind}"
            )
    held = [
        n for n, c in zip(client.class_names, client.class_counts, strict=False) if c
    ]
    if len(held) == 1 and not config.predicts_links:
        log.warning(
            "Owner %s: All labelled training %s have the class %s.",
            client.name,
            "edges" if config.has_pairs else "nodes",
            held[0],
        )


def _warn_of_disjoint_classes(federation: Federation) -> None:
    """Warn if all clients report class counts and no class is trained by two clients."""
    counts = [d.class_counts for d in federation.clients.values()]
    trains = [sum(n > 0 for n in column) for column in zip(*counts, strict=True)]
    if all(counts) and len(federation.trainable) > 1 and max(trains) < 2:
        log.warning(
            "No class is trained by two clients: their label spaces do not overlap."
        )


def _warn_of_missing_clients(federation: Federation, config: RunConfig) -> None:
    """Log how many clients may join during the run."""
    capacity, found = federation.capacity(config), len(federation.clients)
    if found < capacity:
        log.warning(
            "The run starts with %d of %d clients (min-clients = %d). The %d missing "
            "clients may join between two rounds.",
            found,
            capacity,
            config.min_clients,
            capacity - found,
        )
