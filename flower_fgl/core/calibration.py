"""``Calibration``: how far the scores of a model can be trusted; imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

__all__ = ["CONFORMAL", "DIFFUSED", "LABEL", "NUMBER_SCORES", "RESIDUAL", "SCALED"]
__all__ += ["Calibration", "Knots", "least_items"]

DIFFUSED = "daps"
"""APS of a node, mixed with the mean of its neighbours."""
CONFORMAL = ("lac", "aps", "raps", DIFFUSED)
"""Scores of conformal sets of classes."""
LABEL = "label"
"""Score of each of several labels: 1 minus its probability."""
RESIDUAL, SCALED = NUMBER_SCORES = ("residual", "scaled")
"""Scores of the intervals of numbers: the absolute error, and that divided by the usual
error of items with about the same prediction."""
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
    since there are too few items."""
    score: str = ""  # of CONFORMAL or NUMBER_SCORES, or LABEL; empty without sets
    thresholds: tuple[float, ...] = ()
    """Largest score in a set, of labels one for each; for numbers half the width of the
    interval of each target, in its unit, with ``scaled`` in local errors. Infinite if too
    few values are known, or too few items have the label."""
    knots: tuple[Knots, ...] = ()
    """Isotonic map of each class or label: probabilities, ascending, and those that
    replace them; linear between two knots, constant beyond. Empty without. With ``scaled``
    predictions of each target, ascending, and their local errors, above 0."""
    diffusion: float = (
        0.0  # from 0 to below 1: weight of the neighbours' mean in DIFFUSED
    )

    def as_dict(self) -> dict[str, Any]:
        """Return the entries as JSON values; an infinite threshold is ``None``."""
        each = [value if math.isfinite(value) else None for value in self.thresholds]
        found = asdict(self) | {"thresholds": each}
        knots = [[list(x), list(y)] for x, y in found.pop("knots")]
        if not found["diffusion"]:
            del found["diffusion"]
        return found | ({"knots": knots} if knots else {})

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Invert :meth:`as_dict`; a ValueError names an entry that is missing or odd."""
        more = {"knots", "diffusion"}
        names = {one.name for one in fields(cls)} - more
        if not isinstance(values, Mapping) or {*values} - more != names:
            raise ValueError(f"calibration must have the entries {sorted(names)}")
        each = {name: values[name] for name in names}
        each["thresholds"] = _read_thresholds(values["thresholds"])
        is_local = each["score"] == SCALED
        each["knots"] = _read_knots(values.get("knots", []), is_local=is_local)
        found = cls(**each, diffusion=values.get("diffusion", 0.0))
        checks = {
            "source": found.source in ("owner", "shared"),
            "items": type(found.items) is int and found.items >= 0,
            "temperature": _is_number(found.temperature) and found.temperature > 0,
            "coverage": _is_number(found.coverage) and 0 <= found.coverage < 1,
            "score": found.score in ("", *CONFORMAL, LABEL, *NUMBER_SCORES),
            "diffusion": _is_number(found.diffusion) and 0 <= found.diffusion < 1,
        }
        if odd := [name for name, is_good in checks.items() if not is_good]:
            raise ValueError(f"calibration has an odd {odd[0]}")
        if not bool(found.coverage) == bool(found.score) == bool(found.thresholds):
            raise ValueError("calibration has thresholds, score or coverage alone")
        if is_local and len(found.knots) != len(found.thresholds):
            raise ValueError("calibration has knots of other targets")
        return found


def _is_number(value: object) -> bool:
    """Return whether a JSON value is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _read_knots(values: object, *, is_local: bool) -> tuple[Knots, ...]:
    """Read isotonic maps of probabilities, or maps of predictions to local errors."""
    if not isinstance(values, list) or len(values) > MOST_TARGETS:
        raise ValueError("calibration must have a list of knots")
    out = []
    for pair in values:
        if not isinstance(pair, list) or [type(one) for one in pair] != [list, list]:
            raise ValueError("calibration has odd knots")
        x, y = (tuple(one) for one in pair)
        is_good = 0 < len(x) == len(y) <= MOST_KNOTS
        is_good = is_good and all(map(_is_number, (*x, *y)))
        if is_good:
            is_good = min(y) > 0 if is_local else 0 <= min(*x, *y) <= max(*x, *y) <= 1
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
