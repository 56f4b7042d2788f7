"""FGGP: a second view of a client's graph, its losses, and clusters of prototypes (FINCH).

Wan, Huang and Ye, "Federated Graph Learning under Domain Shift with Generalizable
Prototypes", AAAI 2024 (FGGP). Sarfraz, Sharma and Stiefelhagen, "Efficient Parameter-Free
Clustering Using First Neighbor Relations", CVPR 2019 (FINCH).
"""

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from flower_fgl.algorithms.prototypes.hop_prototypes import class_means
from flower_fgl.nn.sparse import index_sum, with_slope

__all__ = ["cluster_means", "confidence_means", "confident_labels", "edge_loss"]
__all__ += ["edge_scores", "finch", "first_neighbour_clusters", "nearest_neighbours"]
__all__ += ["pair_sums", "resample_edges", "union_pairs", "view_contrast"]

BLOCK = 1 << 18
"""Pairs of nodes in memory at once: 256 Ki × 4 bytes fit into a core's cache."""


def confident_labels(
    logits: Tensor, index: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a class and a confidence in (0, 1] for every node: (N,) each.

    The label of the training nodes, with confidence 1; for others the prediction of the
    logits (N, C), and its softmax. No gradient flows to these.
    """
    confidence, classes = logits.detach().softmax(dim=1).max(dim=1)
    return (classes.index_copy(0, index, labels), confidence.index_fill(0, index, 1.0))


def confidence_means(
    embedding: Tensor, classes: Tensor, confidence: Tensor, num_classes: int
) -> Tensor:
    """Average embeddings by class, weighted by confidence: FGGP's prototypes (C, p).

    h is ``embedding`` (N, p); ``classes`` and ``confidence`` (N,) are each node's class
    and weight, positive. Zero for a class without nodes.
    """
    total = index_sum(confidence, classes, num_classes)
    weight = (confidence / total[classes])[:, None]
    return index_sum(weight * embedding, classes, num_classes)


def view_contrast(
    first: Tensor, second: Tensor, present: Tensor, *, tau: float
) -> Tensor:
    """Align the class prototypes of both views of each client by InfoNCE: (K,).

    ``mean_c −log( e^{cos(s_c, f_c)/τ} / Σ_{c'} e^{cos(s_c, f_{c'})/τ} )``, 0 for a
    single class. ``first`` and ``second`` (K, C, p) are f and s, whose rows are read
    for the classes that are ``present`` (K, C), at least one for each client.
    """
    across = F.normalize(first, dim=2).transpose(1, 2)
    similarity = torch.bmm(F.normalize(second, dim=2), across) / tau
    # a finite mark instead of −∞: its exponential is 0, and no gradient is NaN
    least = torch.finfo(similarity.dtype).min / 2
    columns = similarity.masked_fill(~present[:, None], least)
    own = -columns.log_softmax(2).diagonal(dim1=1, dim2=2)  # (K, C)
    return torch.where(present, own, 0).sum(1) / present.sum(1)


def nearest_neighbours(embedding: Tensor, number: int) -> Tensor:
    """Link each node to its ``number`` nearest nodes by cosine: node and neighbour, (2, E).

    Only neighbours with positive cosine, so a node with zero embedding has none. No
    gradient flows to the embedding (N, p). The rows of the similarity matrix are
    processed in blocks: time N²p, memory of one block.
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
    """Merge edges (2, E), in one direction or both, to ascending pairs u < v, each once."""
    both = torch.cat(edges, dim=1).sort(dim=0).values
    low, high = both[:, both[0] < both[1]]
    key = torch.unique(low * num_nodes + high)
    return torch.stack([key.div(num_nodes, rounding_mode="floor"), key % num_nodes])


def edge_scores(embedding: Tensor, pairs: Tensor) -> Tensor:
    """Compute h_u·h_v, the edge predictor's logit, for pairs (2, M) of nodes."""
    low, high = pairs
    return (embedding[low] * embedding[high]).sum(dim=1)


def resample_edges(logits: Tensor, noise: Tensor, *, tau: float) -> Tensor:
    """Draw relaxed edges by Gumbel noise: weights ``σ((z + g_1 − g_2)/τ)`` (M,).

    z are ``logits`` (M,); an edge exists with probability σ(z). ``noise`` (M,) is uniform
    in [0, 1]; its logit is the difference of two Gumbel variables. For τ near 0 the
    weights, which have a gradient, are near 0 or 1.
    """
    return torch.sigmoid((logits + torch.logit(noise, eps=1e-6)) / tau)


def edge_loss(embedding: Tensor, pairs: Tensor, client: Tensor, real: Tensor) -> Tensor:
    """Compare each client's edge predictor with its union graph, weighted cross-entropy.

    ``norm · BCE(σ(h_u·h_v), A_uv)`` over all pairs of nodes, with weight (T−E)/E for
    positive pairs and ``norm = T / (2(T−E))``, for E edges among T pairs. This is half
    the mean over the edges plus half the mean over the other pairs: (K,), a half
    without pairs is omitted. A node and itself are not a pair. The n² scores and their
    gradient are computed in blocks: time n²p, memory of one block.

    ``embedding`` (K, n, p) is h, with gradient; ``real`` (K, n) marks the rows that are
    nodes, the first of each client. ``pairs`` (2, E) are the edges of the union graphs,
    see :func:`union_pairs`, as rows of the flattened (K·n, p), and ``client`` (E,)
    their clients.
    """
    number = real.sum(1)
    edges = torch.bincount(client, minlength=len(real))
    others = number * (number - 1) // 2 - edges
    scores = edge_scores(embedding.flatten(0, 1), pairs)
    zeros = scores.new_zeros(len(real))
    on_edges = zeros.index_add(0, client, F.softplus(scores))
    apart = (pair_sums(embedding, real) - on_edges) / others.clamp(min=1)
    linked = zeros.index_add(0, client, F.softplus(-scores)) / edges.clamp(min=1)
    return 0.5 * (linked + apart * (others > 0))


def pair_sums(embedding: Tensor, real: Tensor) -> Tensor:
    """Sum softplus(h_u·h_v) over all pairs u < v of nodes of each client: (K,).

    ``embedding`` and ``real`` are those of :func:`edge_loss`.
    """
    if len(embedding) == 1 or embedding.shape[1] ** 2 > BLOCK:
        parts = zip(embedding.unbind(), real.sum(1).tolist(), strict=True)
        return torch.stack([_all_pairs(h[:size]) for h, size in parts])
    size = embedding.shape[1]
    step = max(1, BLOCK // size**2)
    with torch.no_grad():
        gradient, totals = torch.empty_like(embedding), []
        others = ~torch.eye(size, dtype=torch.bool, device=embedding.device)
        for h, is_node, out in zip(
            *(torch.split(rows, step) for rows in (embedding, real, gradient)),
            strict=True,
        ):
            used = is_node[:, :, None] & is_node[:, None] & others
            score = torch.bmm(h, h.transpose(1, 2))  # (g, n, n)
            loss = F.softplus(score).mul_(used)
            totals.append(loss.sum((1, 2), dtype=torch.float64) / 2)
            torch.bmm(score.sigmoid_().mul_(used), h, out=out)
        total = torch.cat(totals).to(embedding.dtype)
    return with_slope(total, embedding, gradient)


def _all_pairs(embedding: Tensor) -> Tensor:
    """Return the sum of one client, computed in blocks of rows."""
    number = len(embedding)
    step = max(1, BLOCK // max(1, number))
    with torch.no_grad():
        total = embedding.new_zeros((), dtype=torch.float64)
        gradient = torch.zeros_like(embedding)
        for start in range(0, number, step):
            block, rest = embedding[start : start + step], embedding[start:]
            score = block @ rest.T  # pairs u ≤ v
            loss, slope = F.softplus(score), score.sigmoid_()
            for pairs in (loss, slope):  # u < v
                pairs[:, : len(block)].triu_(diagonal=1)
            total += loss.sum(dtype=torch.float64)
            gradient[start : start + step] += slope @ rest
            gradient[start:] += slope.T @ block
    return with_slope(total.to(embedding.dtype), embedding, gradient)


def first_neighbour_clusters(points: Tensor) -> Tensor:
    """Cluster points (n, p) by first neighbours, Sarfraz et al. 2019, Eq. (1).

    Two points are linked if one is the other's nearest by cosine, or both have the same
    nearest point; clusters (n,), from 0, are the connected components. There is at least
    one point. Among equally near points the first is the nearest. Points with the same
    nearest neighbour are both linked to it, so links between them are redundant and
    omitted.
    """
    number = len(points)
    if number == 1:
        return torch.zeros(1, dtype=torch.int64)
    unit = F.normalize(points.detach().cpu(), dim=1)
    similarity = (unit @ unit.T).fill_diagonal_(-torch.inf)
    nearest = similarity.argmax(dim=1).numpy()
    links = csr_array(
        (np.ones(number), (np.arange(number), nearest)), shape=(number, number)
    )
    _, labels = connected_components(links, directed=False)
    return torch.from_numpy(labels.astype(np.int64))


def finch(points: Tensor) -> Tensor:
    """Cluster points to the coarsest level of FINCH, Sarfraz et al. 2019, Algorithm 1.

    Returns the cluster of each point (n,), from 0: more than one cluster unless the first
    level already has one.
    """
    labels = first_neighbour_clusters(points)
    while True:
        number = int(labels.max()) + 1
        coarser = first_neighbour_clusters(class_means(points.cpu(), labels, number))
        merged = int(coarser.max()) + 1
        if merged in (1, number):
            return labels
        labels = coarser[labels]


def cluster_means(points: Tensor) -> Tensor:
    """Return the mean (m, p) of each FINCH cluster of points (n, p)."""
    labels = finch(points)
    return class_means(points, labels.to(points.device), int(labels.max()) + 1)
