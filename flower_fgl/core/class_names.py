"""Names of classes: markers of unknown classes, spellings, and one numbering for all."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter

__all__ = ["agree_classes", "classes_apart", "marks_unknown", "odd_spellings"]
__all__ += ["plain_spelling"]

UNKNOWN = {"unknown", "unlabeled", "unlabelled", "none", "null", "nan"}
UNKNOWN |= {"na", "n/a", "<na>", "#n/a", "?", "-1"}
"""Plain spellings that usually mean that no class is known."""
WHOLE = re.compile(r"[+-]?\d{1,300}(\.0*)?")
"""A whole number; no class name is longer, and ``int`` refuses very long texts."""
BOOLEANS = {"false": "0", "true": "1"}
MOST_SHOWN = 80
"""Characters of a class name, or of several, that a reason quotes."""
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
                f'it spells a {noun} "{_shortened(name)}", and {holder[rival]} spells it '
                f'"{_shortened(rival)}". They are matched by name: spell each {noun} in '
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


def _shortened(text: str) -> str:
    """Return the start of a text."""
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def classes_apart(lists: Mapping[str, Collection[str]]) -> tuple[str, list[str]]:
    """Find data owners of which no other owner has any class.

    Returns why the owners cannot learn from each other, empty unless all are such owners,
    and a warning for each such owner.
    """
    holders = Counter(name for own in lists.values() for name in set(own))
    lone = {
        owner: _shortened(", ".join(own))
        for owner, own in lists.items()
        if len(lists) > 1 and all(holders[name] == 1 for name in own)
    }
    warnings = [
        f"Data owner {owner} has no class in common with another owner ({held}). Check how "
        "its classes are spelled."
        for owner, held in lone.items()
    ]
    if not lone or len(lone) < len(lists):
        return "", warnings
    first = list(lone.items())[:MOST_OWNERS]
    text = "; ".join(f"{owner}: {held}" for owner, held in first)
    return (
        f"No two data owners have a class in common ({text}), so that they cannot learn "
        "from each other. Spell the classes alike. If each owner has other classes, list "
        "those of all owners in each classes.csv (.npz: class_names)"
    ), warnings


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
