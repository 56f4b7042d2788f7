"""The search space of an experiment file: ``[tune]``, and its part for each row.

A key of a method (``fedprox.mu``) or of a case has an effect in its rows only, in place of
a general list; an empty list keeps the row's own value. See docs/experiments.md.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import Any

from flower_fgl.core.config import INSTEAD
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import Scalar, kebab, nearest
from flower_fgl.core.settings import GeneralSettings
from flower_fgl.methods import METHODS, parse_config

__all__ = ["Choices", "Dimension", "Range", "nearest_point", "read_space", "row_space"]
__all__ += ["space_points", "space_size"]

RANGE_KEYS = {"low", "high", "log", "step"}
MOST_STEPS = 1_000_000
TASK = """method dataset target owners clients setting shots expansion-hops split seed
feature-sparsity feature-align class-align time-cuts positive-class edge-sparsity
split-by without-owners target-kind target-node target-relation types
label-sparsity partition partition-seed dirichlet-alpha"""
EVALUATION = """rounds round-patience evaluate evaluate-every eval-policy link-k precision-k
absent-classes calibration calibrator coverage conformal-score"""
MACHINE = """data-dir device threads stacked output-dir run-dir state-dir checkpoint-every
keep-checkpoint keep-client-models initial-model resume round-timeout join-timeout
min-clients min-replies clients-per-node"""
NOT_TUNABLE = frozenset(f"{TASK} {EVALUATION} {MACHINE} max-message-mb".split())
"""Settings of the task, the evaluation and the machine, which all rows share."""


@dataclass(frozen=True)
class Choices:
    """Distinct values of a setting, at least one."""

    values: tuple[Scalar, ...]


@dataclass(frozen=True)
class Range:
    """Numbers between two bounds, both included; ``step`` 0 for any value.

    With ``log`` the logarithm is sampled uniformly.
    """

    low: float
    high: float
    log: bool = False
    step: float = 0.0


Dimension = Choices | Range


def read_space(path: Path, table: Mapping[str, Any]) -> dict[str, Dimension]:
    """Read the table ``[tune]`` of an experiment file, by dotted key."""
    return {key: _read_entry(path, key, value) for key, value in _entries(table)}


def _entries(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their lists and ranges."""
    for key, value in table.items():
        if isinstance(value, Mapping) and not {"low", "high"} & value.keys():
            yield from _entries(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_entry(path: Path, key: str, value: Any) -> Dimension:
    if isinstance(value, list) and all(
        isinstance(v, bool | int | float | str) for v in value
    ):
        return Choices(tuple(value))
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{path}: tune.{key} must be a list of values or a range such as "
            f"{{low = 1e-4, high = 1.0, log = true}}, got {value!r}."
        )
    if wrong := sorted(value.keys() - RANGE_KEYS):
        raise ConfigError(
            f'{path}: tune.{key} has an unknown "{wrong[0]}". '
            f"{nearest(wrong[0], RANGE_KEYS)}"
        )
    numbers = [value.get("low"), value.get("high"), value.get("step", 0)]
    log = value.get("log", False)
    is_number = all(type(v) in (int, float) for v in numbers)
    low, high, step = map(float, numbers if is_number else [0, 0, 0])
    is_finite = all(map(math.isfinite, (low, high, step)))
    if not isinstance(log, bool) or not is_finite or not low < high or step < 0:
        raise ConfigError(
            f"{path}: tune.{key} needs finite numbers low < high, step >= 0 and a boolean "
            f"log, got {dict(value)!r}."
        )
    if log and (low <= 0 or step):
        raise ConfigError(
            f"{path}: tune.{key} with log = true needs low > 0 and no step, got "
            f"{dict(value)!r}."
        )
    if step and (high - low) / step > MOST_STEPS:
        raise ConfigError(
            f"{path}: tune.{key} has more than {MOST_STEPS:,} steps of {step:g}. Use a "
            "larger step, or none for all numbers of the range."
        )
    return Range(low, high, log, step)


def row_space(
    space: Mapping[str, Dimension], settings: Mapping[str, Scalar], case: str = ""
) -> tuple[dict[str, Dimension], dict[str, Scalar]]:
    """Return the search space of one row, and the row's own point in it.

    Entries of the table of its ``case`` take precedence. A list also holds the row's
    own value, which must lie inside a range.
    """
    config = parse_config(settings)
    before = config.flat()
    out: dict[str, Dimension] = {}
    method = config.method
    of_case = {} if case in METHODS else space
    start = f"{case}."
    own = {k[len(start) :]: v for k, v in of_case.items() if k.startswith(start)}
    for key in own:
        if "." in key and not key.startswith(f"{method}."):
            raise ConfigError(
                f'tune."{case}".{key}: the method of this case is {method}. Remove it.'
            )
    for key, dimension in (_keys_of(space, method) | _keys_of(own, method)).items():
        if key not in before:
            try:
                parse_config({**settings, key: ""})
            except ConfigError as error:  # names the closest setting
                raise ConfigError(f"tune.{key}: {error}") from error
        if dimension == Choices(()):
            continue
        if key in NOT_TUNABLE:
            raise ConfigError(
                f"tune.{key}: all rows share this setting, so it cannot be tuned. Put it "
                "into [config] or [grid]."
            )
        for other in INSTEAD.get(key, ()):
            if config.sources[other] == "method":
                raise ConfigError(
                    f"tune.{key}: {method} has {other} = {before[other]} by default, which "
                    f"any value of {key} disables, so no trial would be the row as it "
                    f"stands. Tune {other}, or set tune.{method}.{key} = []."
                )
        out[key] = _checked(key, dimension, settings, before)
    return out, {key: before[key] for key in out}


def _keys_of(space: Mapping[str, Dimension], method: str) -> dict[str, Dimension]:
    """Return the general keys and those of a method; the latter take precedence."""
    own = METHODS[method].settings
    named = {kebab(f.name) for f in fields(own)} if own else set()
    general = {kebab(f.name) for f in fields(GeneralSettings)}
    out = {key: value for key, value in space.items() if "." not in key}
    for key, value in space.items():
        table, dot, name = key.partition(".")
        if dot and table == method:
            out[name if name in general - named else key] = value
    return out


def _checked(
    key: str,
    dimension: Dimension,
    settings: Mapping[str, Scalar],
    before: Mapping[str, Scalar],
) -> Dimension:
    """Return a dimension with values of the setting's type, checked for the row."""

    def typed(value: Scalar) -> Scalar:
        try:
            return parse_config({**settings, key: value}).flat()[key]
        except ConfigError as error:
            raise ConfigError(f"tune.{key} = {value!r}: {error}") from error

    if isinstance(dimension, Choices):
        values = [typed(value) for value in dimension.values]
        return Choices(tuple(dict.fromkeys([before[key], *values])))
    default = before[key]
    is_whole = isinstance(default, int) and not isinstance(default, bool)
    numbers = [dimension.low, dimension.high, dimension.step]
    if is_whole and any(value % 1 for value in numbers):
        raise ConfigError(
            f"tune.{key} is a whole number, and so must be low, high and step, got "
            f"{numbers[0]:g}, {numbers[1]:g} and {numbers[2]:g}."
        )
    for bound in numbers[:2]:
        typed(int(bound) if is_whole else bound)
    if isinstance(default, bool | str):
        raise ConfigError(f"tune.{key} is not a number: give a list of values.")
    if not dimension.low <= default <= dimension.high:
        raise ConfigError(
            f"tune.{key}: the row's own value {default:g} is outside the range "
            f"{dimension.low:g} to {dimension.high:g}. The first trial of each row is its "
            "own value: extend the range, or give the row another value."
        )
    if dimension.step:
        steps = (default - dimension.low) / dimension.step
        # the tolerance of Optuna, which stores the trial
        if abs(steps - round(steps)) >= 1e-8 or default > _last(dimension, is_whole):
            raise ConfigError(
                f"tune.{key}: the row's own value {default:g} is not reached in steps of "
                f"{dimension.step:g} from {dimension.low:g}. The first trial of each row "
                "is its own value: change low or step, or give the row another value."
            )
    return dimension


def space_size(
    space: Mapping[str, Dimension], default: Mapping[str, Scalar]
) -> int | None:
    """Return the number of points of a row's space, ``None`` if it is not finite."""
    lists = [_values(dimension, default[key]) for key, dimension in space.items()]
    known = [values for values in lists if values is not None]
    return math.prod(map(len, known)) if len(known) == len(lists) else None


def space_points(
    space: Mapping[str, Dimension], default: Mapping[str, Scalar]
) -> list[dict[str, Scalar]]:
    """Return all points of a finite space."""
    lists = [_values(dimension, default[key]) for key, dimension in space.items()]
    points = itertools.product(*(values for values in lists if values is not None))
    return [dict(zip(space, point, strict=True)) for point in points]


def nearest_point(
    space: Mapping[str, Dimension],
    default: Mapping[str, Scalar],
    point: Mapping[str, Scalar],
) -> dict[str, Scalar]:
    """Return a point without rounding errors, as :func:`space_points` has it."""
    out = dict(point)
    for key, dimension in space.items():
        if isinstance(dimension, Choices):
            continue
        if values := _values(dimension, default[key]):
            errors = [abs(float(value) - float(point[key])) for value in values]
            out[key] = values[errors.index(min(errors))]
    return out


def _values(dimension: Dimension, default: Scalar) -> list[Scalar] | None:
    """Return all values, as Optuna computes them; ``None`` for a range without steps."""
    if isinstance(dimension, Choices):
        return list(dimension.values)
    is_whole = isinstance(default, int)
    low = dimension.low
    if not (step := dimension.step or float(is_whole)):
        return None
    last = _last(dimension, is_whole)
    number = round((last - low) / step) + 1
    values: list[Scalar] = [min(k * step + low, last) for k in range(number)]
    if is_whole:
        return [round(float(value)) for value in values]
    values[round((float(default) - low) / step)] = default
    return values


def _last(dimension: Range, is_whole: bool) -> float:
    """Return the last value of a range with steps, in decimals as Optuna computes it."""
    low, high = Decimal(str(dimension.low)), Decimal(str(dimension.high))
    step = Decimal(str(dimension.step or float(is_whole)))
    return float((high - low) // step * step + low)
