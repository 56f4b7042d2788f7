"""Whole numbers that are different in a file, but equal as the float32 of a feature.

float32 holds whole numbers exactly up to 2^24 = 16,777,216. Account numbers and Unix times
are larger: 1,700,000,000 and 1,700,000,050 are one number there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.graph_files.archive import Array
from flower_fgl.datasets.graph_files.problems import clip

__all__ = ["EXACT", "check_whole_numbers", "equal_cells", "inexact_columns"]

EXACT = 1 << 24
"""Largest absolute value up to which float32 holds every whole number."""
EXACT_DOUBLE = 1 << 53
"""The same for float64."""
WHOLE = re.compile(r"[+-]?[0-9]+(\.0*)?")
REMEDY = (
    "are one value as float32, which is exact up to 16,777,216. Subtract the same offset "
    "at all owners (from times e.g. the first one), use a coarser unit, or leave the "
    "column out if it is an id."
)


def check_whole_numbers(
    values: Array, where: str, names: Sequence[str] = (), columns: Array | None = None
) -> None:
    """Reject a column of whole numbers of which two become equal as float32.

    ``values`` are features (N, d) in the dtype of their file, or with ``columns`` (n,) the
    values (n,) of a sparse matrix in these columns. ``where`` and ``names`` of the columns
    are for the DataError, which names the column and two such numbers.

    A column with any fraction is no column of whole numbers: it was measured, and
    float32 holds seven of its digits. :func:`~flower_fgl.datasets.suspect.suspect_data`
    notes it if that is too few.
    """
    is_float = values.dtype.kind == "f"
    if values.dtype.kind not in "fiu" or (is_float and values.dtype.itemsize <= 4):
        return
    is_large = (values > EXACT) | (values < -EXACT)
    if (columns is None and values.ndim != 2) or not is_large.any():
        return
    found = columns[is_large] if columns is not None else is_large.nonzero()[1]
    for column in np.unique(found).tolist():
        cells = values[:, column] if columns is None else values[columns == column]
        if is_float and (cells != np.floor(cells)).any():
            continue
        numbers = np.unique(cells)
        if is_float:  # above, float64 is not exact either
            numbers = numbers[np.abs(numbers) < EXACT_DOUBLE]
        short = numbers.astype(np.float32)
        same = (short[1:] == short[:-1]).nonzero()[0]
        if len(same):
            one, other = (int(number) for number in numbers[same[0] : same[0] + 2])
            name = f'"{clip(names[column])}"' if len(names) > column else str(column)
            raise DataError(f"{where}, column {name}: {one} and {other} {REMEDY}")


def inexact_columns(wide: Array, short: Array) -> set[int]:
    """Return the columns with a whole number that float32 does not hold.

    ``wide`` and ``short`` (n, d) are the same rows before and after conversion.
    """
    size = np.abs(wide)
    if size.max(initial=0.0) <= EXACT:
        return set()
    is_inexact = (size >= EXACT_DOUBLE) | ((size > EXACT) & (wide != short))
    is_inexact &= wide == np.floor(wide)
    return set(is_inexact.any(axis=0).nonzero()[0].tolist())


def equal_cells(
    rows: Iterable[tuple[int, list[str]]], places: Iterable[int]
) -> dict[int, str]:
    """Find columns of a CSV table in which two whole numbers become equal as float32.

    ``rows`` are line number and cells of each row, and ``places`` the columns to check.
    The result says what is wrong with a column, with the numbers as they are in the
    table. Numbers with more digits than float64 holds are compared exactly.
    """
    seen: dict[int, dict[float, tuple[int, int]]] = {place: {} for place in places}
    found: dict[int, str] = {}
    for line, row in rows:
        for place in [*seen]:
            cell = row[place].strip()
            if not WHOLE.fullmatch(cell):  # a column of other numbers
                del seen[place]
                found.pop(place, None)
                continue
            number = int(cell.partition(".")[0])
            if abs(number) < EXACT or place in found:
                continue
            short = float(np.float32(float(number)))
            other, first = seen[place].setdefault(short, (number, line))
            if other != number:
                found[place] = (
                    f"{other} (line {first}) and {number} (line {line}) {REMEDY}"
                )
    return found
