"""Notes on data that can be used, but that probably mean something else than they say."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import gammaln
from torch import Tensor

from flower_fgl.core.errors import first_of
from flower_fgl.datasets.client_graph import ClientGraph, Scaling
from flower_fgl.datasets.graph_files.archive import Array
from flower_fgl.datasets.graph_files.own_split import split_names
from flower_fgl.datasets.graph_files.validate import EXACT
from flower_fgl.datasets.transforms.canonical import scipy_csr
from flower_fgl.datasets.transforms.messages import EDGE_PREFIX
from flower_fgl.datasets.transforms.normalize_features import can_standardize

__all__ = ["suspect_data"]


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


def suspect_data(graph: ClientGraph, held: Collection[int] = ()) -> list[str]:
    """Return notes on a client's data for its owner, each with a remedy.

    They name columns and values: they never leave the owner's machine. ``held`` are the
    classes that have an item at any client, if that is known here.
    """
    # runs refuse to standardize sparse features, row sums, and sums over other clients
    can_run = can_standardize(graph.graph.x) and graph.outside is None
    can_run = can_run and graph.scale != "rows"
    or_run = ', or run with feature-norm = "columns"' if can_run else ""
    notes = (
        (
            _missing_markers(graph),
            "A number that seems to mean unknown: {}. It is read as a value. Fill in e.g. "
            "the mean of the column, and add a column of 0 and 1 that says where the value "
            "was unknown.",
        ),
        (
            _empty_classes(graph, held),
            "{} classes have no item in this graph. If other owners do not have them "
            "either, number the classes without gaps.",
        ),
        (
            _unscaled_columns(graph),
            "Not scaled: {}. Columns with large values outweigh the others, and training "
            f"converges slowly. Scale them in the same way at all owners{or_run}.",
        ),
        (
            _coarse_columns(graph),
            "Large numbers that are close together: {}. As float32, many of them are one "
            "value. Subtract the same offset at all owners from the original numbers (from "
            "times e.g. the first one).",
        ),
        (
            _columns_like_labels(graph),
            "Columns that determine the label by themselves: {}; the classes that they "
            "tell from the others are in parentheses. Leave out a column that is a copy of "
            "the label, was made from it, or is known only after it: all scores would be "
            "too high.",
        ),
        (
            _columns_like_a_split(graph),
            "Features with the name of a split: {}. If they hold the split, leave them "
            "out, and store it as train_mask, val_mask and test_mask.",
        ),
    )
    return [text.format(first_of(found)) for found, text in notes if found]


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
    """Return the columns in which a number seems to mean "unknown"."""
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
    return found


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
    """Return how many classes have no item here, nor at another client, if most have."""
    y = graph.graph.y
    used = {*held, *torch.unique(y[y >= 0]).tolist()}
    is_dense = graph.target.width <= MOST_EMPTY * len(used)
    if graph.graph.targets is not None or not used or is_dense:
        return []
    return [f"{graph.target.width - len(used):,} of {graph.target.width:,}"]


def _unscaled_columns(graph: ClientGraph) -> list[str]:
    """Return the feature columns with large values, largest first, unless standardized."""
    found = []
    for _, x, statistics, names in _all_columns(graph):
        low, high = _column_ranges(x)
        largest = torch.maximum(low.abs(), high.abs())
        if statistics is None:
            for i in (largest > LARGE_VALUE).nonzero().flatten().tolist():
                text = f"{names[i]} ({float(low[i]):.3g} to {float(high[i]):.3g})"
                found.append((float(largest[i]), text))
    return [text for _, text in sorted(found, key=lambda entry: -entry[0])]


def _coarse_columns(graph: ClientGraph) -> list[str]:
    """Return the columns of large numbers that float32 hardly tells apart."""
    found = []
    for _, x, statistics, names in _all_columns(graph):
        mean, std = statistics or (torch.tensor(0.0), torch.tensor(1.0))
        low, high = (end * std + mean for end in _column_ranges(x))
        size = torch.maximum(low.abs(), high.abs())
        steps = (high - low) / (size * torch.finfo(torch.float32).eps)
        is_coarse = (size > EXACT) & (low < high) & (steps < FEW_STEPS)
        for i in is_coarse.nonzero().flatten().tolist():
            found.append(f"{names[i]} ({float(low[i]):.10g} to {float(high[i]):.10g})")
    return found


def _columns_like_labels(graph: ClientGraph) -> list[str]:
    """Return the feature columns that determine the label, and its classes."""
    names = _all_columns(graph)[0 if graph.graph.pair_x is None else -1].names
    return [
        f"{names[column]} ({first_of([graph.target.names[c] for c in classes])})"
        for column, classes in label_columns(graph).items()
    ]


def _columns_like_a_split(graph: ClientGraph) -> list[str]:
    """Return the feature columns with names of a split."""
    parts, whole = split_names(graph.feature_names)
    return [*(name for names in parts.values() for name in names), *whole]


def _column_ranges(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of each column, each of shape (d,)."""
    if x.layout == torch.strided:
        empty = torch.zeros(x.shape[1])
        return (x.amin(dim=0), x.amax(dim=0)) if len(x) else (empty, empty)
    start = torch.zeros(x.shape[1])  # sparse columns hold zeros
    index, values = x.col_indices(), x.values()
    low = start.scatter_reduce(0, index, values, "amin")
    return low, start.scatter_reduce(0, index, values, "amax")


FEW_VALUES = 20
"""Different values up to which each one may belong to a class or to the others."""
MOST_ERRORS = 0.01
"""Items that may contradict this, as a share of the smaller side."""
MOST_ITEMS = 1 << 18
"""Items on which a column is tried."""
FIRST_ITEMS, FIRST_ERRORS = 1024, 0.1
"""Items on which all columns are tried first, and the errors allowed there."""
LEAST_OF_CLASS = 10
"""Items of a class, and items of other classes, for which a rule is looked for."""
LEAST_BITS = 13.0
"""Evidence for a rule: chance finds one among all columns and classes once in 8,192."""
MOST_TRIED = 50
"""Columns that are tried on more items than the first ones."""


def label_columns(graph: ClientGraph) -> dict[int, list[int]]:
    """Find columns that tell a class from all others, by themselves.

    The result maps columns of the features of the labelled items (nodes, or edges to
    classify) to these classes.

    Notes
    -----
    1. A column does so for a class whose values lie in an interval without values of any
       other class. A column with at most 20 values also does if each value belongs to the
       class or to the others, with exceptions of at most 1 % of the smaller side.
    2. Few items fit such a rule by chance. log2 of the number of ways to choose the items
       of the class is the evidence; the bits that choose column, class and values are
       subtracted. Classes with fewer than 10 items are left out.
    3. Large classes are sampled, evenly in the order of the items.
    """
    whole = graph.graph
    x = whole.x if whole.pairs is None else whole.pair_x
    is_single = whole.batch is None and whole.targets is None
    if x is None or not is_single or not x.shape[1]:
        return {}
    items, y, classes = _by_class(whole.y.numpy())
    sizes = np.bincount(y, minlength=len(classes))
    bits = _log2_choices(len(y), sizes) - np.log2(max(1, x.shape[1] * len(classes)))
    bits[np.minimum(sizes, len(y) - sizes) < LEAST_OF_CLASS] = 0
    has_evidence = bits >= LEAST_BITS
    if len(classes) < 2 or not has_evidence.any():
        return {}
    first = _some_of_each(sizes, FIRST_ITEMS)
    held = np.bincount(y[first], minlength=len(classes))
    smallest = int(np.minimum(held, len(first) - held)[has_evidence].min())
    columns, cells = _columns(x, items[first], (1 - FIRST_ERRORS) * smallest)
    tried = [
        column
        for column, values in zip(columns, cells.T, strict=True)
        if _told_apart(values, y[first], bits, FIRST_ERRORS).any()
    ]
    more = _some_of_each(sizes, MOST_ITEMS)
    told = {
        column: _told_apart(_column(x, items[more], column), y[more], bits, MOST_ERRORS)
        for column in tried[:MOST_TRIED]
    }
    return {column: classes[of].tolist() for column, of in told.items() if of.any()}


def _by_class(y: Array) -> tuple[Array, Array, Array]:
    """Return the labelled items by class, their labels 0, 1, … and the class of each."""
    items = (y >= 0).nonzero()[0]
    labels = y[items].astype(np.int16)  # radix sort; there are at most 10,000 classes
    order = np.argsort(labels, kind="stable")
    classes, sizes = np.unique(labels[order], return_counts=True)
    return items[order], np.repeat(np.arange(len(classes)), sizes), classes


def _log2_choices(num_items: int, sizes: Array) -> Array:
    """Return log2 of the number of ways to choose the items of each class."""
    parts = gammaln(sizes + 1) + gammaln(num_items - sizes + 1)
    return np.asarray((gammaln(num_items + 1) - parts) / np.log(2))


def _some_of_each(sizes: Array, num_items: int) -> Array:
    """Return the places of items of each class, evenly spaced; items are in class order."""
    most = max(LEAST_OF_CLASS, num_items // len(sizes))
    starts = np.cumsum(sizes) - sizes
    parts = [
        start + np.linspace(0, size - 1, min(size, most)).astype(np.int64)
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
    ]
    return np.concatenate(parts)


def _columns(x: Tensor, items: Array, least: float) -> tuple[list[int], Array]:
    """Return columns that may tell a class apart, and their cells, shape (n, columns).

    A single value, the minimum or 0, is on one side. So the other side, of at least
    ``least`` items, has other values.
    """
    if x.layout == torch.strided:
        cells: Array = x[torch.from_numpy(items)].numpy()
        columns = ((cells != cells.min(axis=0)).sum(axis=0) >= least).nonzero()[0]
        return columns.tolist(), cells[:, columns]
    table = scipy_csr(x)[items].tocsc()
    columns = (np.diff(table.indptr) >= least).nonzero()[0]
    return columns.tolist(), table[:, columns].toarray()


def _column(x: Tensor, items: Array, column: int) -> Array:
    """Return one column of some items, shape (n,)."""
    if x.layout == torch.strided:
        return np.asarray(x[torch.from_numpy(items), column].numpy())
    return np.asarray(scipy_csr(x)[:, [column]].toarray()[items, 0])


def _told_apart(cells: Array, y: Array, bits: Array, most_errors: float) -> Array:
    """Return which classes a column tells from all others; ``y`` ascends."""
    values, place = np.unique(cells, return_inverse=True)
    num_values, num_classes = len(values), len(bits)
    starts = np.searchsorted(y, np.arange(num_classes))
    is_apart = _in_own_interval(
        np.minimum.reduceat(place, starts), np.maximum.reduceat(place, starts)
    ) & (bits >= LEAST_BITS + 2 * np.log2(num_values))  # two ends
    if num_values > FEW_VALUES:
        return np.asarray(is_apart)
    joint = np.bincount(place * num_classes + y, minlength=num_values * num_classes)
    inside = joint.reshape(num_values, num_classes)
    outside = inside.sum(axis=1, keepdims=True) - inside
    errors = np.minimum(inside, outside).sum(axis=0)
    smaller = np.minimum(inside.sum(axis=0), outside.sum(axis=0))
    is_pure = errors <= most_errors * smaller
    return np.asarray(is_apart | (is_pure & (bits >= LEAST_BITS + num_values)))


def _in_own_interval(low: Array, high: Array) -> Array:
    """Return which of the intervals of the classes meet no other one, shape (C,)."""
    order = np.argsort(low, kind="stable")
    highest_before = np.concatenate([[-1], np.maximum.accumulate(high[order])[:-1]])
    next_low = np.concatenate([low[order][1:], [np.iinfo(low.dtype).max]])
    is_apart = np.empty(len(low), dtype=np.bool_)
    is_apart[order] = (low[order] > highest_before) & (high[order] < next_low)
    return is_apart
