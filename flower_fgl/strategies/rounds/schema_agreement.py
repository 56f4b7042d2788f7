"""Agreement of data owners on partition-ids, features and classes, and known clients.

All results depend on names and not on the order in which nodes connect.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from flower_fgl.core.agreement import differing_names, differing_recipes, hash_names
from flower_fgl.core.errors import RunError
from flower_fgl.core.targets import Target
from flower_fgl.protocols.describe import UNNUMBERED, Description

__all__ = ["agree_features", "agree_width", "differing_features", "in_agreed_order"]
__all__ += ["match_known_client", "number_owners", "without_own_name"]


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
