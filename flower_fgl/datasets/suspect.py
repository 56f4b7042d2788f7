"""Notes on data that can be used, but that probably mean something else than they say."""

from __future__ import annotations

import torch

from flower_fgl.datasets.client_graph import ClientGraph

__all__ = ["suspect_data"]

LARGE_VALUE = 100.0
"""Absolute value above which a column counts as not scaled."""
MOST_COLUMNS = 5
"""Columns that a note lists by name."""


def suspect_data(graph: ClientGraph) -> list[str]:
    """Return notes on a client's data for its owner, each with a remedy.

    Parameters
    ----------
    graph : ClientGraph
        The client's graph, as it will be trained on.

    Returns
    -------
    list of str
        Sentences that name columns and values: they are for the owner alone, and never
        leave its machine.
    """
    return [*_unscaled_columns(graph)]


def _unscaled_columns(graph: ClientGraph) -> list[str]:
    """Return a note that lists feature columns with large values."""
    low, high = _column_ranges(graph.graph.x)
    if graph.num_edge_features and graph.graph.pair_x is not None:
        ends = zip((low, high), _column_ranges(graph.graph.pair_x), strict=True)
        low, high = (torch.cat(end) for end in ends)
    largest = torch.maximum(low.abs(), high.abs())
    found = (largest > LARGE_VALUE).nonzero().flatten()
    if not len(found):
        return []
    order = found[largest[found].argsort(descending=True)].tolist()
    names = graph.feature_names or tuple(f"column {i}" for i in range(len(largest)))
    listed = ", ".join(
        f"{names[i]} ({float(low[i]):.3g} to {float(high[i]):.3g})"
        for i in order[:MOST_COLUMNS]
    )
    more = f" and {len(order) - MOST_COLUMNS} more" if len(order) > MOST_COLUMNS else ""
    return [
        f"Not scaled: {listed}{more}. Columns with large values outweigh the others, and "
        "training converges slowly. Scale them in the same way at all owners, or run with "
        'feature-norm = "columns".'
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
