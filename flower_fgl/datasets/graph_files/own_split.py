"""Names of columns, arrays and attributes that hold an owner's own split.

Readers use the three parts where they are unambiguous, and refuse other names of a split:
the column would else be a feature, and a random split would be drawn.
"""

import re
from collections.abc import Iterable

__all__ = ["PARTS", "is_plain_word", "is_split_name", "part_of_split", "split_names"]

PARTS = ("train", "val", "test")
SPELLINGS = {"training": "train", "validation": "val", "testing": "test"}
SPELLINGS |= {
    "train": "train",
    "valid": "val",
    "val": "val",
    "dev": "val",
    "test": "test",
}
PART = re.compile(
    r"(?P<before>(?:edge|node)?(?:is|in)?)"
    rf"(?P<part>{'|'.join(SPELLINGS)})"
    r"(?P<after>(?:(?:node|edge)s?)?(?:(?:mask|idx|index|indices|ids?|set|split|flag)\d*)?)"
)
"""Name of one part in lower case without separators, e.g. ``istrain``, ``valmask``."""
TRAIN_TEST = r"train(?:ing)?(?:val|valid|validation|dev)?test"
WHOLE = re.compile(
    r"(?:edge|node|data|dataset)?(?:"
    rf"(?:{TRAIN_TEST})?(?:splits?|folds?)(?:id|idx|index|set|mask)?\d*"
    rf"|{TRAIN_TEST}|set|subset)"
)
"""Name of a whole split in the same form, e.g. ``split``, ``fold3``, ``traintestsplit``."""
WORDS = {*SPELLINGS, "set", "subset", "fold", "folds"}
"""Names that are also words of a text."""


def part_of_split(text: str) -> str:
    """Return the part that a word such as ``Train`` or ``valid`` names, empty if none."""
    return SPELLINGS.get(text.lower(), "")


def split_names(names: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Find the names of columns, arrays or attributes that hold a split.

    Returns the names for each of ``train``, ``val`` and ``test`` that has any, and
    those of whole splits. The words ``val``, ``valid``, ``validation`` and ``dev``
    alone, without a name of another part, are no split: they have other meanings.
    """
    parts: dict[str, list[str]] = {}
    whole, is_certain = [], False
    for name in names:
        plain = re.sub(r"[\W_]+", "", name.lower())
        if match := PART.fullmatch(plain):
            part = SPELLINGS[match["part"]]
            parts.setdefault(part, []).append(name)
            is_certain |= part != "val" or bool(match["after"])
        elif WHOLE.fullmatch(plain):
            whole.append(name)
    ordered = {part: parts[part] for part in PARTS if part in parts}
    return (ordered if is_certain else {}), whole


def is_plain_word(name: str) -> bool:
    """Return whether the name of a split may be a word, ``test`` but not ``is_test``."""
    return name.lower() in WORDS


def is_split_name(name: str) -> bool:
    """Return whether a single name is one of a split, e.g. ``train_idx`` or ``Split``."""
    return any(map(bool, split_names([name])))
