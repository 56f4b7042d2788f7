"""Generator of synthetic node representations, FedPANO Sec. 3.2.1."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flower_fgl.nn.sparse import SparseOperator

__all__ = [
    "NodeGenerator",
    "gaussian_copies",
    "mean_distance",
    "mean_rows",
    "spread",
    "synthesise",
]

TINY = 1e-12
"""Added to squared lengths, because a square root has no gradient at 0."""


class NodeGenerator(nn.Sequential):
    """The generator φ: two linear layers, with ReLU and Tanh; 3·H² + 2·H parameters."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh()
        )


def synthesise(
    generator: nn.Module, nodes: Tensor, around: Tensor, noise: Tensor
) -> Tensor:
    """Generate synthetic nodes, ``φ([h_u ‖ mean_{v∈N(u)} h_v] + ε)``, FedPANO Eq. (6).

    Parameters
    ----------
    generator : torch.nn.Module
        φ, from 2H to H; between -1 and 1.
    nodes, around : Tensor of shape (n, H), float32
        h_u of the training nodes, and means over their neighbours, zero without
        neighbours.
    noise : Tensor of shape (n, m, 2H), float32
        ε, independent for each of the m copies. The result ĥ is (n, m, H).

    Notes
    -----
    1. The paper's ``a ‖ b + ε`` is ambiguous. Here the noise covers the generator's whole
       input; noise with zeros in the first half is added to the neighbours' mean only.
    """
    context = torch.cat([nodes, around], dim=1)
    out: Tensor = generator(context[:, None] + noise)
    return out


def gaussian_copies(nodes: Tensor, noise: Tensor) -> Tensor:
    """Generate synthetic nodes (n, m, H) without a generator, ``h_u + ε``, FedPANO-nG."""
    return nodes[:, None] + noise


def mean_distance(nodes: Tensor, synthetic: Tensor) -> Tensor:
    """Return the mean distance of synthetic nodes to their origin, FedPANO Eq. (7).

    ``1/n Σ_u 1/m Σ_j ‖h_u − ĥ_{u,j}‖``, not squared, of h_u (n, H), constant, and ĥ (n,
    m, H).
    """
    squares = (synthetic - nodes[:, None]).square().sum(dim=-1)
    return (squares + TINY).sqrt().mean()


def spread(synthetic: Tensor) -> Tensor:
    """Return the mean distance of two synthetic nodes ĥ (n, m, H) of one training node.

    A generator that copies h_u and ignores the noise minimises Eq. (7). The spread is
    then 0. It is computed from the first two of each node, and 0 if m is 1.
    """
    if synthetic.shape[1] == 1:
        return synthetic.new_zeros(())
    apart = synthetic[:, 0] - synthetic[:, 1]
    distance: Tensor = torch.linalg.vector_norm(apart, dim=-1)
    return distance.mean()


def mean_rows(edge_index: Tensor, nodes: Tensor, num_nodes: int) -> SparseOperator:
    """Build the rows (n, N) of ``D⁻¹ A`` that belong to distinct nodes (n,).

    The row of a node without neighbours is zero.
    """
    place = torch.full((num_nodes,), -1, device=nodes.device)
    place[nodes] = torch.arange(len(nodes), device=nodes.device)
    row = place[edge_index[1]]
    row, column = row[row >= 0], edge_index[0][row >= 0]
    degree = torch.bincount(row, minlength=len(nodes))
    shape = (len(nodes), num_nodes)
    return SparseOperator.from_entries(row, column, 1 / degree[row], shape)
