"""Sets of graphs: degree features, and each client's training and evaluation graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.datasets.client_graph import ClientGraph, Graph, GraphDataset
from flower_fgl.datasets.partition.partition import IntArray
from flower_fgl.datasets.transforms.canonical import SPARSE_WIDTH, quiet_csr
from flower_fgl.nn.graph_union import GraphBatch, select_rows

__all__ = ["cut_graph_clients", "degree_features", "node_degrees"]

EVALUATION = ("val", "test")


def node_degrees(dataset: GraphDataset) -> Tensor:
    """Count the neighbours of each node.

    Parameters
    ----------
    dataset : GraphDataset
        The graphs.

    Returns
    -------
    Tensor of shape (N,), int64
    """
    return torch.bincount(dataset.edge_index[0], minlength=dataset.batch.numel())


def degree_features(degrees: Tensor, largest: int) -> Tensor:
    """Encode degrees one-hot, with one more column for all that are larger.

    Parameters
    ----------
    degrees : Tensor of shape (N,), int64
        Neighbours of each node.
    largest : int, at least 0
        Largest degree with a column of its own: that of the training graphs.

    Returns
    -------
    Tensor of shape (N, largest + 2), float32
        Sparse CSR if there are at least 64 columns, strided otherwise.
    """
    column = degrees.clamp(max=largest + 1)
    width = largest + 2
    if width < SPARSE_WIDTH:
        return F.one_hot(column, width).float()
    with quiet_csr():
        return torch.sparse_csr_tensor(
            torch.arange(len(column) + 1),
            column,
            torch.ones(len(column)),
            size=(len(column), width),
            check_invariants=False,  # one entry a row, in range by the clamp
        )


def cut_graph_clients(
    dataset: GraphDataset,
    parts: Sequence[IntArray],
    masks: Sequence[Mapping[str, Tensor]],
) -> list[ClientGraph]:
    """Give each client its training graphs, and apart from them those to score on.

    Parameters
    ----------
    dataset : GraphDataset
        All graphs.
    parts : sequence of K ndarray of shape (n_i,), int64
        Ascending graphs of each client.
    masks : sequence of K mappings of str to Tensor of shape (n_i,), bool
        Disjoint masks ``train``, ``val`` and ``test`` of each client's graphs.

    Returns
    -------
    list of ClientGraph
        By partition-id. ``graph`` is the union of the training graphs, ``evaluation``
        those of the validation and the test graphs, so that no client's training can
        meet a graph it is scored on.

    Notes
    -----
    1. A set without node features gets one-hot degrees. Their largest column is the
       largest degree in the training graphs of all clients: one number that a
       federation agrees on beforehand, and that no validation or test graph enters.
    """
    numbers = [torch.from_numpy(part) for part in parts]
    x = dataset.x
    if dataset.num_features == 0:
        x = _degrees_seen(dataset, numbers, masks)
    union = GraphBatch(dataset.edge_index, dataset.batch, dataset.num_graphs)
    clients = []
    for partition_id, (graphs, mask) in enumerate(zip(numbers, masks, strict=True)):
        chosen = graphs[mask["train"]]
        everything = torch.ones(len(chosen), dtype=torch.bool)
        own = {"train": everything, "val": ~everything, "test": ~everything}
        evaluation = []
        for name in EVALUATION:
            apart = graphs[mask[name]]
            whole = torch.ones(len(apart), dtype=torch.bool)
            evaluation.append(_take(dataset.y, x, union, apart, {name: whole}))
        train = _take(dataset.y, x, union, chosen, own)
        clients.append(
            ClientGraph(
                partition_id, train, dataset.class_names, chosen, tuple(evaluation)
            )
        )
    return clients


def _degrees_seen(
    dataset: GraphDataset,
    graphs: Sequence[Tensor],
    masks: Sequence[Mapping[str, Tensor]],
) -> Tensor:
    """Make degree features by the degrees that occur in training graphs."""
    is_train = torch.zeros(dataset.num_graphs, dtype=torch.bool)
    for numbers, mask in zip(graphs, masks, strict=True):
        is_train[numbers[mask["train"]]] = True
    degrees = node_degrees(dataset)
    seen = degrees[is_train[dataset.batch]]
    return degree_features(degrees, int(seen.max()) if seen.numel() else 0)


def _take(
    y: Tensor, x: Tensor, union: GraphBatch, graphs: Tensor, masks: Mapping[str, Tensor]
) -> Graph:
    part = union.select(graphs)
    return Graph(
        select_rows(x, part.nodes), part.edge_index, y[graphs], masks, part.batch
    )
