"""Read the scores of numbers that a client sends, and refuse impossible ones."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flower_fgl.core.errors import PayloadError
from flower_fgl.core.regression import ACROSS, INTERVALS, WIDE, NumberScores, PerTarget
from flower_fgl.protocols.base import LARGEST

__all__ = ["read_number_scores"]

RANGES = {
    "nrmse": (0.0, LARGEST),
    "mae": (0.0, LARGEST),
    "r2": (-math.inf, 1.0),
    "spearman": (-1 - 1e-9, 1 + 1e-9),
    "coverage": (0.0, 1.0),
    "interval": (0.0, LARGEST),
}


def read_number_scores(
    where: str, record: Mapping[str, Any], std: Sequence[float]
) -> NumberScores:
    """Read and check what :meth:`NumberScores.as_record` returned.

    ``std`` has the spread of each target, NaN if the server does not know it. A
    PayloadError begins with ``where``.
    """
    width = len(std)
    lists = ("n", "mse") if width > WIDE else ("n", "mse", "mae", "sst", "spearman")
    single = ("num_nodes", *(ACROSS if width > WIDE else ("nrmse",)))
    single += INTERVALS if record.keys() & {*INTERVALS} else ()
    if odd := sorted(record.keys() ^ {*lists, *single}):
        raise PayloadError(f'"{where}": missing or unexpected scores {odd}.')
    for name, value in record.items():
        length = len(value) if isinstance(value, list) else 0
        if length != (width if name in lists else 0):
            expected = f"{width} numbers" if name in lists else "one number"
            raise PayloadError(f'"{where}/{name}" must be {expected}.')
    counts = [record["num_nodes"], *record["n"]]
    if not all(0 <= c <= LARGEST and c == int(c) for c in counts):
        raise PayloadError(f'"{where}" has a number of values that is no count.')
    if max(record["n"], default=0) > record["num_nodes"]:
        raise PayloadError(f'"{where}" has more values than items.')
    n = tuple(int(count) for count in record["n"])
    each = {name: tuple(map(float, record[name])) for name in lists[1:]}
    for name, values in each.items():
        _check_errors(f"{where}/{name}", name, values, n)
    for name in single[1:]:
        (low, high), value = RANGES[name], record[name]
        may_lack = not any(n) or name in ("r2", "spearman", "interval")
        if not (low <= value <= high or (may_lack and math.isnan(value))):
            raise PayloadError(f'"{where}/{name}" cannot be {value!r}.')
    targets = PerTarget(n, **each)
    known = () if any(map(math.isnan, std)) else tuple(std)
    number = int(record["num_nodes"])
    if width > WIDE:
        across = [float(record[name]) for name in single[1:]]
        return NumberScores(number, targets, known, *across)
    found = NumberScores.of(number, targets, (math.nan,) * width)
    more: dict[str, Any] = {name: float(record[name]) for name in single[1:]}
    return replace(found, std=known, **more)


def _check_errors(
    where: str, name: str, values: Sequence[float], n: Sequence[int]
) -> None:
    """Reject numbers of targets that no evaluation can produce."""
    for value, number in zip(values, n, strict=True):
        if name == "spearman":
            is_good = math.isnan(value) or (number > 1 and abs(value) <= 1 + 1e-9)
        elif name == "sst":
            is_good = 0 <= value <= number * LARGEST**2
        elif number:
            is_good = 0 <= value <= LARGEST ** (2 if name == "mse" else 1)
        else:
            is_good = math.isnan(value)
        if not is_good:
            raise PayloadError(
                f'"{where}" is {value!r} for {number} values, which no finite prediction '
                "has. Training diverged: use a smaller learning rate."
            )
