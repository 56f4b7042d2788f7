"""The largest connected component of a graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.datasets.transforms.subgraph import induced_subgraph, select_rows

__all__ = ["largest_component", "largest_dataset"]

IntArray = NDArray[np.int64]


def largest_component(edge_index: IntArray, num_nodes: int) -> IntArray:
    """Return the ascending nodes of the largest component; on a tie, of the first one.

    ``edge_index`` (2, 2E) has both directions of each edge; N is at least 1.
    """
    ones = np.ones(edge_index.shape[1], dtype=np.int8)
    shape = (num_nodes, num_nodes)
    adjacency = scipy.sparse.csr_array((ones, (edge_index[0], edge_index[1])), shape)
    # SciPy numbers components in the order of their first node
    _, component = scipy.sparse.csgraph.connected_components(adjacency, directed=False)
    largest = np.bincount(component).argmax()
    return np.flatnonzero(component == largest).astype(np.int64)


def largest_dataset(dataset: NodeDataset) -> tuple[NodeDataset, Tensor]:
    """Keep the largest connected component, FedLoG Appendix A.12.

    Returns it, its nodes in their order, and their ascending numbers (n,) in ``dataset``.
    """
    edge_index, num_nodes = dataset.edge_index, dataset.num_nodes
    nodes = torch.from_numpy(largest_component(edge_index.numpy(), num_nodes))
    component = replace(
        dataset,
        x=select_rows(dataset.x, nodes),
        edge_index=induced_subgraph(edge_index, num_nodes, nodes),
        y=dataset.y[nodes],
        masks={name: mask[nodes] for name, mask in dataset.masks.items()},
        network=None if dataset.network is None else dataset.network[nodes],
        targets=None if dataset.targets is None else dataset.targets[nodes],
        messages=dataset.messages and dataset.messages.within(nodes, num_nodes),
    )
    return component, nodes
