"""Names of feature columns: their hash, their order, and how two lists differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

__all__ = ["column_order", "differing_names", "differing_recipes", "hash_names"]
__all__ += ["NOT_PREPARED", "whole_recipe"]

NOT_PREPARED = (
    "The graphs of %s were not made by flower-fgl prepare, others were: whether their "
    "features mean the same is not checked."
)
"""Warning with the names of owners."""
SHOWN = 5
"""Largest number of names of a kind in a message."""


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

    Both arguments are hashes of recipe and vocabulary, see ``flower-fgl prepare``; empty
    for a graph that was made in another way, which is not compared.
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
            more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            parts.append(f"{text}: {', '.join(found[:SHOWN])}{more}")
    return "; ".join(parts)
