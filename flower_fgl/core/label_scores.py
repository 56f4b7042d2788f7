"""Loss and scores of items with several labels, and scores of one class that is sought."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.core.metrics import (
    AbsentClasses,
    Scores,
    mean_area,
    precision_recall_area,
    roc_area,
)

__all__ = ["THRESHOLDS", "average_precision", "balanced_weights", "best_threshold"]
__all__ += ["binary_loss", "precision_at_k", "score_positive_class", "score_targets"]
__all__ += ["scores_at_threshold"]


def binary_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean binary cross-entropy of the known labels, 0 if none is known.

    ``targets`` (b, T) are 1 if an item has the label, 0 if not, NaN if unknown.
    """
    is_known = ~targets.isnan()
    losses = F.binary_cross_entropy_with_logits(
        logits, targets.nan_to_num(), reduction="none"
    )
    return (losses * is_known).sum() / is_known.sum().clamp(min=1)


def score_targets(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor,
    *,
    absent_classes: AbsentClasses = "ignore",
) -> Scores:
    """Score the predictions of several labels, those with a probability of at least 0.5.

    ``logits`` and ``targets`` (N, T) are as for :func:`binary_loss`; of the items of the
    mask (N,) those without a known label are ignored. A target that no item has, and that
    is predicted for none, counts as 0 in the macro means with ``absent_classes =
    "zero"``.

    ``accuracy`` is the share of the known labels that are predicted rightly; ``micro_f1``
    counts the labels of all targets together; ``macro_f1`` and ``macro_recall`` are means
    over the targets, 0 if all are absent. ``auroc`` and ``auprc`` (average precision) are
    means over the targets that some items have and some have not; NaN if there is none.
    """
    chosen = mask & ~targets.isnan().all(dim=1)
    num_items = int(chosen.sum())
    if num_items == 0:
        return Scores(0, math.nan, math.nan, math.nan)
    values, labels = logits[chosen].to(torch.float64), targets[chosen]
    is_known, is_true = ~labels.isnan(), labels == 1
    predicted = (values >= 0) & is_known
    right = int(((predicted == is_true) & is_known).sum())
    hits = (predicted & is_true).sum(dim=0).to(torch.float64)
    support = is_true.sum(dim=0).to(torch.float64)
    found = predicted.sum(dim=0).to(torch.float64)
    f1 = 2 * hits / (found + support).clamp(min=1)
    recall = hits / support.clamp(min=1)
    present = int((found + support > 0).sum())
    over = labels.shape[1] if absent_classes == "zero" else max(present, 1)
    occurring = float((found + support).sum())
    return Scores(
        num_items,
        right / int(is_known.sum()),
        float(f1.sum()) / over,
        float(recall.sum()) / over,
        auroc=_mean_area(roc_area, values, is_true, is_known),
        auprc=_mean_area(precision_recall_area, values, is_true, is_known),
        micro_f1=2 * float(hits.sum()) / occurring if occurring else math.nan,
    )


def _mean_area(
    area: Callable[[Tensor, Tensor], Tensor],
    values: Tensor,
    is_true: Tensor,
    is_known: Tensor,
) -> float:
    """Return the mean area over the targets with items that have the label or have not."""
    number, size = is_true.sum(dim=0), is_known.sum(dim=0)
    areas = []
    for t in ((number > 0) & (number < size)).nonzero().flatten().tolist():
        known = is_known[:, t]
        # ranks keep the order of large scores, whose sigmoid is rounded to 1
        _, rank = torch.unique(values[known, t], return_inverse=True)
        areas.append(area(rank.to(torch.float64) / len(rank), is_true[known, t]))
    return mean_area(areas)


THRESHOLDS = tuple(
    sorted(
        {k / 100 for k in range(1, 100)}
        | {k / 1000 for k in (*range(1, 10), *range(991, 1000))}
        | {k / 10_000 for k in range(1, 10)}
    )
)
"""Thresholds among which the best one is chosen: steps of 0.01, finer at both ends."""


def balanced_weights(counts: Tensor) -> Tensor:
    """Return the weight (C,) of each class in the cross-entropy, n / (m · n_c).

    n is the number of training items, n_c the ``counts`` (C,) of class c, and m the
    number of classes that have any. A class without items has 1. The weights of all items
    add up to n.
    """
    num_present = int((counts > 0).sum())
    weights = counts.sum() / (num_present * counts.clamp(min=1).to(torch.float64))
    return torch.where(counts > 0, weights, 1.0).to(torch.float32)


def average_precision(probability: Tensor, is_member: Tensor) -> float:
    """Return the average precision of n items, NaN unless some are members and some not."""
    if not _is_defined(is_member):
        return math.nan
    return min(1.0, float(precision_recall_area(probability, is_member)))


def precision_at_k(probability: Tensor, is_member: Tensor, k: int) -> float:
    """Return the share of members among the K items with the highest probability.

    Of fewer than K items, all count. NaN unless there are members and non-members. Items
    with the same probability as the K-th one share the places that are left, so that the
    result does not depend on the order of items.
    """
    if not _is_defined(is_member):
        return math.nan
    k = min(k, len(probability))
    last = probability.topk(k).values[-1]
    above, tied = probability > last, probability == last
    left = k - int(above.sum())
    share = float(is_member[tied].to(torch.float64).mean())
    return (int(is_member[above].sum()) + left * share) / k


def best_threshold(probability: Tensor, is_member: Tensor) -> float:
    """Return the threshold of ``THRESHOLDS`` with the largest F1 on the n validation items.

    The grid is fixed, since the threshold leaves the client: the probability of an item
    would reveal the item's features. Of equally good ones the largest is returned; NaN
    unless there are members and non-members.
    """
    if not _is_defined(is_member):
        return math.nan
    grid = torch.tensor(THRESHOLDS, dtype=torch.float64, device=probability.device)
    members, everyone = (
        items.to(torch.float64).sort().values
        for items in (probability[is_member], probability)
    )
    hits = len(members) - torch.searchsorted(members, grid)
    found = len(everyone) - torch.searchsorted(everyone, grid)
    f1 = 2 * hits.to(torch.float64) / (found + len(members))
    return THRESHOLDS[len(grid) - 1 - int(f1.flip(0).argmax())]


def scores_at_threshold(
    probability: Tensor, is_member: Tensor, threshold: float
) -> tuple[float, float, float]:
    """Return precision, recall and F1 of predicting the class from a threshold on.

    Some of the n items belong to the class, and some do not. The precision is 0 if the
    class is never predicted.
    """
    predicted = probability >= threshold
    hits, found = int((predicted & is_member).sum()), int(predicted.sum())
    members = int(is_member.sum())
    return hits / max(found, 1), hits / members, 2 * hits / (found + members)


def score_positive_class(
    scores: Mapping[str, Scores],
    items: Mapping[str, tuple[Tensor, Tensor]],
    positive: int,
    *,
    k: int,
) -> dict[str, Scores]:
    """Add AUPRC, Precision@K, and scores at the threshold that is best on validation.

    ``items`` hold the logits (n, C) and known classes (n,) of each column that has any.
    The threshold is chosen on the column ``val`` and never scored there.
    """
    columns = {
        name: (logits.to(torch.float64).softmax(dim=-1)[:, positive], y == positive)
        for name, (logits, y) in items.items()
    }
    threshold = best_threshold(*columns["val"]) if "val" in columns else math.nan
    out = dict(scores)
    for name, (probability, is_member) in columns.items():
        out[name] = replace(
            out[name],
            auprc=average_precision(probability, is_member),
            precision_at_k=precision_at_k(probability, is_member, k),
        )
        if name == "val" or math.isnan(threshold) or not _is_defined(is_member):
            continue
        precision, recall, f1 = scores_at_threshold(probability, is_member, threshold)
        out[name] = replace(
            out[name],
            threshold=threshold,
            threshold_precision=precision,
            threshold_recall=recall,
            threshold_f1=f1,
        )
    return out


def _is_defined(is_member: Tensor) -> bool:
    """Return whether there are members and non-members."""
    return bool(is_member.any()) and not bool(is_member.all())
