"""Notes on data that can be used, but that probably mean something else than they say."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import torch

from flower_fgl.datasets.client_graph import ClientGraph, Scaling
from flower_fgl.datasets.graph_files.own_split import split_names
from flower_fgl.datasets.graph_files.precision import EXACT
from flower_fgl.datasets.label_columns import label_columns
from flower_fgl.datasets.transforms.normalize_features import can_standardize

__all__ = ["log_notes", "suspect_data"]

log = logging.getLogger(__name__)

LARGE_VALUE = 100.0
"""Absolute value above which a column counts as not scaled."""
MARKERS = (-1, -99, -999, -9999)
"""Numbers that often stand for an unknown value."""
MOST_EMPTY = 10
"""Classes per class with an item, above which a note says that most are empty."""
TOLERANCE = 1e-4
"""Relative error of a value that was standardized and computed back."""
FEW_STEPS = 1000
"""Steps of float32 between the ends of a column, below which it keeps few digits."""
MOST_COLUMNS = 5
"""Columns that a note lists by name."""
MOST_OWNERS = 3
"""Owners whose notes a run logs."""


def suspect_data(graph: ClientGraph, held: Collection[int] = ()) -> list[str]:
    """Return notes on a client's data for its owner, each with a remedy.

    They name columns and values: they are for the owner alone, and never leave its machine.
    ``held`` are the classes that have an item at any client, if that is known here.
    """
    return [
        *_missing_markers(graph),
        *_empty_classes(graph, held),
        *_unscaled_columns(graph),
        *_coarse_columns(graph),
        *_columns_like_labels(graph),
        *_columns_like_a_split(graph),
    ]


def log_notes(
    notes: Mapping[str, Sequence[str]], *, most: int = MOST_OWNERS, what: str = "owners"
) -> None:
    """Log the notes of :func:`suspect_data`, by owner, on the machine of the data only.

    Those of the first ``most`` owners are logged; the others are counted, as ``what``.
    """
    noted = {name: found for name, found in notes.items() if found}
    for name in list(noted)[:most]:
        for note in noted[name]:
            log.warning("%s: %s", name, note)
    if len(noted) > most:
        log.warning("There are such notes on %s more %s.", len(noted) - most, what)


def _missing_markers(graph: ClientGraph) -> list[str]:
    """Return a note that lists columns in which a number seems to mean "unknown"."""
    names, found = graph.feature_names, []
    scaled = graph.scaling or Scaling("none")
    parts = [("nodes", graph.graph.x, scaled.statistics, 0)]
    if graph.graph.pair_x is not None:
        rest = (scaled.edge_statistics, graph.num_features)
        parts += [("edges", graph.graph.pair_x, *rest)]
    for items, x, statistics, first in parts:
        if x.layout != torch.strided or not len(x):
            continue
        none = torch.zeros(x.shape[1]), torch.ones(x.shape[1])
        mean, std = none if statistics is None else statistics
        low = x.amin(dim=0) * std + mean
        for marker in MARKERS:
            for i in _near(low, marker).nonzero().flatten().tolist():
                column = x[:, i] * std[i] + mean[i]
                others = column[~_near(column, marker)]
                if _stands_apart(marker, others):
                    number = len(column) - len(others)
                    name = names[first + i] if names else f"column {first + i}"
                    found.append(f"{name} ({marker} at {number:,} {items})")
    if not found:
        return []
    more = f" and {len(found) - MOST_COLUMNS} more" if len(found) > MOST_COLUMNS else ""
    return [
        f"A number that seems to mean unknown: {', '.join(found[:MOST_COLUMNS])}{more}. It "
        "is read as a value. Fill in e.g. the mean of the column, and add a column of 0 "
        "and 1 that says where the value was unknown."
    ]


def _near(values: torch.Tensor, marker: int) -> torch.Tensor:
    """Return which values are a marker, up to the rounding of a standardization."""
    return (values - marker).abs() < TOLERANCE * abs(marker)


def _stands_apart(marker: int, others: torch.Tensor) -> bool:
    """Return whether a marker does not look like one of the values of its column."""
    if not len(others):
        return False
    low, high = float(others.min()), float(others.max())
    if marker == -1:  # beside 0 and 1 alone it is a code
        return low >= 0 and high > 1
    return low > marker / 10


def _empty_classes(graph: ClientGraph, held: Collection[int]) -> list[str]:
    """Return a note if most classes have no item here, nor at another client."""
    y = graph.graph.y
    used = {*held, *torch.unique(y[y >= 0]).tolist()}
    is_dense = graph.num_classes <= MOST_EMPTY * len(used)
    if graph.graph.targets is not None or not used or is_dense:
        return []
    empty = graph.num_classes - len(used)
    return [
        f"{empty:,} of {graph.num_classes:,} classes have no item in this graph. If other "
        "owners do not have them either, number the classes without gaps."
    ]


def _unscaled_columns(graph: ClientGraph) -> list[str]:
    """Return a note that lists feature columns with large values, unless standardized."""
    scaling, pair_x = graph.scaling, graph.graph.pair_x
    low, high = _column_ranges(graph.graph.x)
    is_raw = [scaling is None or scaling.statistics is None] * len(low)
    names = [f"column {i}" for i in range(len(low))]
    if pair_x is not None:
        ends = zip((low, high), _column_ranges(pair_x), strict=True)
        low, high = (torch.cat(end) for end in ends)
        width = pair_x.shape[1]
        is_raw += [scaling is None or scaling.edge_statistics is None] * width
        names += [f"edge: column {i}" for i in range(width)]
    largest = torch.maximum(low.abs(), high.abs())
    found = ((largest > LARGE_VALUE) & torch.tensor(is_raw)).nonzero().flatten()
    if not len(found):
        return []
    order = found[largest[found].argsort(descending=True)].tolist()
    names = list(graph.feature_names) or names
    listed = ", ".join(
        f"{names[i]} ({float(low[i]):.3g} to {float(high[i]):.3g})"
        for i in order[:MOST_COLUMNS]
    )
    more = f" and {len(order) - MOST_COLUMNS} more" if len(order) > MOST_COLUMNS else ""
    # runs refuse to standardize sparse features, row sums, and sums over other clients
    can_run = can_standardize(graph.graph.x) and graph.outside is None
    or_run = ', or run with feature-norm = "columns"'
    return [
        f"Not scaled: {listed}{more}. Columns with large values outweigh the others, and "
        "training converges slowly. Scale them in the same way at all owners"
        f"{or_run if can_run and graph.scale != 'rows' else ''}."
    ]


def _coarse_columns(graph: ClientGraph) -> list[str]:
    """Return a note that lists columns of large numbers that float32 hardly tells apart."""
    names, found = graph.feature_names, []
    scaled, first = graph.scaling or Scaling("none"), 0
    parts = [(graph.graph.x, scaled.statistics, "")]
    if graph.graph.pair_x is not None:
        parts += [(graph.graph.pair_x, scaled.edge_statistics, "edge: ")]
    for x, statistics, kind in parts:
        mean, std = statistics or (torch.tensor(0.0), torch.tensor(1.0))
        low, high = (end * std + mean for end in _column_ranges(x))
        size = torch.maximum(low.abs(), high.abs())
        steps = (high - low) / (size * torch.finfo(torch.float32).eps)
        is_coarse = (size > EXACT) & (low < high) & (steps < FEW_STEPS)
        for i in is_coarse.nonzero().flatten().tolist():
            name = names[first + i] if names else f"{kind}column {i}"
            found.append(f"{name} ({float(low[i]):.10g} to {float(high[i]):.10g})")
        first += x.shape[1]
    if not found:
        return []
    more = f" and {len(found) - MOST_COLUMNS} more" if len(found) > MOST_COLUMNS else ""
    return [
        f"Large numbers that are close together: {', '.join(found[:MOST_COLUMNS])}{more}. "
        "As float32, many of them are one value. Subtract the same offset at all owners "
        "from the original numbers (from times e.g. the first one)."
    ]


def _columns_like_labels(graph: ClientGraph) -> list[str]:
    """Return a note that lists feature columns that determine the label."""
    found = label_columns(graph)
    if not found:
        return []
    first = (
        graph.num_features if graph.num_edge_features else 0
    )  # columns of edges follow
    kind = "edge: " if first else ""
    listed = []
    for column, classes in list(found.items())[:MOST_COLUMNS]:
        names = graph.feature_names[first:] or {column: f"{kind}column {column}"}
        of = ", ".join(graph.class_names[c] for c in classes[:MOST_COLUMNS])
        listed.append(
            f"{names[column]} ({of}{', …' if len(classes) > MOST_COLUMNS else ''})"
        )
    more = f" and {len(found) - MOST_COLUMNS} more" if len(found) > MOST_COLUMNS else ""
    return [
        f"Columns that determine the label by themselves: {', '.join(listed)}{more}; the "
        "classes that they tell from the others are in parentheses. Leave out a column "
        "that is a copy of the label, was made from it, or is known only after it: all "
        "scores would be too high."
    ]


def _columns_like_a_split(graph: ClientGraph) -> list[str]:
    """Return a note that lists feature columns with names of a split."""
    parts, whole = split_names(graph.feature_names)
    found = [*(name for names in parts.values() for name in names), *whole]
    if not found:
        return []
    return [
        f"Features with the name of a split: {', '.join(found[:MOST_COLUMNS])}. If they "
        "hold the split, leave them out, and store it as train_mask, val_mask and "
        "test_mask."
    ]


def _column_ranges(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest value of each column, each of shape (d,)."""
    if x.layout == torch.strided:
        empty = torch.zeros(x.shape[1])
        return (x.amin(dim=0), x.amax(dim=0)) if len(x) else (empty, empty)
    start = torch.zeros(x.shape[1])  # sparse columns hold zeros
    index, values = x.col_indices(), x.values()
    low = start.scatter_reduce(0, index, values, "amin")
    return low, start.scatter_reduce(0, index, values, "amax")
