"""Loss and scores of items that may have several labels at once, or unknown ones."""

from __future__ import annotations

import math
from collections.abc import Callable

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

__all__ = ["binary_loss", "score_targets"]


def binary_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean binary cross-entropy of the known labels.

    Parameters
    ----------
    logits : Tensor of shape (b, T), float
        One score per target; its sigmoid is the probability of the label.
    targets : Tensor of shape (b, T), float
        1 if an item has the label, 0 if not, NaN if unknown.

    Returns
    -------
    Tensor of shape ()
        0 if no label is known.
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

    Parameters
    ----------
    logits : Tensor of shape (N, T), float
        One score per target; its sigmoid is the probability of the label.
    targets : Tensor of shape (N, T), float
        1 if an item has the label, 0 if not, NaN if unknown.
    mask : Tensor of shape (N,), bool
        Items to score; those without any known label are ignored.
    absent_classes : {"ignore", "zero"}
        Contribution to the macro means of a target that no item has, and that is predicted
        for none: none, or a score of 0.

    Returns
    -------
    Scores
        ``accuracy`` is the share of the known labels that are predicted rightly;
        ``micro_f1`` counts the labels of all targets together; ``macro_f1`` and
        ``macro_recall`` are means over the targets, 0 if all are absent. ``auroc`` and
        ``auprc`` (average precision) are means over the targets that some items have and
        some have not; NaN if there is none.
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
