"""Class statistics of propagated features: O-pFGL Eqs. (2)-(9), (14) and (15)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.nn.sparse import SparseOperator, index_sum

__all__ = [
    "ClassStatistics",
    "Denominator",
    "additive_sums",
    "check_statistics",
    "class_statistics",
    "merge_statistics",
    "outside_shares",
    "propagated_features",
    "statistics_of_sums",
]

Denominator = Literal["n-1", "n-mc"]
"""Divisor of the pooled sum of squares; m_c is the number of clients with the class."""

ROWS = 65_536
"""Nodes read at once: 65,536 × 256 features × 8 bytes = 134 MB."""


@dataclass(frozen=True, eq=False)
class ClassStatistics:
    """Mean μ and unbiased variance s², (C, D), and number of nodes N (C,) of every class.

    Both are zero where ``count`` is 0, which marks a missing class. ``labelled_count``
    (C,) is the number of these nodes with a label.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor
    labelled_count: Tensor


def propagated_features(adjacency: SparseOperator, x: Tensor, depth: int) -> Tensor:
    """Concatenate features of growing neighbourhoods, O-pFGL Eq. (5).

    ``X^prop = [X ‖ ÃX ‖ … ‖ Ã^h X]``, (N, (h + 1)·d), strided. ``adjacency`` is Ã (N, N),
    the symmetric normalisation with self-loops, ``x`` (N, d) strided or sparse CSR, and
    ``depth`` h.
    """
    x = x.to_dense()
    num_nodes, width = x.shape
    out = x.new_empty((num_nodes, (depth + 1) * width))
    hop = x
    out[:, :width] = hop
    for h in range(1, depth + 1):
        hop = adjacency.matmul(hop)
        out[:, h * width : (h + 1) * width] = hop
    return out


def class_statistics(
    x: Tensor,
    classes: Tensor,
    num_classes: int,
    *,
    min_count: int = 2,
    is_labelled: Tensor | None = None,
) -> ClassStatistics:
    """Estimate mean and unbiased variance of each class, O-pFGL Eqs. (6) and (8).

    Sums run in float64, in blocks of nodes; the variance is computed from deviations from
    the mean. The mean of a class with a single node would be that node's features, and
    its variance is undefined. Therefore ``min_count`` is at least 2.

    Parameters
    ----------
    x : Tensor of shape (N, D), float32
        Propagated features.
    classes : Tensor of shape (N,), int64
        Label, or inferred class of a reliable node; −1 excludes the node.
    num_classes : int
    min_count : int, at least 2
        n_min: classes with fewer nodes are omitted.
    is_labelled : Tensor of shape (N,), bool, optional
        Whether the class is the node's own label; by default for all nodes.

    Raises
    ------
    ValueError
        If ``min_count`` is below 2, or ``classes`` does not fit ``x``.
    """
    if min_count < 2:
        raise ValueError(
            f"min_count must be at least 2, got {min_count}: one node has no variance, "
            "and its mean reveals the node's features."
        )
    if classes.shape != x.shape[:1]:
        raise ValueError(
            f"classes must have one entry for each of the {x.shape[0]} nodes, "
            f"got shape {tuple(classes.shape)}."
        )
    known = classes >= 0
    own = known if is_labelled is None else known & is_labelled
    count = torch.bincount(classes[known], minlength=num_classes)
    kept = count >= min_count
    labelled = torch.bincount(classes[own], minlength=num_classes)
    node = known.nonzero()[:, 0]
    blocks = [(n, classes[n]) for n in torch.split(node, ROWS)]
    total = x.new_zeros((num_classes, x.shape[1]), dtype=torch.float64)
    for n, c in blocks:
        total += index_sum(x[n].double(), c, num_classes)
    mean = total / count.clamp(min=1)[:, None]
    squares = torch.zeros_like(total)
    for n, c in blocks:
        deviation = x[n].double().sub_(mean[c])
        squares += index_sum(deviation.square_(), c, num_classes)
    variance = squares / (count - 1).clamp(min=1)[:, None]
    return ClassStatistics(
        mean=(mean * kept[:, None]).float(),
        variance=(variance * kept[:, None]).float(),
        count=count * kept,
        labelled_count=labelled * kept,
    )


def outside_shares(
    adjacency: SparseOperator, classes: Tensor, num_classes: int, depth: int
) -> Tensor:
    """Compute how much one node outside a class can stand out in its statistics.

    The mean of a class over ``Ã^h X`` also sums nodes outside the class. If these are
    one hub, its features follow from the means of two hops.

    ``adjacency`` is Ã (N, N), symmetric; ``classes`` (N,) are those of the statistics, −1
    excludes a node; ``depth`` is h. Returns (C,): the largest weight of a node outside the
    class, divided by that of all of them, in the hop where it is largest; 0 without such
    nodes. At most 1/m means that at least m nodes outside the class stand behind the
    statistics.
    """
    largest = torch.zeros(num_classes, device=classes.device)
    if not len(classes):
        return largest
    inside = classes[:, None] == torch.arange(num_classes, device=classes.device)
    weights = inside.float()
    for _ in range(depth):
        weights = adjacency.matmul(weights)
        outside = weights.masked_fill(inside, 0.0)
        total = outside.sum(dim=0)
        share = outside.amax(dim=0) / total.where(total > 0, 1.0)
        largest = torch.maximum(largest, share)
    return largest


def merge_statistics(
    means: Tensor | Sequence[Tensor],
    variances: Tensor | Sequence[Tensor],
    counts: Tensor | Sequence[Tensor],
    *,
    denominator: Denominator = "n-1",
    labelled_counts: Tensor | Sequence[Tensor] | None = None,
) -> ClassStatistics:
    """Pool the statistics of clients, O-pFGL Eq. (9); zero where no client has the class.

    ``s² = [Σ (N_k − 1) s_k² + Σ N_k (μ_k − μ)²] / q``.

    Parameters
    ----------
    means, variances : Tensor of shape (K, C, D), or K tensors of shape (C, D)
        μ_k and s_k²; ignored where ``counts == 0``.
    counts : Tensor of shape (K, C), int64, or K tensors of shape (C,)
        N_k; 0 marks a missing class.
    denominator : {"n-1", "n-mc"}
        q: N − 1, or N minus the number of clients that have the class; at least 1.
    labelled_counts : like ``counts``, optional
        Numbers of labelled nodes; by default ``counts``.

    Raises
    ------
    PayloadError
        If clients disagree on shapes, or as in :func:`check_statistics`.
    ValueError
        If ``denominator`` is unknown.

    Notes
    -----
    1. Eq. (9) divides by N − m with m all clients, which can be negative. The numerator
       is the total sum of squares; with N − 1 the result is the variance of the pooled
       sample.
    """
    mean, variance = _stack(means, "means"), _stack(variances, "variances")
    count = _stack(counts, "counts")
    own = count if labelled_counts is None else _stack(labelled_counts, "counts")
    check_statistics(mean, variance, count)
    held = (count > 0)[..., None]
    n = count.double()[..., None]
    mean = mean.double().masked_fill(~held, 0.0)
    variance = variance.double().masked_fill(~held, 0.0)
    total = n.sum(dim=0)
    centre = (n * mean).sum(dim=0) / total.clamp(min=1)
    squares = ((n - 1).clamp(min=0) * variance).sum(dim=0)
    squares += (n * (mean - centre).square()).sum(dim=0)
    divisor = _divisor(count.sum(dim=0), (count > 0).sum(dim=0), denominator)
    return ClassStatistics(
        mean=centre.float(),
        variance=(squares / divisor[:, None]).float(),
        count=count.sum(dim=0),
        labelled_count=own.sum(dim=0),
    )


def check_statistics(mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Refuse statistics (..., C, D) and counts (..., C) that no sample can have.

    Raises
    ------
    PayloadError
        If shapes differ, a count or variance is negative, or, where the count is not 0, a
        mean or variance is not finite.
    """
    if mean.shape != variance.shape or mean.shape[:-1] != count.shape:
        raise PayloadError(
            "Statistics must be means and variances (..., classes, width) and counts "
            f"(..., classes), got {tuple(mean.shape)}, {tuple(variance.shape)} and "
            f"{tuple(count.shape)}: all clients must have the same features and depth."
        )
    if bool((count < 0).any()):
        raise PayloadError(
            f"Class counts must not be negative, got {int(count.min())}."
        )
    for name, value in (("mean", mean), ("variance", variance)):
        value = value[count > 0]
        is_bad = ~value.isfinite()
        if name == "variance":
            is_bad |= value < 0
        if bool(is_bad.any()):
            held, row = (count > 0).nonzero(), is_bad.any(dim=-1).nonzero()[0, 0]
            raise PayloadError(
                f"Class {name}s must be finite{' and at least 0' * (name[0] == 'v')}, "
                f"got {float(value[is_bad][0])} for class "
                f"{int(held[row, -1])}: check the client's features for missing values."
            )


def additive_sums(stats: ClassStatistics) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Convert a client's statistics to summable quantities, O-pFGL Eqs. (14) and (15).

    Returns S0 = N (C,), S1 = Nμ and S2 = (N − 1)s² + Nμ², (C, D), and the owners (C,): 1
    where the client has the class, else 0; all float64. Errors are those of
    :func:`check_statistics`.
    """
    check_statistics(stats.mean, stats.variance, stats.count)
    held = stats.count > 0
    n = stats.count.double()[:, None]
    mean = stats.mean.double().masked_fill(~held[:, None], 0.0)
    variance = stats.variance.double().masked_fill(~held[:, None], 0.0)
    s2 = (n - 1).clamp(min=0) * variance + n * mean.square()
    return n[:, 0], n * mean, s2, held.double()


def statistics_of_sums(
    s0: Tensor,
    s1: Tensor,
    s2: Tensor,
    owners: Tensor,
    *,
    denominator: Denominator = "n-1",
    labelled_count: Tensor | None = None,
) -> ClassStatistics:
    """Recover the pooled statistics from sums over clients, O-pFGL Eqs. (14), (15).

    ``μ = S1 / S0``, ``s² = max(S2 − S1² / S0, 0) / q``; zero where no client has the
    class.

    Parameters
    ----------
    s0, owners : Tensor of shape (C,), float64
        ΣN, and the number of clients that have the class.
    s1, s2 : Tensor of shape (C, D), float64
        Σ Nμ, and Σ ((N − 1)s² + Nμ²).
    denominator : {"n-1", "n-mc"}
        q, see :func:`merge_statistics`.
    labelled_count : Tensor of shape (C,), int64, optional
        Number of labelled nodes; by default S0.

    Raises
    ------
    PayloadError
        If shapes do not fit, a sum is not finite, or S0, S2 or ``owners`` is below −0.5.
    ValueError
        If ``denominator`` is unknown.

    Notes
    -----
    1. Eq. (15) prints N Σ_k μ_k² where its third term is N μ².
    2. S0 and ``owners`` are rounded, because fixed-point sums have a rounding error.
    """
    if s1.shape != s2.shape or s0.shape != s1.shape[:1] or owners.shape != s0.shape:
        raise PayloadError(
            "Sums must be S0 and owners (classes,), S1 and S2 (classes, width), got "
            f"{[tuple(s.shape) for s in (s0, owners, s1, s2)]}."
        )
    if not all(bool(s.isfinite().all()) for s in (s0, s1, s2, owners)):
        raise PayloadError("Sums of class statistics must be finite, got NaN or inf.")
    for name, value in (("S0", s0), ("owners", owners), ("S2", s2)):
        if value.numel() and float(value.min()) < -0.5:
            raise PayloadError(
                f"{name} must not be negative, got {float(value.min())}: the sums do "
                "not match each other, or the fixed-point encoding overflowed."
            )
    count, held_by = s0.double().round().long(), owners.double().round().long()
    held = (count > 0)[:, None]
    n = count.double().clamp(min=1)[:, None]
    mean = (s1.double() / n).masked_fill(~held, 0.0)
    squares = (s2.double() - n * mean.square()).clamp(min=0).masked_fill(~held, 0.0)
    divisor = _divisor(count, held_by, denominator)
    return ClassStatistics(
        mean=mean.float(),
        variance=(squares / divisor[:, None]).float(),
        count=count,
        labelled_count=count if labelled_count is None else labelled_count,
    )


def _divisor(count: Tensor, owners: Tensor, denominator: Denominator) -> Tensor:
    if denominator not in ("n-1", "n-mc"):
        raise ValueError(f'denominator must be "n-1" or "n-mc", got "{denominator}".')
    return (count - (owners if denominator == "n-mc" else 1)).clamp(min=1)


def _stack(parts: Tensor | Sequence[Tensor], name: str) -> Tensor:
    if isinstance(parts, Tensor):
        return parts
    shapes = {tuple(p.shape) for p in parts}
    if len(shapes) != 1:
        raise PayloadError(
            f"All clients must upload {name} of one shape, got {sorted(shapes)}: they "
            "must have the same features, classes and depth."
        )
    return torch.stack(list(parts))
