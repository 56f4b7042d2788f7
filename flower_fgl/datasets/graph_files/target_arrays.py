"""What is predicted, in the arrays of an ``.npz`` file: classes, labels or numbers."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.errors import DataError, clip
from flower_fgl.core.targets import CLASSES, LABELS, LARGEST_NUMBER, NUMBERS, Target
from flower_fgl.datasets.graph_files.archive import Array, integers
from flower_fgl.datasets.graph_files.validate import check_target_names

__all__ = [
    "EDGE_TARGET_KEYS",
    "KNOWN_EDGES",
    "TARGET_KEYS",
    "TargetValues",
    "read_names",
    "read_values",
    "target_arrays",
    "target_values",
]

TARGET_KEYS = ("y", "class_names", "label_names", "target_names", "target_units")
EDGE_TARGET_KEYS = (
    *("edge_label", "edge_class_names"),
    *("edge_target", "edge_target_names", "edge_target_units"),
)
NAMES = {CLASSES: "class_names", LABELS: "label_names", NUMBERS: "target_names"}
KNOWN_EDGES: dict[str, Array] = dict.fromkeys(
    ("edge_class_names", "edge_declared_classes"), np.array(["known"])
)
"""Classes of edges to score: 0 stands for whatever is known of an edge."""
LONGEST_UNIT = 100


class TargetValues(NamedTuple):
    """A target, and its values for I items as :class:`Graph` holds them."""

    target: Target
    y: Tensor
    targets: Tensor | None = None


def target_values(target: Target, values: Tensor) -> TargetValues:
    """Return labels (I, T), int8, or numbers (I, T), float64, with the items known."""
    is_known = ~values.isnan() if target.has_numbers else values >= 0
    return TargetValues(target, is_known.any(dim=1).to(torch.int64) - 1, values)


def read_values(
    arrays: Mapping[str, Array],
    where: str,
    target: Target,
    num_items: int,
    *,
    item: str = "node",
) -> TargetValues:
    """Read the values of a target of I items, which are nodes, graphs or edges."""
    key = _key(target, item)
    if target.has_classes:
        y = integers(arrays, key, where)
        if y.shape != (num_items,):
            row = "row of x" if item == "node" else item
            raise DataError(
                f"{where}: {key} must have one label per {row}, shape ({num_items},), got "
                f"{y.shape}."
            )
        return TargetValues(target, torch.from_numpy(y))
    if key not in arrays:
        raise DataError(f"{where}: array {key} is missing. Add it to the file.")
    values = arrays[key]
    values = values[:, None] if values.shape == (num_items,) else values
    name = "label" if target.kind == LABELS else "target"
    if values.ndim != 2 or len(values) != num_items:
        raise DataError(
            f"{where}: {key} must have one row per {item} and one column per {name} name, "
            f"shape ({num_items}, {target.width}), got {values.shape}."
        )
    if values.shape[1] != target.width:
        raise DataError(
            f"{where}: {key} has {values.shape[1]} columns, but there are {target.width} "
            f"{name} names."
        )
    if target.kind == LABELS:
        return target_values(target, _labels(values, where, key))
    return target_values(target, _numbers(values, where, key, target.names, item))


def _key(target: Target, item: str) -> str:
    """Return the array of the values."""
    if item != "edge":
        return "y"
    return "edge_target" if target.has_numbers else "edge_label"


def read_names(
    arrays: Mapping[str, Array], where: str, *, item: str = "node"
) -> Target:
    """Read what is predicted of nodes, graphs or edges: its kind and its names."""
    prefix = "edge_" if item == "edge" else ""
    able = {k: prefix + name for k, name in NAMES.items() if not prefix or k != LABELS}
    held = {kind: key for kind, key in able.items() if key in arrays}
    if len(held) > 1:
        raise DataError(
            f"{where}: {' and '.join(held.values())} are both given. Keep the one that "
            "says what the file predicts."
        )
    if not held:
        y = arrays.get("edge_label" if prefix else "y")
        if y is not None and y.dtype.kind == "f":
            raise DataError(
                f"{where}: y holds numbers, not classes. Add target_names (one text per "
                "column) to predict them, or save class numbers."
            )
        raise DataError(
            f"{where}: array {prefix}class_names is missing. Add the names of the classes "
            f"0, 1, … in {'edge_label' if prefix else 'y'}, spelled as the other data "
            f"owners spell them; or {prefix}target_names to predict numbers."
        )
    ((kind, key),) = held.items()
    names = _texts(arrays[key], f"{where}: {key}")
    if kind == CLASSES and "" in names:
        raise DataError(
            f"{where}: {key} holds an empty name. Name every class; a graph without "
            'classes, such as one of to_npz without y, is of use with setting = "link" or '
            '"edge" only.'
        )
    check_target_names(names, f"{where}: {key}", Target(kind, names).noun)
    if kind != CLASSES and not all(name.strip() for name in names):
        raise DataError(f"{where}: {key} holds an empty name. Name every column of y.")
    units: tuple[str, ...] = ()
    key = f"{prefix}target_units"
    if key in arrays:
        if kind != NUMBERS:
            raise DataError(f"{where}: {key} needs {prefix}target_names. Remove it.")
        units = _texts(arrays[key], f"{where}: {key}")
        is_line = all(u.isprintable() and len(u) <= LONGEST_UNIT for u in units)
        if len(units) != len(names) or not is_line:
            raise DataError(
                f"{where}: {key} must be {len(names)} texts of at most {LONGEST_UNIT} "
                'characters, one unit for each target name; "" if it is not known.'
            )
    return Target(kind, names, units if any(units) else ())


def _texts(values: Array, where: str) -> tuple[str, ...]:
    """Return a non-empty array of text as a tuple."""
    if values.dtype.kind != "U" or values.ndim != 1 or not len(values):
        raise DataError(
            f"{where} must be a non-empty list of text, got {values.dtype} of shape "
            f"{values.shape}."
        )
    return tuple(values.tolist())


def _labels(values: Array, where: str, key: str) -> Tensor:
    """Return labels, (I, T), int8; 1, 0, or -1 if unknown."""
    if values.dtype.kind not in "iub" or not np.isin(values, (-1, 0, 1)).all():
        raise DataError(
            f"{where}: {key} must hold integers: 1 if an item has the label, 0 if not, -1 "
            f"if that is unknown; got {values.dtype} with other values."
        )
    return torch.from_numpy(values.astype(np.int8))


def _numbers(
    values: Array, where: str, key: str, names: tuple[str, ...], item: str
) -> Tensor:
    """Return numbers, (I, T), float64; NaN if unknown."""
    if values.dtype.kind not in "fiu":
        raise DataError(f"{where}: {key} must hold numbers, got {values.dtype}.")
    wide = values.astype(np.float64)
    beyond = f"numbers beyond ±{LARGEST_NUMBER:g}"
    unit = "Choose a larger unit, or leave a value out that is unknown."
    for is_bad, what, remedy in (
        (np.isinf(wide), "infinite values", "Use NaN where a value is unknown."),
        (np.abs(wide) > LARGEST_NUMBER, beyond, unit),
    ):
        if (bad := np.argwhere(is_bad)).size:
            row, column = bad[0].tolist()
            raise DataError(
                f"{where}: {key} holds {len(bad):,} {what}, the first at {item} {row}, "
                f'"{clip(names[column])}". {remedy}'
            )
    if len(wide) and np.isnan(wide).all():
        listed = " or any other target" if len(names) > 1 else ""
        raise DataError(
            f'{where}: no {item} has a value of "{clip(names[0])}"{listed}.'
        )
    return torch.from_numpy(wide)


def target_arrays(
    target: Target, y: Tensor, targets: Tensor | None, *, item: str = "node"
) -> dict[str, Array]:
    """Return the arrays that :func:`read_names` and :func:`read_values` read."""
    prefix = "edge_" if item == "edge" else ""
    arrays = {
        _key(target, item): (y if targets is None else targets).numpy(),
        prefix + NAMES[target.kind]: np.array(target.names, dtype=np.str_),
    }
    if target.units:
        arrays[f"{prefix}target_units"] = np.array(target.units, dtype=np.str_)
    return arrays
