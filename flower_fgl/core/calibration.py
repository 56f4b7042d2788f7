"""``Calibration``: how far the scores of a model can be trusted; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

__all__ = ["CONFORMAL", "RESIDUAL", "Calibration", "Knots", "least_items"]

CONFORMAL = ("lac", "aps", "raps")
"""Scores of conformal sets of classes."""
RESIDUAL = "residual"
"""Score of the intervals of numbers: the absolute error."""
MOST_TARGETS, MOST_KNOTS = 10_000, 1_000_000
Knots = tuple[tuple[float, ...], tuple[float, ...]]


def least_items(coverage: float) -> int:
    """Return the least number n of items with ⌈(n + 1)·coverage⌉ ≤ n."""
    return math.ceil(coverage / (1 - coverage) - 1e-9)


@dataclass(frozen=True)
class Calibration:
    """Temperature of a model's logits, and thresholds of conformal sets or intervals."""

    source: str  # "owner" or "shared": one owner's items, or sums over all owners
    items: int  # number of items; 0: there was none, and nothing is calibrated
    temperature: float = 1.0  # T > 0 by which logits are divided; 1 for numbers
    coverage: float = 0.0
    """Share of the items whose set or interval is to hold the truth; 0 without sets,
    since there are several labels for each item, or too few items."""
    score: str = ""  # conformal score, of CONFORMAL or RESIDUAL; empty without sets
    thresholds: tuple[float, ...] = ()
    """Largest score in a set; for numbers half the width of the interval of each target,
    in its unit, infinite if too few of its values are known."""
    knots: tuple[Knots, ...] = ()
    """Isotonic map of each class or label: probabilities, ascending, and those that
    replace them; linear between two knots, constant beyond. Empty without."""

    def as_dict(self) -> dict[str, Any]:
        """Return the entries as JSON values; an infinite threshold is ``None``."""
        each = [value if math.isfinite(value) else None for value in self.thresholds]
        found = asdict(self) | {"thresholds": each}
        knots = [[list(x), list(y)] for x, y in found.pop("knots")]
        return found | ({"knots": knots} if knots else {})

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Invert :meth:`as_dict`; a ValueError names an entry that is missing or odd."""
        *names, _ = (one.name for one in fields(cls))
        if not isinstance(values, Mapping) or {*values} - {"knots"} != {*names}:
            raise ValueError(f"calibration must have the entries {names}")
        each = {name: values[name] for name in names}
        each["thresholds"] = _read_thresholds(values["thresholds"])
        found = cls(**each, knots=_read_knots(values.get("knots", [])))
        checks = {
            "source": found.source in ("owner", "shared"),
            "items": type(found.items) is int and found.items >= 0,
            "temperature": _is_number(found.temperature) and found.temperature > 0,
            "coverage": _is_number(found.coverage) and 0 <= found.coverage < 1,
            "score": found.score in ("", *CONFORMAL, RESIDUAL),
        }
        if odd := [name for name, is_good in checks.items() if not is_good]:
            raise ValueError(f"calibration has an odd {odd[0]}")
        if not bool(found.coverage) == bool(found.score) == bool(found.thresholds):
            raise ValueError("calibration has thresholds, score or coverage alone")
        return found


def _is_number(value: object) -> bool:
    """Return whether a JSON value is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _read_knots(values: object) -> tuple[Knots, ...]:
    """Read the isotonic maps of the classes, whose numbers are probabilities."""
    if not isinstance(values, list) or len(values) > MOST_TARGETS:
        raise ValueError("calibration must have a list of knots")
    out = []
    for pair in values:
        if not isinstance(pair, list) or [type(one) for one in pair] != [list, list]:
            raise ValueError("calibration has odd knots")
        x, y = (tuple(one) for one in pair)
        is_good = 0 < len(x) == len(y) <= MOST_KNOTS
        is_good = is_good and all(_is_number(v) and 0 <= v <= 1 for v in (*x, *y))
        if not is_good or x != tuple(sorted(x)):
            raise ValueError("calibration has odd knots")
        out.append((x, y))
    return tuple(out)


def _read_thresholds(values: object) -> tuple[float, ...]:
    """Read thresholds; ``None`` is infinite."""
    if not isinstance(values, list) or len(values) > MOST_TARGETS:
        raise ValueError("calibration must have a list of thresholds")
    found = tuple(math.inf if value is None else value for value in values)
    if not all(type(v) in (int, float) and v >= 0 for v in found):  # false for NaN
        raise ValueError("calibration has an odd threshold")
    return found
