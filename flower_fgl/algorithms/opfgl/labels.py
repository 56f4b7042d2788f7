"""What a client infers from its labels: O-pFGL Eqs. (2)-(4) and (7)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.nn import GraphInput
from flower_fgl.nn.sparse import SparseOperator

__all__ = ["LocalKnowledge", "adjacency_operator", "distillation_factor", "homophily"]
__all__ += ["propagate_labels", "reliable_nodes", "study_labels"]


def propagate_labels(
    adjacency: SparseOperator, labels0: Tensor, *, steps: int, share: float
) -> Tensor:
    """Propagate labels over the graph, O-pFGL Sec. IV-B: ỹ (N, C), in [0, 1].

    ``Y ← clip(a S Y + (1 − a) Y₀, 0, 1)``, ``steps`` times. ỹ is not normalised, and
    uniform 1/C for nodes that no label reaches. ``adjacency`` is S = D^{-1/2} A D^{-1/2},
    without self-loops, ``labels0`` is Y₀ (N, C), one-hot for training nodes, zero
    elsewhere, and ``share`` is a, the weight of the neighbours.
    """
    soft = labels0
    for _ in range(steps):
        soft = adjacency.matmul(soft).mul_(share)
        soft.add_(labels0, alpha=1 - share).clamp_(0, 1)
    is_unreached = soft.sum(dim=1, keepdim=True) == 0
    return torch.where(is_unreached, 1 / labels0.shape[1], soft)


def homophily(edge_index: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Sum the homophily of the labelled nodes of each class, O-pFGL Eqs. (2), (3): H (C,).

    ``edge_index`` (2, E) has every undirected edge in both directions; self-loops are
    ignored. ``labels`` (N,) are those of training nodes, −1 elsewhere. H is 0 for a class
    without labelled nodes.

    Notes
    -----
    1. A node without labelled neighbours has homophily 0 (0/0 in the paper).
    """
    source, target = edge_index
    is_used = (labels[source] >= 0) & (labels[target] >= 0) & (source != target)
    source, target = source[is_used], target[is_used]
    neighbours = torch.bincount(target, minlength=len(labels))
    is_same = labels[source] == labels[target]
    alike = torch.bincount(target[is_same], minlength=len(labels))
    ratio = alike.double() / neighbours.clamp(min=1)
    known = labels >= 0
    total = torch.bincount(labels[known], weights=ratio[known], minlength=num_classes)
    return total.float()


def distillation_factor(class_homophily: Tensor) -> Tensor:
    """Compute distillation weights, lower for classes easy to learn locally, Eq. (4).

    ``w(c) = 1 / (1 + ln(H(c) + 1))``, from O-pFGL; w_dist (C,) is in (0, 1].
    """
    return 1 / (1 + torch.log1p(class_homophily))


def reliable_nodes(
    soft: Tensor,
    degree: Tensor,
    is_unlabelled: Tensor,
    class_homophily: Tensor,
    *,
    min_confidence: float,
    min_degree: int,
    num_classes_kept: int,
) -> Tensor:
    """Infer the class of nodes that can be used as labelled, O-pFGL Eq. (7).

    The class (N,) of each node, −1 where it is not reliable or has a label. ``soft``
    (N, C) is ỹ, not negative, normalised here; ``degree`` (N,) the number of
    neighbours, ``is_unlabelled`` (N,) V_U, and ``class_homophily`` (C,) H. f_th and
    d_th are the minima, K the ``num_classes_kept`` of topK(H); the smaller class id
    wins a tie.
    """
    ranked = torch.sort(class_homophily, descending=True, stable=True).indices
    is_kept = torch.zeros_like(class_homophily, dtype=torch.bool)
    is_kept[ranked[:num_classes_kept]] = True
    total = soft.sum(dim=1).clamp(min=torch.finfo(soft.dtype).tiny)
    largest, best = soft.max(dim=1)
    reliable = is_unlabelled & (degree >= min_degree) & is_kept[best]
    reliable &= largest / total >= min_confidence
    return torch.where(reliable, best, -1)


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
