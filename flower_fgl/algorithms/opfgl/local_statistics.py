"""Values that an O-pFGL client derives from its own graph before any upload."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.opfgl.labels import (
    distillation_factor,
    homophily,
    propagate_labels,
)
from flower_fgl.algorithms.opfgl.pseudo_graph import PseudoGraph
from flower_fgl.nn import GraphInput
from flower_fgl.nn.sparse import SparseOperator

__all__ = ["LocalKnowledge", "adjacency_operator", "pseudo_input", "study_labels"]


@dataclass(frozen=True, eq=False)
class LocalKnowledge:
    """Values derived from the labels of a client's graph; they never leave the client.

    ỹ (N, C), not normalised; H of Eq. (3) and w_dist of Eq. (4), both (C,); the number of
    neighbours of each node (N,); the class of training nodes (N,), −1 elsewhere.
    """

    soft: Tensor
    class_homophily: Tensor
    factor: Tensor
    degree: Tensor
    labels: Tensor


def adjacency_operator(edge_index: Tensor, num_nodes: int) -> SparseOperator:
    """Build S = D^{-1/2} A D^{-1/2}, (N, N), from edges in both directions without loops.

    Rows of isolated nodes are zero.
    """
    source, target = edge_index
    degree = torch.bincount(target, minlength=num_nodes).clamp(min=1).float()
    scale = degree.rsqrt()
    value = scale[source] * scale[target]
    return SparseOperator.from_entries(target, source, value, (num_nodes, num_nodes))


def study_labels(
    inputs: GraphInput,
    index: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    steps: int,
    share: float,
) -> LocalKnowledge:
    """Propagate the labels of training nodes (n,) and weight the classes, Eqs. (2)-(4).

    ``steps`` is n_lp, and ``share`` is a.
    """
    size = inputs.num_nodes
    known = torch.full((size,), -1, dtype=torch.int64, device=index.device)
    known[index] = labels
    start = torch.zeros((size, num_classes), device=index.device)
    start[index] = F.one_hot(labels, num_classes).float()
    operator = adjacency_operator(inputs.edge_index, size)
    total = homophily(inputs.edge_index, known, num_classes)
    return LocalKnowledge(
        soft=propagate_labels(operator, start, steps=steps, share=share),
        class_homophily=total,
        factor=distillation_factor(total),
        degree=torch.bincount(inputs.edge_index[1], minlength=size),
        labels=known,
    )


def pseudo_input(graph: PseudoGraph) -> GraphInput:
    """Convert a pseudo-graph to the input of backbones, with edges in both directions."""
    row, column = graph.adjacency.nonzero(as_tuple=True)
    return GraphInput(
        graph.features, torch.stack([row, column]), graph.adjacency[row, column]
    )
