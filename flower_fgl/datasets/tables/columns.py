"""Cells of a table as numbers or text, columns as features, and the vocabulary.

All parties share the vocabulary, which holds categories, and scales of numbers, see
docs/prepare.md.
"""

import contextlib
import functools
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from flower_fgl.core.errors import DataError, clip, show_path
from flower_fgl.datasets.graph_files.archive import Array
from flower_fgl.datasets.tables.read import Block
from flower_fgl.datasets.tables.recipe import FEATURES, Column, Place, Recipe

__all__ = [
    "MOST_VALUES",
    "OTHER",
    "encode",
    "hash_encoding",
    "read_cells",
    "read_keys",
    "words_of",
]


OTHER = "(other)"
"""Place of all values of a category that the vocabulary lacks."""
EXACT = 1 << 53
"""From here on, float64 does not hold every whole number."""
DAY = 86_400.0


def read_cells(block: Block, key: str, column: Column, decimal: str) -> Array:
    """Return the cells of a column, neither of a key nor ignored, shape (n,).

    Numbers, dates (days), times (seconds, if they are dates) and yes/no (1, 0) are
    float64, NaN where a cell is empty. Categories, labels and splits are text, ``""``
    where it is empty. A ``DataError`` names the row of a cell that cannot be read.
    """
    cells = block.columns[key]
    if column.kind in ("number", "time", "date") and cells.dtype.kind == "M":
        values = _without(_seconds(cells), column)
    elif column.kind == "date" or column.format:
        values = _without(_dates(block, key, column), column)
    elif column.kind in ("number", "time"):
        values = _numbers(block, key, column, decimal)
    else:
        return _texts(block, key, column)
    if column.kind == "date":
        since = datetime.fromisoformat(column.since)
        since = since if since.tzinfo else since.replace(tzinfo=UTC)
        values = (values - since.timestamp()) / DAY
    _require_filled(block, key, column, np.isnan(values))
    if column.log:
        values = np.sign(values) * np.log1p(np.abs(values))
    return values


def read_keys(
    block: Block, keys: Mapping[str, Column], *, is_first: bool = False
) -> Array:
    """Return the text of an id; of several columns, joined by colons.

    ``is_first`` says that more will follow. A ``DataError`` names the row of an id that is
    empty, or may have lost digits.
    """
    parts = []
    for key, column in keys.items():
        cells = block.columns[key]
        if cells.dtype.kind == "f":
            large = np.abs(cells) >= EXACT
            _require(
                block, key, ~large, "an id that lost digits as a floating-point number",
                "Write ids as text or as whole numbers.",
            )  # fmt: skip
        text = cells_as_text(cells, column.empty)
        _require(block, key, text != "", "an id", "Fill the cell, or remove the row.")
        if len(keys) > 1 or is_first:
            has_none = np.array([":" not in part for part in text], dtype=np.bool_)
            _require(block, key, has_none, "no colon: ids are joined by it",
                     "Replace the colons.")  # fmt: skip
        parts.append(text)
    return functools.reduce(lambda whole, part: whole + ":" + part, parts)


def cells_as_text(cells: Array, empty: Sequence[str] = ()) -> Array:
    """Return cells as text without blanks around it; ``""`` for empty ones.

    Whole numbers have no decimals: 3.0 is ``3``.
    """
    import pandas as pd

    if cells.dtype.kind == "f":
        is_whole = (cells == np.floor(cells)) & (np.abs(cells) < EXACT)
        text = cells.astype(str).astype(object)
        text[is_whole] = cells[is_whole].astype(np.int64).astype(str)
        text[np.isnan(cells)] = ""
    elif cells.dtype.kind == "M":
        text = cells.astype(str).astype(object)
        text[np.isnat(cells)] = ""
    else:
        text = cells if cells.dtype == object else cells.astype(str).astype(object)
    codes, known = pd.factorize(text)
    plain = np.array([word.strip() for word in known], dtype=object)
    plain[np.isin(plain, np.array(empty, dtype=object))] = ""
    found: Array = plain[codes]
    return found


def _require(block: Block, key: str, good: Array, what: str, remedy: str) -> None:
    """Raise an error that names the first bad row, and counts the others."""
    bad = (~np.asarray(good, dtype=np.bool_)).nonzero()[0]
    if not len(bad):
        return
    cells = block.columns[key]
    cell = str(cells[bad[0]]).strip()
    is_gap = cells.dtype.kind in "fM" and cell in ("nan", "NaT")
    got = "an empty cell" if is_gap or not cell else f'"{clip(cell)}"'
    more = f" The same in {len(bad) - 1:,} more rows." if len(bad) > 1 else ""
    raise DataError(
        f'{block.place(bad[0])}, column "{clip(key)}": expected {what}, got {got}. '
        f"{remedy}{more}"
    )


def _require_readable(
    block: Block, key: str, column: Column, text: Array, good: Array
) -> None:
    """Reject cells that hold something else than their column; ``text`` are all cells."""
    if not good.all():
        remedy = _unreadable(column, str(text[int(np.argmin(good))]))
        _require(block, key, good, _expected(column), remedy)


def _require_filled(block: Block, key: str, column: Column, missing: Array) -> None:
    """Reject empty cells of a feature or of a time without a rule."""
    if column.kind in ("label", "split", "key") or column.missing is not None:
        return
    remedy = "Give every row a time." if column.kind == "time" else _rules(column)
    _require(block, key, ~missing, _expected(column), remedy)


def _rules(column: Column) -> str:
    """Say how to declare what an empty cell means."""
    rule = "median" if column.kind in ("number", "date") else "zero"
    return (
        "Declare what an empty cell means in the recipe, e.g. "
        f'{{kind = "{column.kind}", missing = "{rule}"}}, or fill it.'
    )


def _expected(column: Column) -> str:
    """Say what a cell of a column holds."""
    form = f'of the form "{column.format}"' if column.format else "such as 2026-01-31"
    return {
        "number": "a number",
        "time": f"a date {form}" if column.format else "a number",
        "date": f"a date {form}",
        "yes/no": f"one of {', '.join((*column.yes, *column.no))}",
    }.get(column.kind, f"a {column.kind}")


def _unreadable(column: Column, cell: str) -> str:
    """Say what to do with a cell that cannot be read."""
    text = (
        f'If it stands for an empty cell, add empty = ["{clip(cell)}"] to the column.'
    )
    if column.kind == "number":
        return (
            f'{text} If the column holds words, declare it as "category" or "yes/no". A '
            'table has decimal points or, with decimal = "," in the recipe, decimal '
            "commas. Write thousands without a separator."
        )
    if column.kind == "yes/no":
        return f"{text} Other words are listed in yes = [] and no = []."
    return f'{text} Another form of dates is named by format = "%d.%m.%Y".'


def _as_numbers(text: Sequence[str] | Array, decimal: str) -> Array:
    """Return texts as numbers, NaN where one is none."""
    import pandas as pd

    plain = pd.Series(text, dtype=object)
    if decimal != ".":  # then a point separates thousands: 1.234 is no fraction
        plain = plain.mask(plain.str.contains(".", regex=False))
        plain = plain.str.replace(decimal, ".", regex=False)
    found: Array = pd.to_numeric(plain, errors="coerce").to_numpy(np.float64)
    return found


def _numbers(block: Block, key: str, column: Column, decimal: str) -> Array:
    """Return a column of numbers; NaN where a cell is empty."""
    cells = block.columns[key]
    if cells.dtype.kind in "iuf":
        values = cells.astype(np.float64)
        text, missing = cells, np.isnan(values)
    else:
        text = cells_as_text(cells, column.empty)
        missing = text == ""
        values = _as_numbers(text, decimal)
    # -1 in the recipe is also -1.0 in the table
    missing |= np.isin(values, _as_numbers(column.empty, decimal))
    values = np.where(missing, np.nan, values)
    _require_readable(block, key, column, text, missing | np.isfinite(values))
    exact = ~((np.abs(values) >= EXACT) & (values == np.floor(values)))
    _require(
        block, key, exact, "a number below 9,007,199,254,740,992",
        'Such a number loses digits: if it is an account number, declare it as "id" or '
        '"ignore".',
    )  # fmt: skip
    return values


def _seconds(dates: Array) -> Array:
    """Return dates as seconds since 1970-01-01; NaN for none."""
    whole = dates.astype("datetime64[us]")
    seconds: Array = whole.astype(np.int64) / 1e6
    return np.where(np.isnat(whole), np.nan, seconds)


def _without(seconds: Array, column: Column) -> Array:
    """Return dates as seconds; NaN for those that ``column.empty`` lists."""
    forms = (
        lambda text: datetime.strptime(text, column.format),
        datetime.fromisoformat,
    )
    dates = []
    for text in column.empty:
        for read in forms:
            with contextlib.suppress(ValueError):  # a text such as NA is no date
                found = read(text)
                dates.append(found.replace(tzinfo=found.tzinfo or UTC).timestamp())
                break
    return np.where(np.isin(seconds, dates), np.nan, seconds)


def _dates(block: Block, key: str, column: Column) -> Array:
    """Return a column of dates in text as seconds; NaN where a cell is empty."""
    import pandas as pd

    text = cells_as_text(block.columns[key], column.empty)
    missing = text == ""
    form = "ISO8601" if column.format in ("", "iso") else column.format
    plain = pd.Series(text, dtype=object)
    # pandas reads "now" and "today" as the time of the call
    plain = plain.where(plain.str.contains(r"\d"), None)
    try:
        found = pd.to_datetime(plain, format=form, errors="coerce", utc=True)
    except ValueError as error:  # of the format itself
        raise DataError(
            f'{block.name}, column "{clip(key)}": format = "{clip(column.format)}" is no '
            f"form of dates ({clip(error)}). Write it as %Y-%m-%d."
        ) from error
    values = _seconds(found.dt.tz_localize(None).to_numpy())
    _require_readable(block, key, column, text, missing | ~np.isnan(values))
    if "%y" in form or "%x" in form:  # read as 1969 to 2068
        is_past = missing | (values <= time.time())
        what = "a date in the past, since its year has two digits"
        _require(block, key, is_past, what, "Write years of four digits, and %Y.")
    return values


def _texts(block: Block, key: str, column: Column) -> Array:
    """Return a column of words, or of yes and no as 1 and 0."""
    text = cells_as_text(block.columns[key], column.empty)
    missing = text == ""
    _require_filled(block, key, column, missing)
    if column.kind == "yes/no":
        small = np.array([word.lower() for word in text], dtype=object)
        yes, no = np.isin(small, column.yes), np.isin(small, column.no)
        _require_readable(block, key, column, text, yes | no | missing)
        return np.where(missing, np.nan, yes.astype(np.float64))
    option = "classes" if column.kind == "label" else "parts"
    names = getattr(column, option)
    if column.kind in ("category", "key") or not names:
        return text
    known = np.array([*names, ""], dtype=object)
    listed = ", ".join(names)
    _require(
        block, key, np.isin(text, known), f"one of {clip(listed, 200)}",
        f"Add the text to {option}, or to empty = [] if it means that the {column.kind} is "
        "unknown.",
    )  # fmt: skip
    names = {**names, "": ""}
    return np.array([names[word] for word in text], dtype=object)


def encode(
    column: Column, values: Array, words: Mapping[str, Any]
) -> Iterator[tuple[str, Array]]:
    """Yield the features of a column: a name, and float64 or bool of shape (N,).

    ``words`` is the entry of the column in the vocabulary: ``mean``, ``std`` and ``median``
    of a number (of its logarithm with ``log``), ``values`` of a category; empty if a
    number stays as it is.
    """
    if column.kind == "category":
        missing = values == ""
        found = missing.copy()
        for word in words["values"]:
            here = values == word
            found |= here
            yield f"{column.name}={word}", here
        yield f"{column.name}={OTHER}", ~found
    else:
        missing = np.isnan(values)
        filled = np.where(missing, _filling(column, words), values)
        if column.kind == "yes/no":
            yield column.name, filled == 1
        else:
            yield column.name, (filled - words.get("mean", 0.0)) / words.get("std", 1.0)
    if column.missing is not None:
        yield f"{column.name} missing", missing


def _filling(column: Column, words: Mapping[str, Any]) -> float:
    """Return the number in place of an empty cell."""
    if column.missing in ("mean", "median"):
        return float(words[str(column.missing)])
    number = 0.0 if column.missing in (None, "zero") else float(column.missing or 0)
    return float(np.sign(number) * np.log1p(abs(number))) if column.log else number


MOST_VALUES = 1000
"""Values of a category, each of which is a feature."""
NUMBERS = ("mean", "std", "median")
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


def _is_number(value: Any) -> bool:
    """Return whether a value is a number that is finite as a float."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def hash_encoding(recipe: Recipe, columns: Mapping[Place, Mapping[str, Column]]) -> str:
    """Return the SHA-256 of all that features mean, apart from an owner's tables.

    ``columns`` are those that were found at each place. Two owners with other tables, but
    the same features and vocabulary, have one hash. Of a typed graph it is one hash for
    each kind of nodes, sorted by kind, separated by blanks.
    """
    if recipe.is_typed:
        words = (recipe.vocabulary or {}).get("nodes", {})
        return " ".join(
            _hash([_meanings(columns[place]), recipe.foreign, words.get(place[1])])
            for place in recipe.places
            if place[0] == "nodes"
        )
    meanings = {part: _meanings(columns[part,]) for part in ("nodes", "edges")}
    return _hash([meanings, recipe.foreign, recipe.vocabulary])


def _meanings(columns: Mapping[str, Column]) -> list[str]:
    """Return what features mean, as sorted texts."""
    return sorted(
        {json.dumps(c.meaning) for c in columns.values() if c.kind in FEATURES}
    )


def _hash(content: list[Any]) -> str:
    """Return the SHA-256 of plain values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
