"""Listing of the nodes at each distance of each node, for FedPG's prototypes."""

from __future__ import annotations

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from flower_fgl.algorithms.prototypes.hop_neighbors import MOST_BYTES, Pairs, pairs_of
from flower_fgl.algorithms.prototypes.two_steps import boolean, chunks, two_step_rows

__all__ = ["ring_pairs"]


def ring_pairs(
    edge_index: Tensor,
    num_nodes: int,
    hops: int,
    *,
    mode: str = "ring",
    most_pairs: int = MOST_BYTES // 8,
) -> list[Pairs]:
    """Find the nodes at each distance of each node, FedPG Sec. III-A: L + 1 sets of pairs.

    Hop 0 pairs each node with itself. Beyond the diameter of the graph a hop has no
    pairs.

    Parameters
    ----------
    edge_index, num_nodes : Tensor of shape (2, E), int64, and int
        Undirected edges in both directions, and N.
    hops : int, at least 0
        L, the largest distance.
    mode : {"ring", "within"}
        Nodes at distance exactly h, or at distance 1 to h.
    most_pairs : int
        Pairs of hop 2 to store if ``hops`` is 2. The nodes with the fewest walks of two
        steps are listed; the others are ``unlisted``.

    Notes
    -----
    1. The paper does not say which of the two; its "h-hop neighbours" are read as exactly
       h (``ring``).
    2. The nodes first reached by h + 1 steps are the product of those reached by h and
       the adjacency matrix, minus all reached before. Sparse products replace a loop over
       nodes; memory is that of the largest ring.
    3. A hub makes hop 2 quadratic in its degree: the 8,000 leaves of a star have 64
       million pairs. With more than two hops all pairs are stored all the same.
    """
    source, target = edge_index.cpu().numpy()
    ones = np.ones(len(source), dtype=np.float32)
    shape = (num_nodes, num_nodes)
    adjacency = sparse.csr_matrix((ones, (source, target)), shape=shape)
    identity = sparse.identity(num_nodes, dtype=np.float32, format="csr")
    frontier, reached = identity, identity
    device = edge_index.device
    out = [pairs_of(identity, device)]
    for hop in range(1, hops + 1):
        if hop == hops == 2:
            return [*out, _bounded_two_steps(frontier, mode, most_pairs, device)]
        step = boolean(frontier @ adjacency)
        frontier = boolean(step - step.multiply(reached))
        reached = boolean(reached + frontier)
        kept = frontier if mode == "ring" else boolean(reached - identity)
        out.append(pairs_of(kept, device))
    return out


def _bounded_two_steps(
    adjacency: sparse.csr_matrix, mode: str, most_pairs: int, device: torch.device
) -> Pairs:
    """List hop 2 of the nodes with the fewest pairs, block by block."""
    size = adjacency.shape[0]
    degree = np.diff(adjacency.indptr).astype(np.float64)
    walks = adjacency @ degree
    # bounds of the pairs, since all pairs are not counted before they are listed
    bound = np.minimum(walks + degree, size)
    order = np.argsort(bound, kind="stable")
    is_listed = np.zeros(size, dtype=bool)
    is_listed[order[np.cumsum(bound[order]) <= most_pairs]] = True
    nodes = np.flatnonzero(is_listed)
    parts = [pairs_of(sparse.csr_matrix((0, size)), device)]
    for block in chunks(torch.from_numpy(walks[nodes])):
        rows = nodes[block]
        parts.append(pairs_of(two_step_rows(adjacency, rows, mode), device, rows))
    unlisted = torch.from_numpy(np.flatnonzero(~is_listed)).to(device)
    return Pairs(
        torch.cat([part.centre for part in parts]),
        torch.cat([part.neighbour for part in parts]),
        unlisted if len(unlisted) else None,
    )
