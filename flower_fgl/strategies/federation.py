"""Who takes part: the describe exchange before round 1, and what must agree.

Clients that hold partitions of one data set must all be there and agree: anything else is
an error, but that with ``min-clients`` some may join later. Of owners who bring their own
graphs, one that does not fit is refused by name and the run goes on with the others.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from flwr.serverapp import Grid

from flower_fgl.config import RunConfig
from flower_fgl.errors import RunError
from flower_fgl.nn import deal_models
from flower_fgl.protocols.describe import Agreement, Description, Unfit
from flower_fgl.setting_checks import number_asked, why_asked
from flower_fgl.strategies.agreement import (
    agree_classes,
    agree_width,
    in_agreed_order,
    number_owners,
)
from flower_fgl.strategies.gathering import gather, gather_again

__all__ = ["Federation", "called", "client_lines", "discover"]

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
    refused: tuple[Unfit, ...] = ()
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

    def agreement(self, partition_id: int) -> Agreement | None:
        """Return what every message to an owner repeats; ``None`` for partitions."""
        client = self.clients[partition_id]
        if not client.is_owned:
            return None
        return Agreement(partition_id, client.num_partitions, self.class_names)

    @property
    def trainable(self) -> list[int]:
        """Partition-ids of the clients that have training nodes."""
        return [pid for pid, client in self.clients.items() if client.num_train > 0]


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
        described, refused, asked = gather_again(grid, config, before)
    else:
        described, refused, asked = gather(grid, config)
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
    described: dict[int, Description], refused: tuple[Unfit, ...], config: RunConfig
) -> tuple[dict[int, Description], tuple[Unfit, ...]]:
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
    described: Mapping[int, Description], unfit: tuple[Unfit, ...], config: RunConfig
) -> tuple[dict[int, Description], tuple[Unfit, ...]]:
    """Drop owners whose features do not fit, number the others, agree on classes."""
    names = {node: called(node, d) for node, d in described.items()}
    width = agree_width({names[n]: d.num_features for n, d in described.items()})
    fit = {n: d for n, d in described.items() if d.num_features == width}
    unfit += tuple(
        Unfit(
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
    models = deal_models(config.model, total)
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
        log.info("Client %s is owner %s.", numbers[node], names[node])
    return settled, unfit


def called(node: int, description: Description) -> str:
    """Name an owner in a log, so that two of one name can be told apart."""
    return f'"{description.name}" (node {node})'


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
    asked = number_asked(config, able)
    if asked < config.min_replies and not config.min_clients:
        raise RunError(
            f"{able} of {len(federation.clients)} clients can train, of which "
            f"{why_asked(config)} asks {asked} a round, but min-replies is "
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
    places, found = federation.places(config), len(federation.clients)
    if found < places:
        log.warning(
            "%d of %d clients are there, which is enough (min-clients = %d). The %d that "
            "are missing may join between two rounds.",
            found,
            places,
            config.min_clients,
            places - found,
        )


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
