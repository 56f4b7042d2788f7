"""Losses and views of FGSSL.

Huang et al., "Federated Graph Semantic and Structural Learning", IJCAI 2023.

===========  ==========================================================
symbol       argument
===========  ==========================================================
z^m          ``embedding``, of the model in training on its view
z^g          ``received``, of the received model on its view
τ            ``tau``
===========  ==========================================================
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.nn import GraphInput
from flower_fgl.nn.sparse import narrow_csr

__all__ = ["edge_differences", "mask_columns", "node_contrast", "random_view"]


def node_contrast(
    embedding: Tensor, received: Tensor, labels: Tensor, *, tau: float
) -> Tensor:
    """Compute the contrast of nodes by class, FNSC.

    The mean over nodes i and over the nodes p of i's class, i itself included, of ``−log(
    e_ip / (e_ip + Σ_k e_ik) )`` with ``e_ij = e^{cos(z_i^m, z_j^g)/τ}``, where k runs
    over the nodes of other classes.

    Parameters
    ----------
    embedding, received : Tensor of shape (n, p), float32
        z^m of the training nodes, with gradient, and z^g, constants.
    labels : Tensor of shape (n,), int64
        Their classes, at least two different ones.
    tau : float, positive
    """
    similarity = F.normalize(embedding, dim=1) @ F.normalize(received, dim=1).T / tau
    is_same = labels[:, None] == labels
    others = similarity.masked_fill(is_same, -torch.inf).logsumexp(dim=1, keepdim=True)
    losses = F.softplus(others - similarity) * is_same
    return (losses.sum(dim=1) / is_same.sum(dim=1)).mean()


def edge_differences(embedding: Tensor, pairs: Tensor) -> Tensor:
    """Compute |h_u − h_v| of edges ``pairs`` (2, E), each once: (E, p).

    h is ``embedding`` (N, p). The softmax over the p dimensions describes an edge, FGSD.
    """
    one, other = pairs
    return (embedding.index_select(0, one) - embedding.index_select(0, other)).abs()


def mask_columns(x: Tensor, kept: Tensor) -> Tensor:
    """Set the features of x (N, d), whose ``kept`` (d,) is false, to 0, in the layout of x.

    Masked entries of a sparse tensor are left out.
    """
    if x.layout != torch.sparse_csr:
        return x * kept
    columns, starts = x.col_indices(), x.crow_indices()
    stays = kept[columns]
    before = torch.cat([starts.new_zeros(1), stays.to(starts.dtype).cumsum(0)])
    return narrow_csr(
        before[starts.long()], columns[stays], x.values()[stays], tuple(x.shape)
    )


def random_view(
    graph: GraphInput,
    pairs: Tensor,
    generator: torch.Generator,
    *,
    edge_drop: float,
    feature_mask: float,
) -> GraphInput:
    """Draw a view of a graph with fewer edges and features.

    ``pairs`` (2, E) are its edges, each once; both directions are kept or dropped.
    ``edge_drop`` and ``feature_mask`` are the probabilities of an edge, and of a feature of
    all nodes, to be dropped.
    """
    edges = torch.rand(pairs.shape[1], generator=generator) >= edge_drop
    features = torch.rand(graph.num_features, generator=generator) >= feature_mask
    left = pairs[:, edges.to(pairs.device)]
    both = torch.cat([left, left.flip(0)], dim=1)
    x = graph.x
    if feature_mask:
        x = mask_columns(x, features.to(x.device))
    return graph.with_edges(both).with_features(x)
