"""Check of a cell that was read from a file, which somebody may have edited."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_origin

from flower_fgl.core.score_names import kind_of_score

__all__ = ["check_cell"]

SIGNED = ("r2", "spearman", "mean_r2", "mean_spearman")
"""Shares that may be negative."""


def check_cell(cell: Any) -> None:
    """Check the types and ranges of all values of a cell; else a ValueError."""
    _check_types(cell, "the cell")
    for draw in cell.draws:
        _check_types(draw, "a draw")
    if "dataset" not in cell.place:
        raise ValueError('"place" names no dataset')
    needed = {"budget", "draws", "metric", "study"}
    if cell.tuning and (lacking := needed - cell.tuning.keys()):
        raise ValueError(f'"tuning" lacks {", ".join(sorted(lacking))}')
    for value in cell.published.values():
        most = math.inf if cell.target else 100
        _check_number(value, most, "a published value")
    if not cell.draws:
        raise ValueError("it has no draw")
    if len({draw.key for draw in cell.draws}) < len(cell.draws):
        raise ValueError("a draw is there twice")
    for draw in cell.draws:
        _check_number(draw.seconds, math.inf, '"seconds"')
        for model, columns in draw.scores.items():
            for column, scores in columns.items():
                for metric, value in scores.items():
                    is_open = kind_of_score(metric).is_lower or metric == "num_nodes"
                    most = math.inf if is_open else 1
                    name = f"{metric} of {model}, {column},"
                    _check_number(value, most, name, may_be_negative=metric in SIGNED)


def _check_types(part: Any, name: str) -> None:
    """Check that texts, whole numbers and tables are such."""
    for entry in fields(part):
        value, kind = getattr(part, entry.name), get_origin(entry.type) or entry.type
        wanted = kind if kind in (str, int, Mapping) else object
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f'"{entry.name}" of {name} cannot be {value!r}')


def _check_number(
    value: Any, most: float, name: str, *, may_be_negative: bool = False
) -> None:
    """Reject what is no finite number between 0 and a bound."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    size = min(abs(value), most) if is_number and may_be_negative else value
    if not is_number or not 0 <= size <= most or value == math.inf or value > most:
        bounds = f"between 0 and {most}" if most < math.inf else "of 0 or more"
        raise ValueError(f"{name} must be a number {bounds}, got {value!r}")
