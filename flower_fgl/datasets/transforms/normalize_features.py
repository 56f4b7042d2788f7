"""Feature columns: their order, and normalization by rows or by column statistics."""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.agreement import column_order, differing_names
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import DataError
from flower_fgl.core.schema import Schema
from flower_fgl.datasets.client_graph import ClientGraph, Graph, Scaling
from flower_fgl.datasets.transforms.canonical import csr_tensor, scipy_csr

__all__ = [
    "can_standardize",
    "column_statistics",
    "kind_statistics",
    "normalise_rows",
    "order_columns",
    "own_columns",
    "scale_features",
    "scale_owned",
    "scale_raw",
    "select_columns",
]


log = logging.getLogger(__name__)

LEAST_SHARE = 0.1
"""Share of non-zero entries from which sparse features may be standardized, which makes
them dense."""


def scale_client(client: ClientGraph, how: str) -> ClientGraph:
    """Normalize the raw features of all graphs of a client, and set its ``scaling``.

    ``rows`` divides each node's features by the sum of their absolute values. ``columns``
    standardizes each feature to mean 0 and variance 1 over the client's training nodes (or
    the nodes of its training graphs, or the ends of its training edges), and each feature
    of classified edges over its training edges. In a typed graph the features of each kind
    are standardized by themselves: those of kinds that are not predicted over all nodes.
    Without training nodes, ``columns`` keeps the features and logs this. Features of nodes
    that were normalized before, at export, stay as they are.
    """
    if how == "none":
        return client
    if how == "columns":
        return _scale_edges(_scale_columns(client))
    if client.scaling is not None:
        return client
    scaled = client.changed(lambda graph: replace(graph, x=normalise_rows(graph.x)))
    return replace(scaled, scaling=Scaling("rows"))


def scale_owned(client: ClientGraph, config: RunConfig) -> ClientGraph:
    """Scale the features of a data owner's client, unless an export has scaled them."""
    if client.scaling is None:
        return scale_raw(client, config, is_dense=can_standardize(client.graph.x))
    if config.feature_norm not in ("default", client.scaling.kind):
        raise DataError(
            "The features of this file were normalized at export with "
            f'feature-norm = "{client.scaling.kind}", but this run sets '
            f'feature-norm = "{config.feature_norm}". Export it with feature-norm = '
            '"none", or set feature-norm = "default".'
        )
    if config.feature_norm == "columns":  # a file holds features of edges as they are
        return scale_client(client, "columns")
    return client


def scale_raw(client: ClientGraph, config: RunConfig, *, is_dense: bool) -> ClientGraph:
    """Scale raw features as the settings ask for; ``is_dense``: they can be dense."""
    kind = config.scale_of_features(is_dense=is_dense)
    if kind == "columns" and is_dense:
        client = client.changed(lambda graph: replace(graph, x=graph.x.to_dense()))
    return scale_client(client, kind)


def _scale_columns(client: ClientGraph) -> ClientGraph:
    """Standardize the features of nodes, unless an export has done it."""
    if client.scaling is not None:
        return client
    schema = client.schema
    found = _statistics(client.graph, schema)
    if found is None:
        return client
    scaled = client.changed(
        lambda g: replace(
            g, x=scale_features(g.x, *found, own=own_columns(g.node_type, schema))
        )
    )
    return replace(scaled, scaling=Scaling("columns", found))


def kind_statistics(
    x: Tensor, seen: Tensor, node_type: Tensor, schema: Schema
) -> tuple[Tensor, Tensor]:
    """Return the statistics of each kind's features over its nodes in a mask (N,)."""
    mean = torch.zeros(schema.num_features, dtype=torch.float64)
    std = torch.ones_like(mean)
    for number, (_, columns) in enumerate(schema.blocks()):
        nodes = x[seen & (node_type == number)][:, columns]
        if nodes.numel():
            mean[columns], std[columns] = column_statistics(nodes)
    return mean, std


def own_columns(node_type: Tensor | None, schema: Schema | None) -> Tensor | None:
    """Return which features (N, d) belong to the kind of each node; ``None``: all."""
    if schema is None or node_type is None:
        return None
    widths = torch.tensor([width for _, width in schema.widths])
    owner = torch.repeat_interleave(torch.arange(len(widths)), widths)
    return node_type[:, None] == owner


def _scale_edges(client: ClientGraph) -> ClientGraph:
    """Standardize the features of classified edges over the training edges."""
    graph = client.graph
    if graph.pair_x is None or client.scaling is None:
        return client
    seen = graph.pair_x[graph.masks["train"]]
    if not seen.numel():
        return client
    found = column_statistics(seen)
    scaling = replace(client.scaling, edge_statistics=found)
    return replace(client, scaling=scaling).changed(
        lambda g: (
            g
            if g.pair_x is None
            else replace(g, pair_x=scale_features(g.pair_x, *found))
        )
    )


def can_standardize(x: Tensor) -> bool:
    """Return whether features (N, d) are dense, or hardly larger if they become dense."""
    if x.layout != torch.sparse_csr:
        return True
    return int(x.values().count_nonzero()) >= LEAST_SHARE * x.numel()


def _statistics(graph: Graph, schema: Schema | None) -> tuple[Tensor, Tensor] | None:
    """Return mean and standard deviation of dense features over the training nodes."""
    if graph.x.layout != torch.strided:
        raise DataError(
            "Expected dense features to standardize, got sparse ones. Make them dense, or "
            'set feature-norm = "rows" or "none".'
        )
    is_seen = graph.masks["train"]
    if graph.pairs is not None:
        ends = graph.pairs[:, is_seen].flatten()
        is_seen = torch.zeros(graph.num_nodes, dtype=torch.bool)
        is_seen[ends] = True
    elif graph.batch is not None:
        is_seen = is_seen[graph.batch]
    if not bool(is_seen.any()):
        log.info("A client without training nodes keeps its features unstandardized.")
        return None
    if schema is not None and graph.node_type is not None:
        if graph.pairs is not None:
            predicted = torch.unique(graph.node_type[graph.pairs])
            is_seen |= ~torch.isin(graph.node_type, predicted)
        elif graph.batch is None:
            is_seen = is_seen | (
                graph.node_type != schema.node_types.index(schema.target)
            )
        return kind_statistics(graph.x, is_seen, graph.node_type, schema)
    return column_statistics(graph.x[is_seen])


def column_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (d,), float64, of each column of dense features.

    The standard deviation of a constant column is 1, so that it is only shifted.
    """
    seen = x.double()
    std, mean = torch.std_mean(seen, dim=0, correction=0)
    is_constant = (seen == seen[0]).all(dim=0)
    return mean, torch.where(is_constant, torch.ones_like(std), std)


def scale_features(
    x: Tensor, mean: Tensor, std: Tensor, own: Tensor | None = None
) -> Tensor:
    """Standardize dense features (N, d) with given statistics (d,), float64.

    With ``own`` (N, d) the others become 0, see :func:`own_columns`.
    """
    scaled = ((x.double() - mean) / std).to(x.dtype)
    return scaled if own is None else torch.where(own, scaled, 0.0)


def normalise_rows(x: Tensor) -> Tensor:
    """Divide every node's features by the sum of their absolute values.

    The result has the layout of ``x`` (N, d); rows of zeros stay zero.
    """
    if x.layout != torch.sparse_csr:
        total = x.abs().sum(dim=1, keepdim=True)
        return x / torch.where(total > 0, total, torch.ones_like(total))
    matrix = scipy_csr(x).copy()
    sums = np.asarray(abs(matrix).sum(axis=1)).ravel()
    row = np.repeat(np.arange(len(sums)), np.diff(matrix.indptr))
    matrix.data /= np.where(sums > 0, sums, 1)[row]
    return csr_tensor(matrix)


def order_columns(client: ClientGraph, feature_names: tuple[str, ...]) -> ClientGraph:
    """Return a client's graph with its feature columns in the agreed order.

    ``feature_names`` are followed by those of the features of classified edges. The client
    is unchanged if the graph or the agreement has no names.
    """
    own = client.feature_names
    if not own or not feature_names or own == feature_names:
        return client
    order = column_order(own, feature_names)
    if order is None:
        raise DataError(
            "The graph has other features than agreed "
            f"({differing_names(own, feature_names)}). A graph file must not change "
            "during a run; start the run again."
        )
    scaling, width = client.scaling, client.num_features
    of_nodes = order[:width]  # the columns of edges follow
    of_edges = [column - width for column in order[width:]]
    for part, columns in (("statistics", of_nodes), ("edge_statistics", of_edges)):
        if found := getattr(scaling, part, None):
            moved: Any = {part: (found[0][columns], found[1][columns])}
            scaling = scaling and replace(scaling, **moved)
    client = client.changed(
        lambda g: replace(
            g,
            x=select_columns(g.x, of_nodes),
            pair_x=None if g.pair_x is None else g.pair_x[:, of_edges],
            messages=g.messages and g.messages.in_order(of_edges),
        )
    )
    return replace(client, scaling=scaling, feature_names=feature_names)


def select_columns(x: Tensor, order: list[int]) -> Tensor:
    """Return features (N, d), in their layout, whose column i is the old ``order[i]``."""
    if x.layout == torch.strided:
        return x[:, order]
    return csr_tensor(scipy_csr(x)[:, order])
