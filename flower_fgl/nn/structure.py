"""Structural encodings of nodes: return probabilities of random walks."""

from __future__ import annotations

import torch
from torch import Tensor

from flower_fgl.nn.sparse import SparseOperator

__all__ = ["return_probabilities", "without_loops"]

BLOCK = 1 << 22
"""Numbers of a dense block of walks, 16 MiB."""


def without_loops(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return the edges without self-loops and repetitions, sorted by source.

    Parameters
    ----------
    edge_index : Tensor of shape (2, E), int64
        Edges.
    num_nodes : int
        N.
    """
    source, target = edge_index
    codes = (source * num_nodes + target)[source != target].unique()
    return torch.stack([codes // max(1, num_nodes), codes % max(1, num_nodes)])


def return_probabilities(edge_index: Tensor, num_nodes: int, steps: int) -> Tensor:
    """Compute the diagonals of (A D⁻¹)^k for k = 1 … ``steps``.

    Parameters
    ----------
    edge_index : Tensor of shape (2, E), int64
        Each undirected edge in both directions; self-loops are ignored.
    num_nodes : int
        N.
    steps : int, positive
        Longest walk.

    Returns
    -------
    Tensor of shape (N, steps), float32
        Probability of being back after k steps; 0 for isolated nodes.

    Notes
    -----
    1. With the symmetric S = D^{-1/2} A D^{-1/2} the diagonals are the same, and that of
       S^{a+b} is the product of the rows of S^a and S^b. So half as many powers are
       computed, in blocks of rows.
    """
    edges = without_loops(edge_index, num_nodes)
    source, target = edges
    degree = torch.bincount(source, minlength=num_nodes).double()
    scale = degree.clamp(min=1).rsqrt()
    value = scale[source] * scale[target]
    operator = SparseOperator.from_entries(
        target, source, value, (num_nodes, num_nodes)
    )
    out = torch.zeros(num_nodes, steps, dtype=torch.float64, device=edges.device)
    rows = torch.arange(num_nodes, device=edges.device)
    for block in torch.split(rows, max(1, BLOCK // max(1, num_nodes))):
        start = out.new_zeros(num_nodes, len(block))
        start[block, torch.arange(len(block), device=edges.device)] = 1.0
        power = start
        for k in range(1, steps + 1, 2):
            following = operator.matmul(power)  # powers a and a + 1 give 2a + 1, 2a + 2
            out[block, k - 1] = (power * following).sum(dim=0)
            if k < steps:
                out[block, k] = following.square().sum(dim=0)
            power = following
    return out.float()
