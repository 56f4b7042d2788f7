"""The describe exchange before round 1 and the checks of its replies."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from flwr.serverapp import Grid

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.core.settings_validation import describe_sampling, num_sampled
from flower_fgl.nn import assign_models
from flower_fgl.protocols.describe import Description, Rejection
from flower_fgl.strategies.federation import Federation, node_label
from flower_fgl.strategies.rounds.discovery import (
    wait_for_clients,
    wait_for_known_clients,
)
from flower_fgl.strategies.rounds.schema_agreement import (
    agree_classes,
    agree_width,
    in_agreed_order,
    number_owners,
)

__all__ = ["discover"]

log = logging.getLogger(__name__)


def discover(
    grid: Grid, config: RunConfig, before: Mapping[int, Description] | None = None
) -> Federation:
    """Wait for the clients, ask each to describe itself, and compare.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    config : RunConfig
        ``clients``, ``min_clients`` and ``join_timeout`` are read.
    before : mapping of int to Description, optional
        The clients of a run that goes on, by partition-id: these are waited for, and
        keep their numbers.

    Returns
    -------
    Federation

    Raises
    ------
    RunError
        If too few nodes connect, a node cannot describe itself, two nodes hold the same
        partition, or they disagree on features, classes or partition.
    """
    if before:
        described, refused, asked = wait_for_known_clients(grid, config, before)
    else:
        described, refused, asked = wait_for_clients(grid, config)
        described, refused = _compare(described, refused, config)
    federation = Federation.of(
        described, refused=refused, turned_away=frozenset(asked) - described.keys()
    )
    _agree(federation, "feature width", lambda d: d.num_features)
    _agree(federation, "class names", lambda d: d.class_names)
    _agree(federation, "partition", lambda d: d.partition_sha256)
    _refuse_untrainable(federation, config)
    # every class of a client has as many training nodes: below min-class-count none is told
    if config.setting == "few-shot" and config.min_class_count <= config.shots:
        _tell_overlap(federation)
    if config.min_clients:
        _tell_missing(federation, config)
    return federation


def _compare(
    described: dict[int, Description], refused: tuple[Rejection, ...], config: RunConfig
) -> tuple[dict[int, Description], tuple[Rejection, ...]]:
    """Settle all that owners must agree on; refuse a mixture, and twins."""
    owned = sum(d.is_owned for d in described.values())
    if 0 < owned < len(described):
        raise RunError(
            f"{owned} nodes bring their own graphs and {len(described) - owned} hold "
            "partitions of a data set. Start all SuperNodes with graph=..., or none."
        )
    if owned:
        described, refused = _settle(described, refused, config)
    counts = Counter(d.partition_id for d in described.values())
    if len(counts) < len(described):
        _refuse_twins(counts)
    return described, refused


def _settle(
    described: Mapping[int, Description],
    unfit: tuple[Rejection, ...],
    config: RunConfig,
) -> tuple[dict[int, Description], tuple[Rejection, ...]]:
    """Drop owners whose features do not fit, number the others, agree on classes."""
    names = {node: node_label(node, d) for node, d in described.items()}
    width = agree_width({names[n]: d.num_features for n, d in described.items()})
    fit = {n: d for n, d in described.items() if d.num_features == width}
    unfit += tuple(
        Rejection(
            d.name,
            f"its graph has {d.num_features} features, the others' have {width}.",
        )
        for node, d in described.items()
        if node not in fit
    )
    for one in unfit:
        log.warning("Owner %s does not take part: %s", one.name, one.reason)
    least, key = max(
        (config.min_replies, "min-replies"), (config.min_clients, "min-clients")
    )
    if len(fit) < least:
        text = "; ".join(f"{one.name}: {one.reason}" for one in unfit)
        raise RunError(f"{len(fit)} owners can take part, but {key} = {least}. {text}")
    numbers = number_owners(fit)
    total = max(max(numbers.values()) + 1, *(d.num_partitions for d in fit.values()))
    if config.min_clients:
        total = max(total, config.clients)  # those who join later must have numbers
    models = assign_models(config.model, total)
    ordered = sorted(fit, key=lambda node: (numbers[node], node))
    class_names = agree_classes([fit[node].class_names for node in ordered])
    settled = {
        node: replace(
            in_agreed_order(fit[node], class_names),
            partition_id=numbers[node],
            num_partitions=total,
            model=models[numbers[node]],
        )
        for node in ordered
    }
    for node in ordered:
        log.info("Client %s is data owner %s.", numbers[node], names[node])
    return settled, unfit


def _refuse_twins(counts: Mapping[int, int]) -> None:
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


def _refuse_untrainable(federation: Federation, config: RunConfig) -> None:
    idle = [pid for pid in federation.clients if pid not in federation.trainable]
    is_few_shot = config.setting == "few-shot"
    if not federation.trainable:
        raise RunError(
            "No client has two classes with more than 25 nodes each. Use fewer clients."
            if is_few_shot
            else "No client has a training node. Check the split "
            "and the labels, or use fewer clients."
        )
    able = len(federation.trainable)
    asked = num_sampled(config, able)
    if asked < config.min_replies and not config.min_clients:
        raise RunError(
            f"{able} of {len(federation.clients)} clients can train, of which "
            f"{describe_sampling(config)} asks {asked} a round, but min-replies is "
            f"{config.min_replies}: no round could end. Lower min-replies, or ask more."
        )
    if idle and is_few_shot:
        log.warning(
            "Clients %s take no part: fewer than two of their classes have more than 25 "
            "nodes.",
            idle,
        )
    elif idle:
        log.warning("Clients %s have no training nodes: evaluated only.", idle)


def _tell_overlap(federation: Federation) -> None:
    """Say if no class is trained by two clients, where clients tell what they train."""
    counts = [d.class_counts for d in federation.clients.values()]
    trains = [sum(n > 0 for n in column) for column in zip(*counts, strict=True)]
    if all(counts) and len(federation.trainable) > 1 and max(trains) < 2:
        log.warning(
            "No class is trained by two clients: their label spaces do not overlap."
        )


def _tell_missing(federation: Federation, config: RunConfig) -> None:
    """Say how many clients may join while the run is under way."""
    places, found = federation.capacity(config), len(federation.clients)
    if found < places:
        log.warning(
            "%d of %d clients are there, which is enough (min-clients = %d). The %d that "
            "are missing may join between two rounds.",
            found,
            places,
            config.min_clients,
            places - found,
        )
