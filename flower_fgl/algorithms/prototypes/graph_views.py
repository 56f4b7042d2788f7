"""Second view of a client's graph, and losses that compare both views (FGGP).

Wan, Huang and Ye, "Federated Graph Learning under Domain Shift with Generalizable
Prototypes", AAAI 2024 (FGGP).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

__all__ = [
    "all_pairs",
    "confidence_means",
    "confident_labels",
    "edge_loss",
    "edge_scores",
    "nearest_neighbours",
    "resample_edges",
    "union_pairs",
    "view_contrast",
]

BLOCK = 1 << 18
"""Pairs of nodes in memory at once: 256 Ki × 4 bytes fit into a core's cache."""


def confident_labels(
    logits: Tensor, index: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a class and a confidence for every node.

    Parameters
    ----------
    logits : Tensor of shape (N, C), float32
        Predictions for all local nodes; no gradient flows to them.
    index, labels : Tensor of shape (n,), int64
        Training nodes, which have confidence 1, and their classes.

    Returns
    -------
    classes : Tensor of shape (N,), int64
        The label of training nodes, the prediction for others.
    confidence : Tensor of shape (N,), float32, in (0, 1]
        Largest softmax of the prediction.
    """
    confidence, classes = logits.detach().softmax(dim=1).max(dim=1)
    return (
        classes.index_copy(0, index, labels),
        confidence.index_fill(0, index, 1.0),
    )


def confidence_means(
    embedding: Tensor, classes: Tensor, confidence: Tensor, num_classes: int
) -> Tensor:
    """Average embeddings by class, weighted by confidence: FGGP's prototypes.

    Parameters
    ----------
    embedding : Tensor of shape (N, p), float32
        h.
    classes : Tensor of shape (N,), int64
        Class of each node.
    confidence : Tensor of shape (N,), float32, positive
        Weight of each node.
    num_classes : int
        C.

    Returns
    -------
    Tensor of shape (C, p), float32
        Zero for a class without nodes.
    """
    total = confidence.new_zeros(num_classes).index_add(0, classes, confidence)
    weight = (confidence / total[classes])[:, None]
    out = embedding.new_zeros(num_classes, embedding.shape[1])
    return out.index_add(0, classes, weight * embedding)


def view_contrast(first: Tensor, second: Tensor, *, tau: float) -> Tensor:
    """Align the class prototypes of both views by InfoNCE.

    ``mean_c −log( e^{cos(s_c, f_c)/τ} / Σ_{c'} e^{cos(s_c, f_{c'})/τ} )``

    Parameters
    ----------
    first, second : Tensor of shape (M, p), float32
        f and s, the prototypes of the classes present, in the same order; M at least 1.
    tau : float, positive
        Temperature.

    Returns
    -------
    Tensor of shape ()
        0 for a single class.
    """
    similarity = F.normalize(second, dim=1) @ F.normalize(first, dim=1).T / tau
    return F.cross_entropy(similarity, torch.arange(len(first), device=first.device))


def nearest_neighbours(embedding: Tensor, number: int) -> Tensor:
    """Link each node to its nearest nodes by cosine.

    Parameters
    ----------
    embedding : Tensor of shape (N, p), float32
        h; no gradient flows to it.
    number : int, at least 1
        k; all other nodes if they are fewer.

    Returns
    -------
    Tensor of shape (2, E), int64
        Node and neighbour. Only neighbours with positive cosine, so a node with zero
        embedding has none.

    Notes
    -----
    1. The rows of the similarity matrix are processed in blocks: time N²p, memory of
       one block.
    """
    unit = F.normalize(embedding.detach(), dim=1)
    number = min(number, len(unit) - 1)
    rows = torch.arange(len(unit), device=unit.device)
    found = [rows.new_empty(2, 0)]
    for block in torch.split(rows, max(1, BLOCK // max(1, len(unit)))):
        similarity = unit[block] @ unit.T  # (rows, N)
        similarity.scatter_(1, block[:, None], -torch.inf)
        value, neighbour = similarity.topk(max(0, number), dim=1)
        node = block[:, None].expand_as(neighbour)
        found.append(torch.stack([node, neighbour])[:, value > 0])
    return torch.cat(found, dim=1)


def union_pairs(num_nodes: int, *edges: Tensor) -> Tensor:
    """Merge edges to undirected pairs of nodes, each once, without self-loops.

    Parameters
    ----------
    num_nodes : int
        N.
    *edges : Tensor of shape (2, E), int64
        Edges, in one direction or both.

    Returns
    -------
    Tensor of shape (2, M), int64
        Pairs u < v, ascending.
    """
    both = torch.cat(edges, dim=1).sort(dim=0).values
    low, high = both[:, both[0] < both[1]]
    key = torch.unique(low * num_nodes + high)
    return torch.stack([key.div(num_nodes, rounding_mode="floor"), key % num_nodes])


def edge_scores(embedding: Tensor, pairs: Tensor) -> Tensor:
    """Compute h_u·h_v, the edge predictor's logit, for pairs (2, M) of nodes."""
    low, high = pairs
    return (embedding[low] * embedding[high]).sum(dim=1)


def resample_edges(logits: Tensor, noise: Tensor, *, tau: float) -> Tensor:
    """Draw relaxed edges by Gumbel noise, ``σ((z + g_1 − g_2)/τ)``.

    Parameters
    ----------
    logits : Tensor of shape (M,), float32
        z; an edge exists with probability σ(z).
    noise : Tensor of shape (M,), float32, in [0, 1]
        Uniform; its logit is the difference of two Gumbel variables.
    tau : float, positive
        Temperature; near 0 the result is near 0 or 1.

    Returns
    -------
    Tensor of shape (M,), in [0, 1]
        Edge weights, with gradient.
    """
    return torch.sigmoid((logits + torch.logit(noise, eps=1e-6)) / tau)


def edge_loss(embedding: Tensor, pairs: Tensor) -> Tensor:
    """Compare the edge predictor with the union graph, weighted cross-entropy.

    ``norm · BCE(σ(h_u·h_v), A_uv)`` over all pairs of nodes, with weight (T−E)/E for
    positive pairs and ``norm = T / (2(T−E))``, for E edges among T pairs. This is half
    the mean over the edges plus half the mean over the other pairs.

    Parameters
    ----------
    embedding : Tensor of shape (N, p), float32
        h, with gradient.
    pairs : Tensor of shape (2, E), int64
        Edges of the union graph as returned by :func:`union_pairs`.

    Returns
    -------
    Tensor of shape ()
        0 without pairs; a half without pairs is omitted.

    Notes
    -----
    1. A node and itself are not a pair.
    2. The N² scores and their gradient are computed in blocks: time N²p, memory of one
       block.
    """
    number, edges = len(embedding), pairs.shape[1]
    scores = edge_scores(embedding, pairs)
    others = number * (number - 1) // 2 - edges
    every = all_pairs(embedding)
    on_edges = F.softplus(scores).sum()
    apart = (every - on_edges) / max(1, others)
    linked = F.softplus(-scores).sum() / max(1, edges)
    out: Tensor = 0.5 * (linked + apart * (others > 0))
    return out


def all_pairs(embedding: Tensor) -> Tensor:
    """Sum softplus(h_u·h_v) over all pairs u < v of nodes.

    Parameters
    ----------
    embedding : Tensor of shape (N, p), float32
        h, with gradient.

    Returns
    -------
    Tensor of shape ()
    """
    out: Tensor = _AllPairs.apply(embedding)  # type: ignore[no-untyped-call]
    return out


class _AllPairs(torch.autograd.Function):
    """Sum softplus(h_u·h_v) over all u < v."""

    @staticmethod
    def forward(ctx: Any, embedding: Tensor) -> Tensor:
        """Sum blocks of pairs, and their gradient ``Σ_v σ(h_u·h_v) h_v``."""
        number = len(embedding)
        total = embedding.new_zeros((), dtype=torch.float64)
        gradient = torch.zeros_like(embedding)
        step = max(1, BLOCK // max(1, number))
        for start in range(0, number, step):
            block, rest = embedding[start : start + step], embedding[start:]
            score = block @ rest.T  # pairs u ≤ v
            loss, slope = F.softplus(score), score.sigmoid_()
            for pairs in (loss, slope):  # u < v
                pairs[:, : len(block)].triu_(diagonal=1)
            total += loss.sum(dtype=torch.float64)
            gradient[start : start + step] += slope @ rest
            gradient[start:] += slope.T @ block
        ctx.save_for_backward(gradient)
        return total.to(embedding.dtype)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Tensor:
        """Scale the stored gradient."""
        gradient: Tensor = ctx.saved_tensors[0]
        return gradient * outputs[0]
