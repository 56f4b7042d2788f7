"""Similar graphs of a client, FedPG's neighbourhoods of graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.prototypes.hop_neighbors import Pairs
from flower_fgl.nn.graph_union import concatenated_ranges

__all__ = ["similar_pairs"]

BLOCK = 1 << 22
"""Similarities in memory at once: 4 Mi × (4 + 4 + 8) bytes with order = 64 MiB."""


def similar_pairs(
    embedding: Tensor,
    annotation: Tensor,
    *,
    hops: int,
    rho: float,
    decay: float = 0.9,
    limit: int = 32,
    same_class: bool = True,
    mode: str = "ring",
) -> list[Pairs]:
    """Find the graphs at each similarity level of each graph, FedPG Sec. IV-E.

    Hop 1 are the graphs u with cos(f(u), f(v)) ≥ ρ_1, hop h those with
    ρ_h ≤ cos < ρ_{h−1}; ``ρ_h = ρ_1 · decay^{h−1}``.

    Parameters
    ----------
    embedding : Tensor of shape (G, p), float32
        f, pooled; no gradient flows to it.
    annotation : Tensor of shape (G,), int64
        Class of each graph; a graph with -1 has no class and is not a centre.
    hops : int, at least 0
        L, the largest h.
    rho : float in (0, 1]
        ρ_1.
    decay : float in (0, 1]
        Factor from one hop's threshold to the next.
    limit : int, at least 1
        Maximum number of neighbours per graph and hop: the most similar graphs, and
        among equally similar ones those with lower numbers.
    same_class : bool
        Whether a neighbour must have its centre's class.
    mode : {"ring", "within"}
        With ``within``, hop h are the graphs with cos ≥ ρ_h, including nearer hops.

    Returns
    -------
    list of Pairs
        Length L + 1; hop 0 pairs each graph with itself, no other hop does.

    Notes
    -----
    1. The paper names neither metric nor thresholds ("appropriate representation
       distance metric functions and decaying thresholds"). Here the metric is cosine,
       as in its Eqs. (4) and (5), and the decay is geometric.
    2. A node's neighbours beyond the limit are omitted at random, a graph's by
       similarity: among all graphs above a threshold the nearest are the best estimate
       of an edge, and no seed is needed.
    3. With ``within``, a graph with ``limit`` neighbours at hop 1 has the same
       neighbours at every hop.
    4. A graph whose embedding is 0 has cosine 0 with all, and no neighbours.
    5. The rows of the similarity matrix are sorted in blocks: time G² log G, memory of
       one block.
    """
    unit = F.normalize(embedding.detach(), dim=1)
    centres = (annotation >= 0).nonzero().squeeze(1)
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(hops)]
    thresholds = [rho * decay**h for h in range(hops)]
    rows = max(1, BLOCK // max(1, len(unit)))
    for block in torch.split(centres, rows) if hops else ():
        similarity = unit[block] @ unit.T  # (rows, G)
        if same_class:
            similarity[annotation[block][:, None] != annotation] = -torch.inf
        similarity.scatter_(1, block[:, None], -torch.inf)
        ordered, order = similarity.sort(dim=1, descending=True, stable=True)
        start = torch.zeros_like(block)
        for out, threshold in zip(found, thresholds, strict=True):
            end = (ordered >= threshold).sum(dim=1)
            count = (end - start).clamp(max=limit)
            row = torch.repeat_interleave(count)
            place = concatenated_ranges(start, count)
            out.append((block[row], order[row, place]))
            if mode == "ring":
                start = end
    return [Pairs(centres, centres), *(_joined(parts, centres) for parts in found)]


def _joined(parts: list[tuple[Tensor, Tensor]], like: Tensor) -> Pairs:
    """Concatenate the blocks of a hop; without centres there are no blocks."""
    nothing = like.new_empty(0)
    centre, neighbour = zip(*[(nothing, nothing), *parts], strict=True)
    return Pairs(torch.cat(centre), torch.cat(neighbour))
