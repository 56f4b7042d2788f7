"""Agreement of data owners with typed graphs on kinds of nodes and relations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.core.schema import Schema
from flower_fgl.protocols.describe import PRIVATE, Description

__all__ = ["differing_schemas", "unfit_part"]

MOST_OWN = 100
"""Largest number of kinds, and of relations, that only one data owner has."""


def differing_schemas(
    described: Mapping[int, Description], config: RunConfig
) -> dict[int, str]:
    """Return why data owners are left out whose schema does not fit, by node id.

    Raises
    ------
    RunError
        If no majority decides.
    """
    plain = {
        node: "its graph has one kind of nodes and edges, those of other clients several."
        for node, one in described.items()
        if not one.schema
    }
    typed = {node: d for node, d in described.items() if d.schema}
    if config.schema_align == "private":
        told = {n: d for n, d in typed.items() if d.schema != PRIVATE}
        return plain | dict.fromkeys(told, "it told its kinds of nodes and relations.")
    if config.schema_align == "same":
        return plain | _other_than_most(
            {node: d.schema for node, d in typed.items()},
            "its kinds of nodes, relations or widths of features differ from those of most "
            'clients. Set schema-align = "name" to compare them by name.',
        )
    return plain | _differing_parts(typed)


def _other_than_most(values: Mapping[int, Hashable], reason: str) -> dict[int, str]:
    """Return a reason for all that differ from the most frequent value."""
    (most, number), *others = Counter(values.values()).most_common()
    if others and others[0][1] == number:
        raise RunError(f"No majority of the data owners decides: of one, {reason}")
    return {node: reason for node, value in values.items() if value != most}


def _differing_parts(described: Mapping[int, Description]) -> dict[int, str]:
    """Compare target, kinds and relations of owners by name."""
    parts = {node: told for node, d in described.items() if (told := d.told)}
    reasons = {
        n: "it told no kinds and relations." for n in described if n not in parts
    }
    reasons |= _other_than_most(
        {node: part.target for node, part in parts.items()},
        "it predicts another kind of nodes than most clients. Set target-node.",
    )
    left = {node: part for node, part in parts.items() if node not in reasons}
    facts: dict[str, dict[int, Hashable]] = {}
    for node, part in left.items():
        hashes = described[node].type_features
        for place, (kind, width) in enumerate(part.widths):
            about = (width, hashes[place] if hashes else "")
            facts.setdefault(kind, {})[node] = about
    for kind, found in facts.items():
        reasons |= _other_than_most(
            found,
            f'the features of its "{kind}" nodes differ in number or name from those of '
            "most clients that have them.",
        )
    reasons |= _odd_case(left)
    kinds = Counter(kind for part in left.values() for kind in part.node_types)
    triples = Counter(one for part in left.values() for one in part.relations)
    for node, part in left.items():
        alone = sum(kinds[kind] == 1 for kind in part.node_types)
        own = sum(triples[one] == 1 for one in part.relations)
        if max(alone, own) > MOST_OWN and len(left) > 1:
            reasons[node] = (
                f"it has {max(alone, own):,} kinds of nodes or relations that no other "
                f"client has, at most {MOST_OWN} are allowed. Mark them private."
            )
    return reasons


def _odd_case(parts: Mapping[int, Schema]) -> dict[int, str]:
    """Return why owners are left out whose kinds differ from others' only by case."""
    holders = Counter(kind for part in parts.values() for kind in part.node_types)
    most: dict[str, str] = {}
    for kind, _ in holders.most_common():
        most.setdefault(kind.lower(), kind)
    return {
        node: f'its kind "{kind}" is spelled "{most[kind.lower()]}" by most clients.'
        for node, part in parts.items()
        for kind in part.node_types
        if most[kind.lower()] != kind
    }


def unfit_part(candidate: Description, first: Description, agreed: Schema) -> str:
    """Return why the schema of a late owner does not fit a run; empty if it does."""
    told = candidate.told
    if first.told is None or told is None:
        is_alike = bool(first.schema) == bool(candidate.schema)
        return "" if is_alike else "its graph is not typed as those of the others."
    if candidate.type_features or candidate.schema != first.schema:
        unknown = [
            str(one)
            for one in (*told.widths, *told.relations)
            if one not in (*agreed.widths, *agreed.relations)
        ]
        if unknown or told.target != agreed.target:
            one = unknown[0] if unknown else told.target
            return f"it has {one}, which no client had when the run began."
    return ""
