"""Notes on data that can be used, but that probably mean something else than they say."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flower_fgl.datasets.client_graph import ClientGraph, Scaling
from flower_fgl.datasets.graph_files.own_split import split_names
from flower_fgl.datasets.graph_files.precision import EXACT
from flower_fgl.datasets.label_columns import label_columns
from flower_fgl.datasets.transforms.messages import EDGE_PREFIX
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


def _listed(found: Sequence[str]) -> str:
    """Return the first columns of a note, and how many more there are."""
    more = f" and {len(found) - MOST_COLUMNS} more" if len(found) > MOST_COLUMNS else ""
    return f"{', '.join(found[:MOST_COLUMNS])}{more}"


class _Columns(NamedTuple):
    """Features of nodes or of edges, the statistics that undo their scaling."""

    items: str
    x: Tensor
    statistics: tuple[Tensor, Tensor] | None
    names: Sequence[str]


def _all_columns(graph: ClientGraph) -> list[_Columns]:
    """Return the columns of nodes, then those of edges if the run reads them."""
    scaling, width = graph.scaling or Scaling("none"), graph.num_features
    parts = [("nodes", graph.graph.x, scaling.statistics, "", graph.feature_names)]
    pair_x, messages = graph.graph.pair_x, graph.graph.messages
    of_edges = graph.feature_names[width:]
    if pair_x is not None:
        parts += [("edges", pair_x, scaling.edge_statistics, EDGE_PREFIX, of_edges)]
    elif messages is not None and messages.x.shape[1]:
        parts += [("edges", messages.x, None, EDGE_PREFIX, of_edges)]
    return [
        _Columns(
            items,
            x,
            statistics,
            names or [f"{kind}column {i}" for i in range(x.shape[1])],
        )
        for items, x, statistics, kind, names in parts
    ]


def _missing_markers(graph: ClientGraph) -> list[str]:
    """Return a note that lists columns in which a number seems to mean "unknown"."""
    found = []
    for items, x, statistics, names in _all_columns(graph):
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
                    found.append(f"{names[i]} ({marker} at {number:,} {items})")
    if not found:
        return []
    return [
        f"A number that seems to mean unknown: {_listed(found)}. It is read as a value. "
        "Fill in e.g. the mean of the column, and add a column of 0 and 1 that says where "
        "the value was unknown."
    ]


def _near(values: Tensor, marker: int) -> Tensor:
    """Return which values are a marker, up to the rounding of a standardization."""
    return (values - marker).abs() < TOLERANCE * abs(marker)


def _stands_apart(marker: int, others: Tensor) -> bool:
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
    found = []
    for _, x, statistics, names in _all_columns(graph):
        low, high = _column_ranges(x)
        largest = torch.maximum(low.abs(), high.abs())
        if statistics is None:
            for i in (largest > LARGE_VALUE).nonzero().flatten().tolist():
                text = f"{names[i]} ({float(low[i]):.3g} to {float(high[i]):.3g})"
                found.append((float(largest[i]), text))
    if not found:
        return []
    found.sort(key=lambda entry: -entry[0])
    # runs refuse to standardize sparse features, row sums, and sums over other clients
    can_run = can_standardize(graph.graph.x) and graph.outside is None
    or_run = ', or run with feature-norm = "columns"'
    return [
        f"Not scaled: {_listed([text for _, text in found])}. Columns with large values "
        "outweigh the others, and training converges slowly. Scale them in the same way "
        f"at all owners{or_run if can_run and graph.scale != 'rows' else ''}."
    ]


def _coarse_columns(graph: ClientGraph) -> list[str]:
    """Return a note that lists columns of large numbers that float32 hardly tells apart."""
    found = []
    for _, x, statistics, names in _all_columns(graph):
        mean, std = statistics or (torch.tensor(0.0), torch.tensor(1.0))
        low, high = (end * std + mean for end in _column_ranges(x))
        size = torch.maximum(low.abs(), high.abs())
        steps = (high - low) / (size * torch.finfo(torch.float32).eps)
        is_coarse = (size > EXACT) & (low < high) & (steps < FEW_STEPS)
        for i in is_coarse.nonzero().flatten().tolist():
            found.append(f"{names[i]} ({float(low[i]):.10g} to {float(high[i]):.10g})")
    if not found:
        return []
    return [
        f"Large numbers that are close together: {_listed(found)}. As float32, many of "
        "them are one value. Subtract the same offset at all owners from the original "
        "numbers (from times e.g. the first one)."
    ]


def _columns_like_labels(graph: ClientGraph) -> list[str]:
    """Return a note that lists feature columns that determine the label."""
    found = label_columns(graph)
    if not found:
        return []
    names = _all_columns(graph)[0 if graph.graph.pair_x is None else -1].names
    listed = []
    for column, classes in found.items():
        of = ", ".join(graph.class_names[c] for c in classes[:MOST_COLUMNS])
        listed.append(
            f"{names[column]} ({of}{', …' if len(classes) > MOST_COLUMNS else ''})"
        )
    return [
        f"Columns that determine the label by themselves: {_listed(listed)}; the classes "
        "that they tell from the others are in parentheses. Leave out a column that is a "
        "copy of the label, was made from it, or is known only after it: all scores would "
        "be too high."
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


def _column_ranges(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of each column, each of shape (d,)."""
    if x.layout == torch.strided:
        empty = torch.zeros(x.shape[1])
        return (x.amin(dim=0), x.amax(dim=0)) if len(x) else (empty, empty)
    start = torch.zeros(x.shape[1])  # sparse columns hold zeros
    index, values = x.col_indices(), x.values()
    low = start.scatter_reduce(0, index, values, "amin")
    return low, start.scatter_reduce(0, index, values, "amax")
