"""Class statistics of propagated features: O-pFGL Eqs. (2)-(9), (14) and (15)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flower_fgl.nn.sparse import SparseOperator, index_sum

__all__ = ["MIN_COUNT", "ClassStatistics", "additive_sums", "class_statistics"]
__all__ += ["merge_statistics", "outside_shares", "propagated_features"]
__all__ += ["statistics_of_sums"]

MIN_COUNT = 2
"""n_min, the smallest class with statistics. One node has no variance, and its mean would
reveal the node's features."""

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
    hops = [x.to_dense()]
    for _ in range(depth):
        hops.append(adjacency.matmul(hops[-1]))
    return torch.cat(hops, dim=1)


def class_statistics(
    x: Tensor, classes: Tensor, num_classes: int, *, is_labelled: Tensor | None = None
) -> ClassStatistics:
    """Estimate mean and unbiased variance of each class, O-pFGL Eqs. (6) and (8).

    Sums run in float64, in blocks of nodes; the variance is computed from deviations from
    the mean. A class with fewer than ``MIN_COUNT`` nodes is omitted.

    ``x`` (N, D) are propagated features, ``classes`` (N,) the labels, or inferred classes
    of reliable nodes; −1 excludes the node. ``is_labelled`` (N,) says whether the class is
    the node's own label, by default that of all.
    """
    known = classes >= 0
    own = known if is_labelled is None else known & is_labelled
    count = torch.bincount(classes[known], minlength=num_classes)
    kept = count >= MIN_COUNT
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
    stats: Sequence[ClassStatistics], denominator: str
) -> ClassStatistics:
    """Pool the statistics of clients, O-pFGL Eq. (9): those of their added sums.

    The ``denominator`` is as in :func:`statistics_of_sums`.
    """
    sums = [additive_sums(one) for one in stats]
    total = {
        name: torch.stack([one[name] for one in sums]).sum(dim=0) for name in sums[0]
    }
    return statistics_of_sums(total, denominator)


def additive_sums(stats: ClassStatistics) -> dict[str, Tensor]:
    """Convert a client's statistics to summable quantities, O-pFGL Eqs. (14) and (15).

    ``count`` is S0 = N (C,), ``sum`` S1 = Nμ and ``squares`` S2 = (N − 1)s² + Nμ², (C, D),
    ``owners`` (C,) 1 where the client has the class, else 0, and ``labelled`` (C,) the
    number of labelled nodes; all float64.
    """
    n = stats.count.double()[:, None]
    mean, variance = stats.mean.double(), stats.variance.double()
    return {
        "count": n[:, 0],
        "sum": n * mean,
        "squares": (n - 1).clamp(min=0) * variance + n * mean.square(),
        "owners": (stats.count > 0).double(),
        "labelled": stats.labelled_count.double(),
    }


def statistics_of_sums(sums: Mapping[str, Tensor], denominator: str) -> ClassStatistics:
    """Recover the pooled statistics from sums over clients, O-pFGL Eqs. (14), (15).

    ``μ = S1 / S0``, ``s² = max(S2 − S1² / S0, 0) / q``; zero where no client has the
    class. The sums are those of :func:`additive_sums`. q is N − 1 for the ``denominator``
    "n-1", and N minus the number of clients that have the class for "n-mc"; at least 1.

    Notes
    -----
    1. Eq. (9) divides by N − m with m all clients, which can be negative. The numerator
       is the total sum of squares; with N − 1 the result is the variance of the pooled
       sample.
    2. Eq. (15) prints N Σ_k μ_k² where its third term is N μ².
    3. Numbers of nodes and owners are rounded, because fixed-point sums have a rounding
       error.
    """
    count, owners, labelled = (
        sums[name].round().long() for name in ("count", "owners", "labelled")
    )
    held = (count > 0)[:, None]
    n = count.double().clamp(min=1)[:, None]
    mean = (sums["sum"] / n).masked_fill(~held, 0.0)
    squares = (sums["squares"] - n * mean.square()).clamp(min=0)
    divisor = (count - (owners if denominator == "n-mc" else 1)).clamp(min=1)
    return ClassStatistics(
        mean=mean.float(),
        variance=(squares.masked_fill(~held, 0.0) / divisor[:, None]).float(),
        count=count,
        labelled_count=labelled,
    )
