"""Similar graphs of a client, FedPG's neighbourhoods of graphs."""

import math

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
    is_ranked: bool = False,
) -> list[Pairs]:
    """Find the graphs at each similarity level of each graph, FedPG Sec. IV-E.

    Hop 1 are the graphs u with cos(f(u), f(v)) ≥ ρ_1, hop h those with ρ_h ≤ cos <
    ρ_{h−1}; ``ρ_h = ρ_1 · decay^{h−1}``. Returns L + 1 sets of pairs; hop 0 pairs each
    graph with itself, no other hop does.

    ``embedding`` (G, p) are f, pooled; no gradient flows to them. ``annotation`` (G,) has
    the class of each graph, −1 for a graph without, which is no centre. ``hops``, ``rho``
    and ``decay`` are L, ρ_1 and the factor from one hop's threshold to the next. A graph
    has at most ``limit`` neighbours per hop: the most similar graphs, among equally similar
    ones those with lower numbers; with ``same_class`` only graphs of its class. In the
    ``mode`` "within" hop h are all graphs with cos ≥ ρ_h. If ``is_ranked``, the mean over
    all graphs is subtracted from the embeddings, and ρ_h is the quantile of the cosines of
    all pairs of graphs: with 0.9 hop 1 has the tenth of the pairs that are most similar.

    Notes
    -----
    1. The paper names neither metric nor thresholds ("appropriate representation distance
       metric functions and decaying thresholds"). Here the metric is cosine, as in its
       Eqs. (4) and (5), and the decay is geometric.
    2. A node's neighbours beyond the limit are omitted at random, a graph's by
       similarity: among all graphs above a threshold the nearest are the best estimate of
       an edge, and no seed is needed.
    3. With ``within``, a graph with ``limit`` neighbours at hop 1 has the same neighbours
       at every hop.
    4. A graph whose embedding is 0 has cosine 0 with all, and no neighbours.
    5. Embeddings pooled after a ReLU have no negative entries and share a large mean: all
       cosines are above 0.99, hop 1 holds every graph and the other hops none. Without
       the mean the cosines depend on the noise of the embeddings, and a fixed threshold
       may select no graph. Quantiles (``is_ranked``) always select.
    6. The rows of the similarity matrix are sorted in blocks: time G² log G, memory of
       one block.
    """
    embedding = embedding.detach()
    if is_ranked and len(embedding):
        embedding = embedding - embedding.mean(dim=0)
    unit = F.normalize(embedding, dim=1)
    centres = (annotation >= 0).nonzero().squeeze(1)
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(hops)]
    thresholds = [rho * decay**h for h in range(hops)]
    if is_ranked:
        thresholds = _quantiles(unit, thresholds)
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
    made = [Pairs(centres, centres)]
    for parts in found:  # at least one, of no rows without centres
        centre, neighbour = zip(*parts, strict=True)
        made.append(Pairs(torch.cat(centre), torch.cat(neighbour)))
    return made


def _quantiles(unit: Tensor, shares: list[float]) -> list[float]:
    """Return quantiles of the cosines of different graphs; of many graphs some rows."""
    size = len(unit)
    if size < 2 or not shares:
        return [math.inf] * len(shares)
    rows = torch.arange(0, size, math.ceil(size * size / BLOCK), device=unit.device)
    similarity = unit[rows] @ unit.T
    others = torch.ones_like(similarity, dtype=torch.bool)
    others[torch.arange(len(rows), device=unit.device), rows] = False
    found: list[float] = similarity[others].quantile(unit.new_tensor(shares)).tolist()
    return found
