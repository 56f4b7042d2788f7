"""Columns that determine the label, e.g. a copy of it under another name."""

from __future__ import annotations

import numpy as np
import torch
from scipy.special import gammaln
from torch import Tensor

from flower_fgl.datasets.client_graph import ClientGraph
from flower_fgl.datasets.graph_files.archive import Array
from flower_fgl.datasets.transforms.canonical import scipy_csr

__all__ = ["label_columns"]

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
MOST_COLUMNS = 50
"""Columns that are tried on more items than the first ones."""


def label_columns(graph: ClientGraph) -> dict[int, list[int]]:
    """Find columns that tell a class from all others, by themselves.

    The result maps columns of the features of the labelled items (nodes, or edges to
    classify) to the classes that each tells from all others.

    Notes
    -----
    1. A column does so for a class whose values lie in an interval without values of any
       other class. A column with at most 20 values also does if each value belongs to the
       class or to the others, with exceptions of at most 1 % of the smaller side.
    2. Few items fit such a rule by chance. log2 of the number of ways to choose the items
       of the class is the evidence; the bits that choose column, class and values are
       subtracted. Classes with fewer than 10 items are left out: in a few similar items
       of real data, rare words are often the same.
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
        for column in tried[:MOST_COLUMNS]
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
