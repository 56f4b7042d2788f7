"""Names of features, classes and kinds of nodes: what the owners of a run agree on."""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple, TypeVar

from flower_fgl.core.errors import clip, first_of
from flower_fgl.core.schema import Schema

__all__ = ["NOT_PREPARED", "Told", "agree_classes", "classes_apart", "column_order"]
__all__ += ["differing_names", "differing_recipes", "differing_schemas", "hash_names"]
__all__ += ["marks_unknown", "odd_spellings", "plain_spelling", "whole_recipe"]

NOT_PREPARED = (
    "The graphs of %s were not made by flower-fgl prepare, others were: whether their "
    "features mean the same is not checked."
)
"""Warning with the names of owners."""


def hash_names(names: Sequence[str]) -> str:
    """Return the SHA-256 of names in their order, hexadecimal; empty without names."""
    if not names:
        return ""
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()


def whole_recipe(prepared: str) -> str:
    """Return one hash in place of those of several kinds of nodes, see ``prepare``."""
    several = " " in prepared
    return hashlib.sha256(prepared.encode()).hexdigest() if several else prepared


def column_order(names: Sequence[str], wanted: Sequence[str]) -> list[int] | None:
    """Return ``order`` with ``names[order[i]] == wanted[i]``; ``None`` for other names."""
    place = {name: column for column, name in enumerate(names)}
    if place.keys() != set(wanted) or len(names) != len(wanted):
        return None
    return [place[name] for name in wanted]


def differing_recipes(own: str, agreed: str) -> str:
    """Describe that a graph was prepared in another way than those of others, else empty.

    Both arguments are hashes of recipe and vocabulary; an empty one is not compared.
    """
    if not own or not agreed or own == agreed:
        return ""
    return (
        "its features were prepared with another recipe or vocabulary than those of the "
        f"other clients (hash {own[:8]} instead of {agreed[:8]}): equal numbers mean "
        "different things. Agree on one vocabulary and on the kinds of the columns, and "
        "run flower-fgl prepare again."
    )


def differing_names(names: Sequence[str], wanted: Sequence[str]) -> str:
    """Describe how names differ, e.g. ``missing: age; not expected: weight``, or empty."""
    parts = []
    for text, here, there in (
        ("missing", wanted, names),
        ("not expected", names, wanted),
    ):
        known = set(there)
        found = [name for name in here if name not in known]
        if found:
            parts.append(f"{text}: {first_of(found)}")
    return "; ".join(parts)


UNKNOWN = {"unknown", "unlabeled", "unlabelled", "none", "null", "nan"}
UNKNOWN |= {"na", "n/a", "n.a.", "<na>", "#n/a", "nat", "?", "-1"}
UNKNOWN |= {"missing", "undefined", "not available", "not known"}
UNKNOWN |= {"-9", "-99", "-999", "-9999"}
"""Plain spellings that usually mean that no class is known."""
WHOLE = re.compile(r"[+-]?\d{1,300}(\.0*)?")
"""A whole number; no class name is longer, and ``int`` refuses very long texts."""
BOOLEANS = {"false": "0", "true": "1"}
MOST_OWNERS = 5
"""Owners whose classes a reason lists."""


def plain_spelling(name: str) -> str:
    """Return a class name without what people and programs spell differently.

    In small letters, with single spaces and none at the ends; a whole number such as
    ``01`` or ``1.0`` is ``1``. Other numbers stay: ``1.1`` and ``1.10`` may be codes of
    two classes.
    """
    text = " ".join(unicodedata.normalize("NFC", name).casefold().split())
    return str(int(text.partition(".")[0])) if WHOLE.fullmatch(text) else text


def marks_unknown(name: str) -> bool:
    """Return whether a class name usually means that the class is not known."""
    return plain_spelling(name) in UNKNOWN


def odd_spellings(
    lists: Mapping[str, Collection[str]],
    *,
    is_trusted: bool = False,
    noun: str = "class",
) -> dict[str, str]:
    """Find data owners that spell a class differently from most owners that have it.

    ``lists`` holds each owner's class names by its label in messages. Returns why an
    owner does not fit. If two spellings of a class are equally frequent, all owners of
    that class are in the result. ``is_trusted`` finds all such owners, and not the few
    without which the others agree. ``noun`` is what has the names: a class, a label or a
    target.

    Notes
    -----
    1. ``False`` and ``True`` are spellings of ``0`` and ``1`` here, not within one file.
    2. Owners are found by descending number of odd names, those of equal number together.
       Owners that then agree with all others stay. So an owner that imitates classes of
       many others removes only itself, unless all owners are trusted.
    """
    spelled = {name: plain_spelling(name) for own in lists.values() for name in own}
    plain = {name: BOOLEANS.get(text, text) for name, text in spelled.items()}
    spellings: dict[str, Counter[str]] = {}
    holder: dict[str, str] = {}
    for owner, own in lists.items():
        for name in set(own):
            spellings.setdefault(plain[name], Counter())[name] += 1
            holder.setdefault(name, owner)
    top = {key: found.most_common(2) for key, found in spellings.items()}
    levels: dict[int, dict[str, list[str]]] = {}
    for owner, own in lists.items():
        if odd := [name for name in own if _rival(name, top[plain[name]])]:
            levels.setdefault(0 if is_trusted else len(odd), {})[owner] = odd
    reasons = {}
    for number in sorted(levels, reverse=True):
        gone: Counter[str] = Counter()
        for owner, odd in levels[number].items():
            rivals = ((name, _rival(name, top[plain[name]])) for name in odd)
            name, rival = next(filter(itemgetter(1), rivals), ("", ""))
            if not rival:
                continue  # the other spelling is gone with its owners
            reasons[owner] = (
                f'it spells a {noun} "{clip(name)}", and {holder[rival]} spells it '
                f'"{clip(rival)}". They are matched by name: spell each {noun} in '
                "one way at all owners."
            )
            gone.update(set(lists[owner]))
        for name, count in gone.items():
            spellings[plain[name]][name] -= count
        for key in {plain[name] for name in gone}:
            top[key] = spellings[key].most_common(2)
    return reasons


def _rival(name: str, top: Sequence[tuple[str, int]]) -> str:
    """Return another spelling that is as frequent as ``name``, empty if there is none."""
    (first, most), *others = top
    if first != name:
        return first
    return others[0][0] if others and others[0][1] == most else ""


def classes_apart(lists: Mapping[str, Collection[str]]) -> tuple[str, list[str]]:
    """Find data owners of which no other owner has any class.

    Returns why the owners cannot learn from each other, empty unless all are such owners,
    and a warning for each such owner, and for two that may count the same classes from 0
    and from 1.
    """
    holders = Counter(name for own in lists.values() for name in set(own))
    lone = {
        owner: clip(", ".join(own))
        for owner, own in lists.items()
        if len(lists) > 1 and all(holders[name] == 1 for name in own)
    }
    warnings = [
        f"Data owner {owner} has no class in common with another owner ({held}). Check how "
        "its classes are spelled."
        for owner, held in lone.items()
    ] + _shifted(lists)
    if not lone or len(lone) < len(lists):
        return "", warnings
    first = list(lone.items())[:MOST_OWNERS]
    text = "; ".join(f"{owner}: {held}" for owner, held in first)
    return (
        f"No two data owners have a class in common ({text}), so that they cannot learn "
        "from each other. Spell the classes alike. If each owner has other classes, list "
        "those of all owners in each classes.csv (.npz: class_names)"
    ), warnings


def _shifted(lists: Mapping[str, Collection[str]]) -> list[str]:
    """Return a warning on an owner with the classes 0 to k - 1, and one with 1 to k."""
    holders: dict[tuple[int, int], str] = {}
    for owner, own in lists.items():
        plain = [plain_spelling(name) for name in own]
        numbers = sorted(int(name) for name in plain if name.isdecimal())
        first, size = min(numbers, default=0), len(plain)
        if size > 1 and numbers == [*range(first, first + size)]:
            holders.setdefault((first, size), owner)
    for (first, size), owner in holders.items():
        other = holders.get((1, size))
        if not first and other:
            return [
                f"Data owner {owner} has the classes 0 to {size - 1}, and {other} has 1 to "
                f"{size}. They are matched by name: if {other} counts the same classes "
                "from 1, subtract 1 from its labels."
            ]
    return []


def agree_classes(lists: Collection[tuple[str, ...]]) -> tuple[str, ...]:
    """Return one numbering of all classes of the data owners.

    It is the order of the first owner that has all classes. If none has, the C names are
    sorted, as numbers if all are whole numbers.
    """
    union = {name for names in lists for name in names}
    for names in lists:
        if len(names) == len(union):
            return names
    if all(name.isdecimal() for name in union):
        return tuple(sorted(union, key=lambda name: (int(name), name)))
    return tuple(sorted(union))


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
    """Return why the graphs of owners do not fit those of most others, one sentence each.

    ``told`` is ``None`` for a plain graph, and with ``private``; ``align`` is the setting
    ``schema-align``. If no majority decides, the result has all owners.
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
