"""Which features and edges carry a score: attributions as functions of tensors.

Integrated gradients: Sundararajan, Taly and Yan, "Axiomatic Attribution for Deep Networks",
ICML 2017. Masks of edges: Ying et al., "GNNExplainer: Generating Explanations for Graph
Neural Networks", NeurIPS 2019. The backbones of this package compute PyG's layers by sparse
products, so the hooks of ``torch_geometric.explain`` see no messages; here the mask
multiplies the weights of the edges instead, which gives the same network.

Letters: n nodes, d features, E undirected edges.
"""

import math
from collections.abc import Callable, Sequence
from itertools import combinations

import torch
from torch import Tensor

from flower_fgl.nn.optimizers import Adam

__all__ = ["STEPS", "drops", "edge_mask", "integrated_gradients", "overlap"]

STEPS = 50
"""Points of the path from zero to the features, each a graph of its own."""
EPOCHS, LEARNING_RATE = 100, 0.1
SIZE, ENTROPY = 0.005, 1.0
"""Weights of the sum, and of the mean entropy, of a mask, as in PyG's GNNExplainer."""
Score = Callable[[Tensor], Tensor]
"""Returns the score, of shape (), for features (n, d) or weights (E,)."""


def integrated_gradients(score: Score, x: Tensor) -> Tensor:
    """Attribute a score to features, or to weights of edges, with zeros as baseline.

    ``score`` is a differentiable function of ``x``, features (n, d) or weights (E,). The
    sum of the attributions, which have its shape, tends to the score of ``x`` minus that
    of zeros.

    Notes
    -----
    1. Each point of the path is computed alone, in the middle of its step. A batch of
       points as one graph needs an edge list of its own for every point: a function that
       closes over the edges of one graph would pass messages in the first graph only.
    """
    total = torch.zeros_like(x)
    for step in range(STEPS):
        at = (x.detach() * ((step + 0.5) / STEPS)).requires_grad_()
        # zeros if the score does not depend on x
        (found,) = torch.autograd.grad(score(at), at, materialize_grads=True)
        total += found
    return x * total / STEPS


def edge_mask(loss: Score, num_edges: int, generator: torch.Generator) -> Tensor:
    """Learn which edges keep a prediction, GNNExplainer, Eq. (6).

    ``loss`` is that of the original prediction for weights (E,) of the edges,
    differentiable. ``generator`` draws the initial mask. The result (E,), in (0, 1), is
    the importance of the edges.

    Notes
    -----
    1. In a neighbourhood of few edges the entropy drives each edge to the side of 1/2 on
       which its initial value was drawn. That is why masks of several draws are compared.
    """
    start = torch.randn(num_edges, generator=generator) * 0.1
    logits = start.requires_grad_()
    optimizer = Adam([logits], lr=LEARNING_RATE)
    for _ in range(EPOCHS):
        mask = logits.sigmoid()
        safe = mask.clamp(1e-7, 1 - 1e-7)
        entropy = -(safe * safe.log() + (1 - safe) * (1 - safe).log()).mean()
        objective = loss(mask) + SIZE * mask.sum() + ENTROPY * entropy
        (logits.grad,) = torch.autograd.grad(objective, logits)
        optimizer.step()
    return logits.detach().sigmoid()


def overlap(tops: Sequence[set[int]]) -> float:
    """Return the mean Jaccard overlap of all pairs of sets, NaN with fewer than two."""
    shares = [len(a & b) / max(len(a | b), 1) for a, b in combinations(tops, 2)]
    return math.fsum(shares) / len(shares) if shares else math.nan


def drops(
    score: Score, num_edges: int, chosen: Tensor, generator: torch.Generator, draws: int
) -> tuple[float, list[float]]:
    """Return how much a score drops without the chosen edges, and without random ones.

    ``chosen`` (k,) are numbers of edges; each of the ``draws`` removes k random ones of
    all.
    """
    everything = torch.ones(num_edges)

    @torch.no_grad()
    def without(edges: Tensor) -> float:
        left = everything.index_fill(0, edges, 0.0)
        return float(score(everything)) - float(score(left))

    others = [torch.randperm(num_edges, generator=generator) for _ in range(draws)]
    return without(chosen), [without(each[: len(chosen)]) for each in others]
