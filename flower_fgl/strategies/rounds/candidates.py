"""The connected nodes of a run: agree on what all share, leave out those that differ.

All results depend on names and not on the order in which nodes connect.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace

from flower_fgl.core.agreement import (
    NOT_PREPARED,
    Told,
    agree_classes,
    classes_apart,
    differing_names,
    differing_recipes,
    differing_schemas,
    hash_names,
    odd_spellings,
)
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.core.held_kind import kind_of_most
from flower_fgl.core.options import AUTO
from flower_fgl.core.targets import (
    CLASSES,
    Target,
    TargetKind,
    agree_targets,
    targets_apart,
)
from flower_fgl.nn import assign_models
from flower_fgl.protocols.describe import (
    MAX_CLASSES,
    UNNUMBERED,
    Description,
    Rejection,
)
from flower_fgl.strategies.federation import node_label

__all__ = ["Candidates", "OtherKindError", "agree_features", "agree_width"]
__all__ += ["differing_features", "in_agreed_order", "match_known_client"]
__all__ += ["number_owners", "shared", "short", "without_own_name"]

log = logging.getLogger(__name__)

MOST_OWNERS = 5
"""Data owners that an error message about classes lists."""
MOST_NUMBERS = 10_000
"""Partition-ids of a run that names no number of clients; some methods have a tensor for
each, and an owner's claim must not fill the server's memory."""
MOST_OWN_CLASSES = 1000
"""Largest number of classes that only one data owner names."""
Property = Callable[[Description], Hashable]
EDGE_FEATURES = "number of edge features"
SHARED: dict[str, Property] = {
    "number of partitions": lambda d: d.num_partitions,
    "feature width": lambda d: d.num_features,
    EDGE_FEATURES: lambda d: d.num_edge_features,
    "list of class names": lambda d: d.target.names,
    "kind of target": lambda d: d.target_kind,
    "partition": lambda d: d.partition_sha256,
}
"""What all clients of a run have in common."""


def shared(config: RunConfig) -> dict[str, Property]:
    """Return :data:`SHARED` without what the owners' own layers allow to differ."""
    is_projected = config.feature_align == "project"
    free = {
        "feature width": is_projected,
        EDGE_FEATURES: is_projected and not config.classifies_edges,
        "list of class names": config.has_local_heads,
    }
    return {what: value for what, value in SHARED.items() if not free.get(what)}


def short(value: object) -> str:
    """Quote at most 80 characters of a value."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


class OtherKindError(RunError):
    """With ``target-kind = "auto"`` most data owners hold another ``kind`` than classes."""

    def __init__(self, kind: TargetKind) -> None:
        super().__init__(
            f'Most data owners hold {kind}. Set target-kind = "{kind}" to predict them.'
        )
        self.kind = kind


@dataclass
class Candidates:
    """Nodes that may take part, by node id, and those left out so far, in order."""

    described: dict[int, Description]
    rejected: list[Rejection]
    config: RunConfig

    def agree(self) -> None:
        """Agree on what all clients share; leave out clients that differ from most others.

        A RunError says that no majority decides, or too few nodes remain.
        """
        kinds = {True: "its own graph", False: "a partition of a dataset"}
        self._keep_majority("kind of data", lambda d: kinds[d.is_owned])
        number = len(self.described)
        owned = sum(d.is_owned for d in self.described.values())
        if 0 < owned < number:
            raise RunError(
                f"{owned} nodes hold their own graphs and {number - owned} hold "
                "partitions of a dataset. Start all SuperNodes with graph=..., or none."
            )
        if owned:
            self.agree_on_schema()
        else:
            self._agree_on_partition()
        counts = Counter(d.partition_id for d in self.described.values())
        if len(counts) < len(self.described):
            _reject_duplicates(counts)

    def _agree_on_partition(self) -> None:
        """Leave out nodes with another partition than most, and several nodes with one."""
        number = len(self.described)
        for what, value in shared(self.config).items():
            self._keep_majority(what, value)
        models = assign_models(
            self.config.model, max(d.num_partitions for d in self.described.values())
        )
        other_model = {
            node: f'its model is "{one.model}", the run has "{due}" for it.'
            for node, one in self.described.items()
            if one.model != (due := models[one.partition_id])
        }
        self._leave_out(other_model)
        self._leave_out(_claimed_twice(self.described, of=number))
        for out in self.rejected:
            log.warning("%s does not take part: %s", out.name, out.reason)
        self._require_enough("clients")

    def agree_on_schema(self) -> None:
        """Reject data owners with other features; number the others and their classes."""
        most = max(MOST_NUMBERS, self.config.clients)
        too_many = {
            node: f"it states num-partitions = {d.num_partitions}, this run has at most "
            f"{most}. Correct it, or set clients to the number of owners."
            for node, d in self.described.items()
            if d.num_partitions > most
        }
        self._leave_out(too_many)
        if not self.described:
            self._require_enough("data owners")
        number = len(self.described)
        self._agree_on_features()
        self._leave_out(_claimed_twice(self.described, of=number))
        self._leave_out(_named_twice(self.described, of=number))
        due = self.config.predicts
        if self.config.target_kind == AUTO and not self.config.predicts_links:
            held = kind_of_most(d.target_kind for d in self.described.values())
            if held != due:
                raise OtherKindError(held)
        other_kind = {
            node: f"its targets are {d.target_kind}, those of the other clients are {due}."
            for node, d in self.described.items()
            if d.target_kind != due
        }
        self._leave_out(other_kind)
        self._leave_out(_too_many_classes(self.described))
        self._leave_out_odd("spell a {} differently from others", _odd_spellings)
        if self.config.predicts != CLASSES:
            self._leave_out_odd(
                "measure a target in another unit than others",
                lambda targets: agree_targets(targets)[1],
            )
        for out in self.rejected:
            log.warning("Data owner %s does not take part: %s", out.name, out.reason)
        self._require_enough("data owners")
        self._compare_classes()
        self._number()

    def _agree_on_features(self) -> None:
        """Leave out data owners with other features of nodes or edges than most."""
        names = {node: node_label(node, d) for node, d in self.described.items()}
        if any(d.schema for d in self.described.values()):
            told = {
                node: Told(d.told, d.type_features) if d.told else None
                for node, d in self.described.items()
            }
            self._leave_out(differing_schemas(told, self.config.schema_align))
            if not self.described:
                return
        width = agree_width(
            {names[n]: d.num_features for n, d in self.described.items()}
        )
        other_width = {
            node: f"its graph has {d.num_features} features, the graphs of the other "
            f"clients have {width}."
            for node, d in self.described.items()
            if d.num_features != width
        }
        self._leave_out(other_width)
        self._keep_majority(EDGE_FEATURES, SHARED[EDGE_FEATURES])
        agreed = agree_features({names[n]: d for n, d in self.described.items()})
        if agreed is None:
            return
        found = {n: differing_features(d, agreed) for n, d in self.described.items()}
        self._leave_out({n: reason for n, reason in found.items() if reason})
        unnamed = [d.name for d in self.described.values() if not d.features_sha256]
        if unnamed:
            log.warning(
                "The graphs of %s have no names of their features: the order of their "
                "columns is not checked.",
                ", ".join(sorted(unnamed)),
            )
        others = [d.name for d in self.described.values() if not d.prepared]
        if len(others) < len(self.described) and others:
            log.warning(NOT_PREPARED, ", ".join(sorted(others)))

    def _compare_classes(self) -> None:
        """Warn of owners without a class in common with others; reject a run of such."""
        described = self.described.items()
        if self.config.predicts == CLASSES:
            lists = {node_label(node, d): d.target.names for node, d in described}
            reason, warnings = classes_apart(lists)
            reason = reason and f"{reason}."
        else:
            targets = {node_label(node, d): d.target for node, d in described}
            reason, warnings = targets_apart(targets)
        if reason and self.config.setting != "few-shot":
            raise RunError(reason)
        for warning in warnings:
            log.warning("%s", warning)

    def _number(self) -> None:
        """Give every data owner its partition-id and model, and classes in agreed order."""
        fit, config = self.described, self.config
        numbers = number_owners(fit)
        total = max(
            max(numbers.values()) + 1, *(d.num_partitions for d in fit.values())
        )
        if config.min_clients:
            # numbers for clients that join later
            total = max(total, config.clients)
        models = assign_models(config.model, total)
        ordered = sorted(fit, key=lambda node: (numbers[node], node))
        if config.predicts == CLASSES:
            names = agree_classes([fit[node].target.names for node in ordered])
            target = Target.classes(names)
        else:
            target, _ = agree_targets({d.name: d.target for d in fit.values()})
        lists = (fit[node].feature_names for node in ordered)
        feature_names: tuple[str, ...] = next(filter(None, lists), ())
        self.described = {
            node: replace(
                in_agreed_order(fit[node], target, feature_names),
                partition_id=numbers[node],
                num_partitions=total,
                model=models[numbers[node]],
            )
            for node in ordered
        }
        for node in ordered:
            label = node_label(node, fit[node])
            log.info("Client %s is data owner %s.", numbers[node], label)

    def _keep_majority(self, what: str, value: Property) -> None:
        """Leave out nodes that differ from most in a property; none without majority."""
        described = self.described
        (most, number), *_ = Counter(map(value, described.values())).most_common()
        if 2 * number <= len(described) or number == len(described):
            return
        reasons = {
            node: f"its {what} differs from that of most others: {short(value(one))} "
            f"instead of {short(most)}."
            for node, one in described.items()
            if value(one) != most
        }
        self._leave_out(reasons)

    def _leave_out_odd(
        self, what: str, find: Callable[[Mapping[str, Target]], Mapping[str, str]]
    ) -> None:
        """Leave out owners whose targets are odd; a RunError if they are half of all."""
        labels = {node: node_label(node, d) for node, d in self.described.items()}
        targets = {labels[node]: d.target for node, d in self.described.items()}
        odd = find(targets) if targets else {}
        if odd and 2 * len(odd) >= len(targets):
            text = " ".join(f"{who}: {odd[who]}" for who in sorted(odd)[:MOST_OWNERS])
            what = what.format(next(iter(targets.values())).noun)
            raise RunError(
                f"{len(odd)} of {len(targets)} data owners {what}, without a majority. "
                f"{text}"
            )
        self._leave_out({n: odd[who] for n, who in labels.items() if who in odd})

    def _leave_out(self, reasons: Mapping[int, str]) -> None:
        """Move the nodes that have a reason to the rejected ones, in order of name."""
        names = {
            node: self.described[node].name
            if self.described[node].is_owned
            else f"node {node} (partition {self.described[node].partition_id})"
            for node in reasons
        }
        order = sorted(reasons, key=lambda node: (names[node], node))
        self.rejected += [Rejection(names[node], reasons[node]) for node in order]
        left = self.described.items()
        self.described = {n: d for n, d in left if n not in reasons}

    def _require_enough(self, what: str) -> None:
        """Raise an error if fewer nodes can take part than the settings ask for."""
        least, key = max(
            (self.config.min_replies, "min-replies"),
            (self.config.min_clients, "min-clients"),
        )
        number = len(self.described)
        if number < least:
            text = "; ".join(f"{one.name}: {one.reason}" for one in self.rejected)
            raise RunError(
                f"{number} {what} can take part, but {key} = {least}. {text}"
            )


def _too_many_classes(described: Mapping[int, Description]) -> dict[int, str]:
    """Return why owners are left out whose classes would swell or end the run."""
    holders = Counter(name for d in described.values() for name in d.target.names)
    reasons = {}
    for node, d in described.items():
        alone = sum(holders[name] == 1 for name in d.target.names)
        if alone > MOST_OWN_CLASSES and len(described) > 2:  # of two, which one lies?
            reasons[node] = (
                f"it names {alone:,} classes that no other client has, at most "
                f"{MOST_OWN_CLASSES:,} are allowed. Correct the labels of its graph."
            )
    # several owners together: those with most classes first
    kept = [node for node in described if node not in reasons]
    kept.sort(key=lambda n: (described[n].target.width, described[n].name, n))
    while len({c for node in kept for c in described[node].target.names}) > MAX_CLASSES:
        reasons[kept.pop()] = (
            f"the clients name more than {MAX_CLASSES:,} classes together, and it names "
            "most. Correct the labels of its graph."
        )
    return reasons


def _odd_spellings(targets: Mapping[str, Target]) -> Mapping[str, str]:
    """Return why owners are odd that spell a name differently from most."""
    noun = next(iter(targets.values())).noun
    return odd_spellings({name: t.names for name, t in targets.items()}, noun=noun)


def _claimed_twice(described: Mapping[int, Description], *, of: int) -> dict[int, str]:
    """Return why nodes are left out whose partition-id another node has, too."""
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
    """Return why data owners are left out whose name another owner has, too."""
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


def number_owners(described: Mapping[int, Description]) -> dict[int, int]:
    """Assign a partition-id to every data owner, by Flower's node id.

    An owner keeps that of its description; the others get the lowest free ones by name.
    """
    numbers = {
        node: d.partition_id
        for node, d in described.items()
        if d.partition_id != UNNUMBERED
    }
    rest = sorted(described.keys() - numbers, key=lambda n: described[n].name)
    taken = set(numbers.values())
    free = (k for k in range(len(described)) if k not in taken)
    return numbers | dict(zip(rest, free, strict=False))


def without_own_name(described: Mapping[int, Description]) -> dict[int, str]:
    """Return why data owners cannot take part that share a name, by node id.

    Unless each of them states its partition-id, nothing orders owners of one name: Flower
    draws its node ids anew in every run.
    """
    groups: dict[str, list[int]] = {}
    for node, one in described.items():
        if one.is_owned:
            groups.setdefault(one.name, []).append(node)
    return {
        node: f'{len(nodes)} owners have the name "{name}". Give each its own in its node '
        'config, for example name="hospital-a"; by default it is that of the file.'
        for name, nodes in groups.items()
        if len(nodes) > 1
        and any(described[node].partition_id == UNNUMBERED for node in nodes)
        for node in nodes
    }


def agree_width(widths: Mapping[str, int]) -> int:
    """Return the most frequent of the feature widths d; a RunError says that none is."""
    (width, count), *others = Counter(widths.values()).most_common()
    if others and others[0][1] == count:
        text = ", ".join(f"{name}: {w}" for name, w in sorted(widths.items()))
        raise RunError(
            f"The data owners' graphs have different feature widths without a majority "
            f"({text}). Agree on the features, and check every file with "
            "flower-fgl check-graph."
        )
    return width


def agree_features(described: Mapping[str, Description]) -> Description | None:
    """Return a data owner, by label, whose features most data owners have.

    Features are compared by name, in any order, if the names are shared, and else by the
    hash of the names in their order. The first one of the majority is returned, of those
    with the most frequent recipe if some graphs were prepared, or ``None`` if no graph
    has names of its features. A RunError says that no majority decides.
    """
    named = {label: d for label, d in described.items() if d.features_sha256}
    groups: dict[object, list[str]] = {}
    for label, one in named.items():
        key = frozenset(one.feature_names) or one.features_sha256
        groups.setdefault(key, []).append(label)
    if not groups:
        return None
    first, *others = sorted(groups.values(), key=len, reverse=True)
    if others and len(others[0]) == len(first):
        reason = differing_features(named[others[0][0]], named[first[0]])
        raise RunError(
            "The data owners' graphs have different features without a majority. "
            f"{others[0][0]} against {first[0]}: {reason}"
        )
    recipes = Counter(named[label].prepared for label in first)
    recipes.pop("", None)
    most = recipes.most_common(2) or [("", 0)]
    one = next(named[n] for n in first if named[n].prepared == most[0][0])
    if len(most) > 1 and most[1][1] == most[0][1]:
        other = next(named[n] for n in first if named[n].prepared == most[1][0])
        raise RunError(
            "The data owners' graphs were prepared in different ways without a majority. "
            f"{other.name} against {one.name}: {differing_features(other, one)}"
        )
    return one


def differing_features(candidate: Description, agreed: Description) -> str:
    """Describe how features or recipe of a data owner differ from the agreed ones.

    The text is empty if they do not, or if one of the two has no names.
    """
    recipes = differing_recipes(candidate.prepared, agreed.prepared)
    if not candidate.features_sha256 or not agreed.features_sha256:
        return ""
    if candidate.features_sha256 == agreed.features_sha256:
        return recipes
    if candidate.feature_names and agreed.feature_names:
        text = differing_names(candidate.feature_names, agreed.feature_names)
        if not text:
            return recipes
        return f"its features differ from those of the other clients: {text}."
    return (
        "the names of its features, or their order, differ from those of the other "
        "clients (another hash). Use the same columns in the same order, or set "
        "share-feature-names = true to compare and order them by name."
    )


def in_agreed_order(
    description: Description, target: Target, feature_names: tuple[str, ...] = ()
) -> Description:
    """Rewrite a description with the agreed target, and features in the agreed order.

    The counts become C, 0 for classes that the owner does not have, and stay empty if it
    shares none.
    """
    own = dict(zip(description.target.names, description.class_counts, strict=False))
    counts = tuple(own.get(name, 0) for name in target.names) if own else ()
    if feature_names and set(description.feature_names) == set(feature_names):
        description = replace(
            description,
            feature_names=feature_names,
            features_sha256=hash_names(feature_names),
        )
    return replace(
        description,
        class_counts=counts,
        **target.entries,
    )


def match_known_client(
    clients: Mapping[int, Description], candidate: Description
) -> tuple[int, Description] | str | None:
    """Find the client of the run that a connecting node is, ``None`` for an unknown node.

    Returns its partition-id and its description in the agreed class order, or why it is
    rejected. A data owner is matched by name and graph: its partition-id may differ from
    the one in its node config if it joined late.
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
        if client.is_owned and set(candidate.target.names) <= set(client.target.names):
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
            f"{candidate.shown} has another graph than the client of that name had when "
            "the run began. Restore that graph, or start a new run. If it is another "
            "owner, set a name of its own in its node config."
        )
    return None
