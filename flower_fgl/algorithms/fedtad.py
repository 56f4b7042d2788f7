"""Equations and modules of FedTAD: class reliability, generated graphs, distillation.

Zhu et al., "FedTAD: Topology-aware Data-free Knowledge Distillation for Subgraph
Federated Learning", IJCAI 2024.
"""

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from scipy.sparse import csr_array, diags, hstack
from scipy.sparse.linalg import norm
from torch import Tensor, nn

from flower_fgl.algorithms.fedstar import return_probabilities
from flower_fgl.nn import GraphInput
from flower_fgl.nn.sparse import index_sum

__all__ = ["GraphGenerator", "balanced_classes", "class_reliability", "discrepancy"]
__all__ += ["generator_loss", "neighbour_similarity", "normalise_reliability"]
__all__ += ["row_products", "row_weights"]

STEPS = 5
"""Longest random walk of the structure part of φ."""

NOISE = 32
"""Width of the generator's noise."""


def neighbour_similarity(features: csr_array, edges: Tensor) -> Tensor:
    """Compute cos(φ_u, φ_v) of edges (2, E): (E,), float64; 0 without features."""
    length = norm(features, axis=1)
    scale = np.divide(1.0, length, out=np.zeros_like(length), where=length > 0)
    return row_products(csr_array(diags(scale) @ features), edges)


def row_products(matrix: csr_array, edges: Tensor) -> Tensor:
    """Compute the scalar product of the rows at both ends of edges (2, E): (E,), float64.

    Edges are taken in blocks, whose rows are in memory at once.
    """
    found = [np.zeros(0)]
    for block in torch.split(edges, 1 << 16, dim=1):
        one, other = block.numpy()
        both = matrix[one].multiply(matrix[other]).sum(axis=1)
        found.append(np.asarray(both, dtype=np.float64).ravel())
    return torch.from_numpy(np.concatenate(found))


def class_reliability(
    features: csr_array,
    edge_index: Tensor,
    index: Tensor,
    labels: Tensor,
    num_classes: int,
) -> Tensor:
    """Compute κ(c) = Σ_u [1 + Σ_{v ∈ N(u)} cos(φ_u, φ_v)] / (|N(u)| + 1), over c's nodes.

    φ is ``features`` (N, f). ``edge_index`` (2, E) has each undirected edge in both
    directions; self-loops are ignored. ``index`` and ``labels`` (n,) are the training
    nodes; κ (C,) is 0 for a class without any.
    """
    number = features.shape[0]
    is_train = torch.zeros(number, dtype=torch.bool).index_fill(0, index, value=True)
    source, target = edge_index
    kept = is_train[source] & (source != target)
    codes = torch.unique(source[kept] * number + target[kept])
    edges = torch.stack([codes // max(1, number), codes % max(1, number)])
    alike = neighbour_similarity(features, edges)
    total = torch.ones(number, dtype=torch.float64).index_add(0, edges[0], alike)
    degree = torch.bincount(edges[0], minlength=number)
    found = (total / (degree + 1))[index]
    return index_sum(found, labels, num_classes).float()


def node_features(graph: GraphInput) -> csr_array:
    """Return φ: the features beside the probabilities of returning in 1 to 5 steps."""
    walks = csr_array(return_probabilities(graph, STEPS).cpu().numpy())
    x = graph.x.cpu()
    if x.layout == torch.sparse_csr:
        parts = (x.values(), x.col_indices(), x.crow_indices())
        own = csr_array(tuple(part.numpy() for part in parts), shape=tuple(x.shape))
    else:
        own = csr_array(x.numpy())
    return csr_array(hstack([own, walks]))


def normalise_reliability(reliability: Tensor) -> Tensor:
    """Divide κ (K, C) by its sum over the clients; a class of no client has 0."""
    total = reliability.sum(dim=0)
    return reliability / total.where(total > 0, 1.0)


def balanced_classes(number: int, num_classes: int) -> Tensor:
    """Return the class of each generated node (n,): equal numbers, the last gets the rest.

    ``number`` is raised to one node a class.
    """
    number = max(number, num_classes)
    each = number // num_classes
    return (torch.arange(number) // each).clamp(max=num_classes - 1)


def row_weights(reliability: Tensor, classes: Tensor) -> Tensor:
    """Return κ̂_i(c)/n_c for every client and generated node, of shape (K, n)."""
    counts = torch.bincount(classes, minlength=reliability.shape[1])
    return (reliability / counts.clamp(min=1))[:, classes]


class GraphGenerator(nn.Module):
    """Features of nodes from their classes and noise; ``is_bounded`` ends with a tanh.

    Notes
    -----
    1. The published code has no last activation. Without a bound the generator raises
       the discrepancy by larger and larger features, and the global model suffers.
    """

    def __init__(
        self, num_classes: int, num_features: int, *, is_bounded: bool = True
    ) -> None:
        super().__init__()
        self.is_bounded = is_bounded
        self.classes = nn.Embedding(num_classes, num_classes)
        self.layers = nn.Sequential(
            nn.Linear(num_classes + NOISE, 64),
            nn.Tanh(),
            nn.Linear(64, 128),
            nn.Tanh(),
            nn.Linear(128, 256),
            nn.Tanh(),
            nn.Linear(256, num_features),
        )

    def forward(self, classes: Tensor, noise: Tensor) -> Tensor:
        """Return x of shape (n, d) from classes (n,) and noise (n, 32)."""
        out: Tensor = self.layers(torch.cat([self.classes(classes), noise], dim=1))
        return out.tanh() if self.is_bounded else out


def discrepancy(common: Tensor, clients: Tensor, weights: Tensor) -> Tensor:
    """Compute Σ_i Σ_c κ̂_i(c)·mean|w(G)_c − θ_i(G)_c|.

    Of the logits of the global model, ``common`` (n, C), and of the clients' models,
    ``clients`` (K, n, C); ``weights`` (K, n) are the :func:`row_weights`.
    """
    return (weights * (common - clients).abs().mean(dim=2)).sum()


def generator_loss(
    common: Tensor, clients: Tensor, weights: Tensor, classes: Tensor, spread: Tensor
) -> Tensor:
    """Compute the generator's loss: class, minus discrepancy, plus K times diversity.

    ``classes`` (n,) are those of the generated nodes, ``spread`` is
    :func:`~flower_fgl.algorithms.fedgen.diversity_loss`; the others are as in
    :func:`discrepancy`.
    """
    number = len(clients)
    losses = F.cross_entropy(
        clients.flatten(0, 1), classes.repeat(number), reduction="none"
    )
    semantic = (weights * losses.view(number, -1)).sum()
    return semantic - discrepancy(common, clients, weights) + number * spread
