"""Graph classification: degree features, and training and evaluation graphs per client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.datasets.client_graph import (
    ClientGraph,
    Graph,
    GraphDataset,
    MessageEdges,
)
from flower_fgl.datasets.partition.partition import IntArray
from flower_fgl.datasets.splits.split import SPLITS
from flower_fgl.datasets.transforms.canonical import SPARSE_WIDTH
from flower_fgl.nn.graph_union import GraphBatch, select_rows
from flower_fgl.nn.sparse import narrow_csr

__all__ = ["SET_SPLIT", "cut_graph_clients", "degree_features", "node_degrees"]
__all__ += ["degree_names", "with_degrees"]

SET_SPLIT = "80/10/10"
"""Default split of an owner's set of graphs."""


def node_degrees(dataset: GraphDataset) -> Tensor:
    """Count the neighbours of each node, (N,), int64."""
    return torch.bincount(dataset.edge_index[0], minlength=dataset.batch.numel())


def degree_features(degrees: Tensor, largest: int) -> Tensor:
    """Encode degrees (N,) one-hot, with one extra column for all larger degrees.

    ``largest`` is the largest degree with its own column: the maximum in the training
    graphs. The result (N, largest + 2), float32, is sparse CSR if there are at least 64
    columns, strided otherwise.
    """
    column = degrees.clamp(max=largest + 1)
    width = largest + 2
    if width < SPARSE_WIDTH:
        return F.one_hot(column, width).float()
    # one entry per row; the clamp keeps it in range
    count = len(column)
    return narrow_csr(
        torch.arange(count + 1), column, torch.ones(count), (count, width)
    )


def degree_names(largest: int) -> tuple[str, ...]:
    """Return the names of the columns of :func:`with_degrees`."""
    return (*(f"degree={k}" for k in range(largest + 1)), f"degree>{largest}")


def with_degrees(dataset: GraphDataset, largest: int) -> GraphDataset:
    """Replace the features by one-hot degrees, and one column for those above a number."""
    x = degree_features(node_degrees(dataset), largest)
    names = degree_names(largest)
    return replace(dataset, x=x, feature_names=names)


def cut_graph_clients(
    dataset: GraphDataset,
    parts: Sequence[IntArray],
    masks: Sequence[Mapping[str, Tensor]],
) -> list[ClientGraph]:
    """Build each client's training graphs and separate evaluation graphs.

    ``parts`` are the ascending graphs of each of the K clients, and ``masks`` their
    disjoint masks ``train``, ``val`` and ``test``. ``graph`` of a client is the union
    of its training graphs; ``evaluation`` holds the unions of the validation and of the
    test graphs, so training cannot see an evaluation graph.

    Notes
    -----
    1. A dataset without node features gets one-hot degrees. The largest encoded degree is
       the maximum over the training graphs of all clients. A federation can agree on this
       number beforehand, and no validation or test graph affects it.
    """
    numbers = [torch.from_numpy(part) for part in parts]
    x = dataset.x
    if dataset.num_features == 0:
        x = _training_degree_features(dataset, numbers, masks)
    union = GraphBatch(dataset.edge_index, dataset.batch, dataset.num_graphs)
    listed = None
    if dataset.messages is not None:
        index = dataset.messages.index
        listed = GraphBatch.trusted(index, dataset.batch, dataset.num_graphs)
    clients = []
    for partition_id, (graphs, mask) in enumerate(zip(numbers, masks, strict=True)):
        train, *evaluation = (
            _select(dataset, x, union, listed, graphs[mask[name]], name)
            for name in SPLITS
        )
        # a client's file holds no tensor twice
        none = torch.zeros(train.num_items, dtype=torch.bool)
        train = replace(train, masks={**train.masks, "val": none, "test": none.clone()})
        chosen = graphs[mask["train"]]
        clients.append(
            ClientGraph(
                partition_id,
                train,
                dataset.target,
                chosen,
                tuple(evaluation),
                feature_names=dataset.feature_names,
            )
        )
    return clients


def _training_degree_features(
    dataset: GraphDataset,
    graphs: Sequence[Tensor],
    masks: Sequence[Mapping[str, Tensor]],
) -> Tensor:
    """Encode degrees by the largest degree of a training graph."""
    is_train = torch.zeros(dataset.num_graphs, dtype=torch.bool)
    for numbers, mask in zip(graphs, masks, strict=True):
        is_train[numbers[mask["train"]]] = True
    degrees = node_degrees(dataset)
    seen = degrees[is_train[dataset.batch]]
    return degree_features(degrees, int(seen.max()) if seen.numel() else 0)


def _select(
    dataset: GraphDataset,
    x: Tensor,
    union: GraphBatch,
    listed: GraphBatch | None,
    graphs: Tensor,
    name: str,
) -> Graph:
    """Return the union of some graphs, which are all in the mask of that name.

    ``union`` holds the undirected edges, ``listed`` those with direction and features.
    """
    part = union.select(graphs)
    messages = dataset.messages
    if messages is not None and listed is not None:
        sent = listed.select(graphs)
        x_sent, names = messages.x[sent.edges], messages.feature_names
        messages = MessageEdges(sent.edge_index, x_sent, names)
    return Graph(
        select_rows(x, part.nodes),
        part.edge_index,
        dataset.y[graphs],
        {name: torch.ones(len(graphs), dtype=torch.bool)},
        part.batch,
        targets=None if dataset.targets is None else dataset.targets[graphs],
        messages=messages,
    )
