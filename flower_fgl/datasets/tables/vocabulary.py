"""Vocabulary that all parties share: categories, and scales of numbers.

::

    [nodes.numbers]                                   # of the logarithm with log = true
    balance = {mean = 1.2, std = 0.8, median = 1.0}
    [nodes.categories]
    country = ["AT", "DE"]
    [edges.numbers]
    …

In a typed graph the kind of nodes or the relation follows: ``[nodes.card.numbers]``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.graph_files.archive import Array
from flower_fgl.datasets.graph_files.problems import clip, show_path
from flower_fgl.datasets.tables.recipe import FEATURES, Column, Place, Recipe

__all__ = ["hash_encoding", "propose", "words_of"]

MOST_VALUES = 1000
"""Values of a category, each of which is a feature."""
NUMBERS = ("mean", "std", "median")
DIGITS = 6
"""Significant digits of a proposed number."""
PROPOSE = "flower-fgl prepare RECIPE TABLES --propose vocabulary.toml"


def words_of(recipe: Recipe, at: Place, column: Column) -> Mapping[str, Any]:
    """Return the entry of a feature, as ``encode`` needs it.

    A ``DataError`` names an entry that is missing or malformed.
    """
    if column.kind == "yes/no":
        return {}
    given, where = recipe.vocabulary, show_path(recipe.path)
    group = "categories" if column.kind == "category" else "numbers"
    place = f'"{clip(column.name)}" in [{".".join(at)}.{group}]'
    if given is None:
        if group == "numbers" and column.missing not in ("mean", "median"):
            return {}
        raise DataError(
            f"{where} needs a vocabulary, with {place}. Name the one that all parties "
            f'share by vocabulary = "vocabulary.toml", or propose one: {PROPOSE}.'
        )
    entry: Any = given
    for key in (*at, group, column.name):
        entry = entry.get(key) if isinstance(entry, dict) else None
    if entry is None:
        raise DataError(
            f"{where}: the vocabulary has no entry {place}. Add it, or agree on a new one "
            f"({PROPOSE})."
        )
    if group == "categories":
        is_list = isinstance(entry, list) and all(isinstance(v, str) for v in entry)
        if not is_list or len(set(entry)) < len(entry):
            raise DataError(f"{where}: {place} must be a list of different texts.")
        if len(entry) > MOST_VALUES:
            raise DataError(
                f"{where}: {place} lists {len(entry):,} values, the limit is "
                f"{MOST_VALUES:,}: each becomes a feature. Keep the frequent ones: all "
                "others share one feature."
            )
        return {"values": entry}
    is_entry = isinstance(entry, dict) and set(entry) == set(NUMBERS)
    if not is_entry or not all(map(_is_number, entry.values())) or entry["std"] <= 0:
        raise DataError(
            f"{where}: {place} must be {{mean = 0.0, std = 1.0, median = 0.0}} with three "
            "numbers, std above 0."
        )
    found: Mapping[str, Any] = entry
    return found


def _is_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)  # type: ignore[arg-type]


def hash_encoding(recipe: Recipe) -> str:
    """Return the SHA-256 of all that features mean, apart from an owner's tables.

    Two owners with other tables, but the same features and vocabulary, have one hash. Of a
    typed graph it is one hash for each kind of nodes, sorted by kind, separated by blanks.
    """
    if recipe.is_typed:
        words = (recipe.vocabulary or {}).get("nodes", {})
        return " ".join(
            _hash([_meanings(recipe, place), recipe.foreign, words.get(place[1])])
            for place in recipe.places
            if place[0] == "nodes"
        )
    meanings = {part: _meanings(recipe, (part,)) for part in ("nodes", "edges")}
    return _hash([meanings, recipe.foreign, recipe.vocabulary])


def _meanings(recipe: Recipe, place: Place) -> list[str]:
    """Return what the features of some nodes or edges mean, as sorted texts."""
    columns = recipe.columns(place)
    return sorted({json.dumps(c.meaning) for c in columns if c.kind in FEATURES})


def _hash(content: list[Any]) -> str:
    """Return the SHA-256 of plain values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def propose(
    features: Mapping[Place, Mapping[str, tuple[Column, Array]]],
) -> dict[str, Any]:
    """Return a vocabulary of one owner's features, given by place and name.

    A ``DataError`` names a category of more than 1,000 values, or a number without any.
    """
    found: dict[str, Any] = {}
    for place, columns in features.items():
        for name, (column, values) in columns.items():
            if column.kind == "yes/no":
                continue
            is_category = column.kind == "category"
            group = "categories" if is_category else "numbers"
            entry = _values(name, values) if is_category else _scale(name, values)
            table = found
            for key in (*place, group):
                table = table.setdefault(key, {})
            table[name] = entry
    return found


def _values(name: str, values: Array) -> list[str]:
    """Return the sorted values of a category."""
    words = sorted(set(values) - {""})
    if len(words) > MOST_VALUES:
        raise DataError(
            f'The category "{clip(name)}" has {len(words):,} values, the limit is '
            f"{MOST_VALUES:,}: each becomes a feature. If the column holds ids or free "
            'text, declare it as "ignore".'
        )
    return words


def _scale(name: str, values: Array) -> dict[str, float]:
    """Return mean, standard deviation and median of a number."""
    known = values[~np.isnan(values)]
    if not len(known):
        raise DataError(
            f'The column "{clip(name)}" has no number, so that no scale can be proposed. '
            'Declare it as "ignore", or let another party propose.'
        )
    std = float(known.std())
    numbers = {
        "mean": float(known.mean()),
        "std": std or 1.0,
        "median": float(np.median(known)),
    }
    return {key: float(f"{value:.{DIGITS}g}") for key, value in numbers.items()}
