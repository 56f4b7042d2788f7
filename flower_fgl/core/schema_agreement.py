"""Comparison of the kinds and relations of several owners' typed graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import NamedTuple, TypeVar

from flower_fgl.core.schema import Schema

__all__ = ["Told", "differing_schemas"]

MOST_OWN = 100
"""Largest number of kinds, and of relations, that only one data owner has."""
Owner = TypeVar("Owner", bound=Hashable)


class Told(NamedTuple):
    """What an owner tells of its schema, and a hash of the features of each kind.

    The hash covers the names of the features, and with ``schema-align = "name"`` also the
    recipe of ``flower-fgl prepare``. If edges with features are predicted, a hash of the
    names of these follows.
    """

    schema: Schema
    features: tuple[str, ...] = ()


def differing_schemas(
    told: Mapping[Owner, Told | None], align: str
) -> dict[Owner, str]:
    """Return why the graphs of owners do not fit those of most others.

    Parameters
    ----------
    told : mapping of owner to Told or None
        ``None`` for a plain graph, and with ``private``.
    align : {"same", "name", "private"}
        The setting ``schema-align``.

    Returns
    -------
    dict of owner to str
        One sentence for each that does not fit; for all if no majority decides.
    """
    if align == "private":
        return {}
    typed = {owner: one for owner, one in told.items() if one is not None}
    plain = "its graph has one kind of nodes and edges, those of other clients several."
    reasons = {owner: plain for owner, one in told.items() if one is None}
    if align == "same":
        reasons |= _other_than_most(
            {owner: one.schema for owner, one in typed.items()},
            "its kinds of nodes, relations or widths of features differ from those of most "
            'clients. Set schema-align = "name" to compare them by name.',
        )
    else:
        reasons |= _other_than_most(
            {
                owner: (one.schema.target, one.schema.predicted)
                for owner, one in typed.items()
            },
            "it predicts another kind of nodes, or another relation, than most clients. "
            "Set target-node or target-relation.",
        )
    left = {owner: one for owner, one in typed.items() if owner not in reasons}
    facts: dict[str, dict[Owner, Hashable]] = {}
    for owner, (schema, features) in left.items():
        for place, (kind, width) in enumerate(schema.widths):
            about = (width, features[place] if features else "")
            facts.setdefault(f'"{kind}" nodes', {})[owner] = about
        if schema.predicted:
            facts.setdefault("edges", {})[owner] = features[len(schema.widths) :]
    for items, found in facts.items():
        reasons |= _other_than_most(
            found,
            f"the features of its {items} differ in number, name or recipe "
            "(flower-fgl prepare) from those of most clients that have them.",
        )
    parts = {owner: one.schema for owner, one in left.items()}
    return reasons | _odd_case(parts) | _too_many(parts)


def _other_than_most(values: Mapping[Owner, Hashable], reason: str) -> dict[Owner, str]:
    """Return a reason for all that differ from the most frequent value."""
    counts = Counter(values.values()).most_common(2)
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        return dict.fromkeys(values, f"no majority decides: {reason}")
    return {owner: reason for owner, value in values.items() if value != counts[0][0]}


def _too_many(parts: Mapping[Owner, Schema]) -> dict[Owner, str]:
    """Return why owners are left out whose kinds or relations would swell the run."""
    kinds = Counter(kind for part in parts.values() for kind in part.node_types)
    triples = Counter(one for part in parts.values() for one in part.relations)
    reasons = {}
    for owner, part in parts.items():
        alone = sum(kinds[kind] == 1 for kind in part.node_types)
        own = sum(triples[one] == 1 for one in part.relations)
        if max(alone, own) > MOST_OWN and len(parts) > 1:
            reasons[owner] = (
                f"it has {max(alone, own):,} kinds of nodes or relations that no other "
                f"client has, at most {MOST_OWN} are allowed. Mark them private."
            )
    return reasons


def _odd_case(parts: Mapping[Owner, Schema]) -> dict[Owner, str]:
    """Return why owners are left out whose kinds differ from others' only by case."""
    holders = Counter(kind for part in parts.values() for kind in part.node_types)
    most: dict[str, str] = {}
    for kind, _ in holders.most_common():
        most.setdefault(kind.lower(), kind)
    return {
        owner: f'its kind "{kind}" is spelled "{most[kind.lower()]}" by most clients.'
        for owner, part in parts.items()
        for kind in part.node_types
        if most[kind.lower()] != kind
    }
