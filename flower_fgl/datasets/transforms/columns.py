"""Put feature columns into the order that data owners agreed on, by name."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flower_fgl.core.agreement import column_order, differing_names
from flower_fgl.core.errors import DataError
from flower_fgl.datasets.client_graph import ClientGraph
from flower_fgl.datasets.transforms.canonical import csr_tensor, scipy_csr

__all__ = ["order_columns", "select_columns"]


def order_columns(client: ClientGraph, feature_names: tuple[str, ...]) -> ClientGraph:
    """Return a client's graph with its feature columns in the agreed order.

    ``feature_names`` are the agreed names, followed by those of the features of classified
    edges. The client is unchanged if the graph or the agreement has no names. A DataError
    says that the graph has other names.
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
    if scaling is not None and scaling.statistics is not None:
        mean, std = scaling.statistics
        scaling = replace(scaling, mean=mean[of_nodes], std=std[of_nodes])
    if scaling is not None and scaling.edge_statistics is not None:
        mean, std = scaling.edge_statistics
        scaling = replace(scaling, edge_mean=mean[of_edges], edge_std=std[of_edges])
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
