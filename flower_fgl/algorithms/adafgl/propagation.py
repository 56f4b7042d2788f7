"""AdaFGL's propagation by alike predictions, and the homophily of a client's graph.

===========  ==========================================================
symbol       here
===========  ==========================================================
Y            ``soft``, predictions of the federated model, constants
B            :func:`alike_pairs`
Ã            :func:`propagation_matrix`
X̂            :func:`propagated`
h            :func:`homophily_confidence`
===========  ==========================================================
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.fedgta import propagate_labels
from flower_fgl.nn import GraphInput
from flower_fgl.nn.sparse import Operator

__all__ = [
    "alike_pairs",
    "homophily_confidence",
    "likeness",
    "propagated",
    "propagated_linear",
    "propagation_matrix",
]

ALIKE = 0.999
"""Cosine of two predictions above which their nodes count as neighbours."""
STEPS = 10
"""Steps of the label propagation that measures the homophily."""
UNKNOWN = 0.5
"""Homophily of a client that cannot measure it."""


def likeness(probabilities: Tensor) -> Tensor:
    """Compute the cosine of the predictions (N, C) of all pairs: (N, N), 0 on the diagonal.

    Notes
    -----
    1. The published codes apply a second softmax to Y, which squeezes its values: two
       nodes with (.9, .1) and (.1, .9) then have .748 instead of .220, and nearly all
       pairs count as alike. Here it is the cosine of Y itself.
    """
    unit = F.normalize(probabilities, dim=1)
    cosine = unit @ unit.T
    own = torch.eye(len(cosine), dtype=torch.bool, device=cosine.device)
    return cosine.masked_fill(own, 0.0)


def alike_pairs(soft: Tensor) -> Tensor:
    """Return B: whether the predictions Y (N, C) of two nodes are alike, (N, N) bool."""
    return likeness(soft) > ALIKE


def propagation_matrix(edge_index: Tensor, alike: Tensor, *, alpha: float) -> Tensor:
    """Compute Ã = D^{-1/2} (α A + (1 − α) B + I) D^{-1/2}: (N, N), symmetric.

    A has the edges ``edge_index`` (2, E), each in both directions; B is ``alike`` (N, N),
    bool.
    """
    source, target = edge_index
    mixed = (1 - alpha) * alike
    mixed[target, source] += alpha
    mixed.fill_diagonal_(1.0)
    scale = mixed.sum(dim=1).rsqrt()  # at least 1 before, by the diagonal
    return scale[:, None] * mixed * scale


def propagated(matrix: Tensor, x: Tensor, *, steps: int) -> Tensor:
    """Return X̂ = [X ‖ ÃX ‖ … ‖ Ã^k X], of shape (N, (k + 1) d)."""
    rows = [x]
    for _ in range(steps):
        rows.append(matrix @ rows[-1])
    return torch.cat(rows, dim=1)


def propagated_linear(
    matrix: Tensor, graph: GraphInput, weight: Tensor, *, steps: int
) -> Tensor:
    """Compute X̂ Wᵀ (N, q) as Σ_i Ã^i (X W_iᵀ): features are mapped first, then propagated.

    This costs less than the product with X̂ where features are sparse and wide. ``matrix``
    is Ã (N, N), ``graph`` has the features X (N, d), and ``weight`` is
    W = [W_0 ‖ … ‖ W_k] of shape (q, (k + 1) d).
    """
    parts = torch.cat(weight.chunk(steps + 1, dim=1))  # ((k + 1) q, d)
    *others, out = graph.linear(None, parts).chunk(steps + 1, dim=1)
    for part in reversed(others):
        out = torch.addmm(part, matrix, out)
    return out


def homophily_confidence(
    operator: Operator,
    index: Tensor,
    labels: Tensor,
    order: Tensor,
    *,
    num_nodes: int,
    num_classes: int,
) -> float:
    """Measure how well labels spread along the edges: h in [0, 1].

    Half of the training nodes keep their class, all other nodes start from 1/C. After
    ``STEPS`` repetitions of F ← ½ P F + ½ F⁰, h is the accuracy on the other half;
    ``UNKNOWN`` with fewer than two training nodes.

    Parameters
    ----------
    operator : Operator
        P, of shape (N, N).
    index, labels : Tensor of shape (n,), int64
        Training nodes and their classes.
    order : Tensor of shape (n,), int64
        A permutation; its first ⌊n/2⌋ entries are the nodes that keep their class.
    num_nodes, num_classes : int
        N and C.

    Notes
    -----
    1. The nodes that keep their class are reset after each step; the published codes add
       their class instead.
    """
    half = len(index) // 2
    if not half:
        return UNKNOWN
    known, asked = order[:half], order[half:]
    start = torch.full((num_nodes, num_classes), 1 / num_classes, device=index.device)
    seeds = F.one_hot(labels[known], num_classes).to(start.dtype)
    start = start.index_copy(0, index[known], seeds)
    found = propagate_labels(operator, start, index[known], steps=STEPS)
    hits = found[index[asked]].argmax(dim=1) == labels[asked]
    return float(hits.float().mean())
