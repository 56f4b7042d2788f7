"""The describe exchange before round 1 and the checks of the whole federation."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from flwr.serverapp import Grid

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.core.sampling import describe_sampling, num_sampled
from flower_fgl.core.settings import has_targets
from flower_fgl.core.targets import CLASSES
from flower_fgl.protocols.describe import Description
from flower_fgl.strategies.federation import Federation
from flower_fgl.strategies.rounds.candidates import Candidates, shared, short
from flower_fgl.strategies.rounds.discovery import (
    wait_for_clients,
    wait_for_known_clients,
)

__all__ = ["discover"]

log = logging.getLogger(__name__)

MOST_NAMES = 20
"""Class names that an error message lists."""


def discover(
    grid: Grid, config: RunConfig, before: Mapping[int, Description] | None = None
) -> Federation:
    """Wait for the clients, request their descriptions, and check them.

    ``before`` holds the clients of an interrupted run by partition-id: the function waits
    for these, and they keep their partition-ids. A client that differs from most others
    in what all must share is left out with a warning: one client must not end the run. A
    RunError says that too few nodes connect, take part or train, or no majority decides.
    """
    if before:
        described, refused, queried = wait_for_known_clients(grid, config, before)
    else:
        found, rejected, queried = wait_for_clients(grid, config)
        candidates = Candidates(found, list(rejected), config)
        candidates.agree()
        described, refused = candidates.described, tuple(candidates.rejected)
    federation = Federation.of(
        described, refused=refused, turned_away=frozenset(queried) - described.keys()
    )
    for what, value in shared(config).items():
        _require_equal(federation, what, value)
    _reject_untrainable(federation, config)
    name, known = config.positive_class, federation.class_names
    if name and name not in known and not config.has_local_heads:
        raise RunError(
            f'positive-class = "{name}" is no class of the clients. Use one of: '
            f"{', '.join(known[:MOST_NAMES])}."
        )
    # all classes of a few-shot client have ``shots`` training nodes, so that a larger
    # min-class-count hides every class
    if config.setting == "few-shot" and config.min_class_count <= config.shots:
        _warn_of_disjoint_classes(federation)
    if config.min_clients:
        _warn_of_missing_clients(federation, config)
    return federation


def _require_equal(
    federation: Federation, what: str, value: Callable[[Description], object]
) -> None:
    """Raise an error if clients differ in one property."""
    groups: dict[object, list[int]] = {}
    for pid, description in federation.clients.items():
        groups.setdefault(value(description), []).append(pid)
    if len(groups) > 1:
        text = "; ".join(f"{short(v)} on clients {p}" for v, p in groups.items())
        raise RunError(f"The clients disagree on the {what}: {text}.")


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
    has_classes = config.predicts == CLASSES and not config.predicts_links
    if has_classes and not has_targets(config):
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
