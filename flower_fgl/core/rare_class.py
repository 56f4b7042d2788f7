"""Scores of one class that is sought, and weights that balance classes.

A score is NaN unless the set holds both members and non-members of the class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from flower_fgl.core.metrics import Scores, precision_recall_area

__all__ = ["THRESHOLDS", "average_precision", "balanced_weights", "best_threshold"]
__all__ += ["precision_at_k", "score_positive_class", "scores_at_threshold"]


THRESHOLDS = tuple(
    sorted(
        {k / 100 for k in range(1, 100)}
        | {k / 1000 for k in (*range(1, 10), *range(991, 1000))}
        | {k / 10_000 for k in range(1, 10)}
    )
)
"""Thresholds among which the best one is chosen: steps of 0.01, finer at both ends."""


def balanced_weights(counts: Tensor) -> Tensor:
    """Return the weight of each class in the cross-entropy, n / (m · n_c).

    n is the number of training items, n_c the number of those of class c, and m the
    number of classes that have any.

    Parameters
    ----------
    counts : Tensor of shape (C,), int64
        n_c.

    Returns
    -------
    Tensor of shape (C,), float32
        1 for a class without items. The weights of all items add up to n.
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

    ``scores`` and the result are by column; ``items`` hold the logits (n, C) and classes
    (n,) of each column that has any items, without unknown classes. The threshold is
    chosen on the column ``val`` and never scored there.
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
