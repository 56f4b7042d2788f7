"""Scores of one client on one node set, and their average over clients.

Accuracy, macro-F1 and macro-recall are computed from one count per class of hits,
predictions and labels. They equal those of torchmetrics, whose import takes a second: too
long where each message starts a new process. AUROC uses torchmetrics and imports it only
when needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flower_fgl.core.score_names import SCORE_NAMES

__all__ = [
    "AbsentClasses",
    "Scores",
    "auroc",
    "pool",
    "score",
]

AbsentClasses = Literal["ignore", "zero"]


@dataclass(frozen=True)
class Scores:
    """Scores of one model on one set of nodes or graphs.

    Parameters
    ----------
    num_nodes : int
        Labelled nodes in the set; in graph classification, graphs.
    accuracy, macro_f1, macro_recall : float in [0, 1]
        NaN if ``num_nodes`` is 0; the run folder stores it as ``null``.
    auroc : float in [0, 1]
        Area under the ROC curve. NaN, and omitted from records, for nodes and where it
        is undefined (graphs of a single class).
    """

    num_nodes: int
    accuracy: float
    macro_f1: float
    macro_recall: float
    auroc: float = math.nan

    def as_dict(self) -> dict[str, float]:
        """Return the four numbers by name, and ``auroc`` unless it is NaN."""
        out = {
            "num_nodes": self.num_nodes,
            "accuracy": self.accuracy,
            "macro_f1": self.macro_f1,
            "macro_recall": self.macro_recall,
        }
        return out if math.isnan(self.auroc) else {**out, "auroc": self.auroc}


def score(
    logits: Tensor,
    y: Tensor,
    mask: Tensor,
    num_classes: int,
    *,
    absent_classes: AbsentClasses = "ignore",
) -> Scores:
    """Score predictions on the labelled nodes of a mask.

    Parameters
    ----------
    logits : Tensor of shape (N, C), float
        One score per class; the class with the largest score is the prediction.
    y : Tensor of shape (N,), int64
        Classes; nodes with -1 (unknown) are ignored.
    mask : Tensor of shape (N,), bool
        Nodes to score.
    num_classes : int
        C.
    absent_classes : {"ignore", "zero"}
        Contribution to the macro means of a class that occurs neither in the labels nor
        in the predictions: none, as in torchmetrics, or a score of 0.

    Notes
    -----
    1. A class that is predicted but has no node scores 0 in both macro means, as in
       ``torchmetrics``' ``multiclass_recall`` and ``multiclass_f1_score``.
    """
    chosen = mask & (y >= 0)
    labels = y[chosen]
    num_nodes = labels.numel()
    if num_nodes == 0:
        return Scores(0, math.nan, math.nan, math.nan)
    predicted = logits[chosen].argmax(dim=-1)
    counts = [
        torch.bincount(classes, minlength=num_classes).to(torch.float64)
        for classes in (labels[predicted == labels], predicted, labels)
    ]
    true_pos, positive, support = counts  # each of shape (C,)
    predicted_or_true = support + positive - true_pos
    f1 = 2 * true_pos / (true_pos + predicted_or_true).clamp(min=1)
    recall = true_pos / support.clamp(min=1)
    num_present = (predicted_or_true > 0).sum()
    # one transfer for all four numbers: each one synchronises the GPU
    sums = torch.stack([true_pos.sum(), f1.sum(), recall.sum(), num_present])
    hits, sum_f1, sum_recall, present = sums.tolist()
    over = num_classes if absent_classes == "zero" else present
    return Scores(num_nodes, hits / num_nodes, sum_f1 / over, sum_recall / over)


def auroc(logits: Tensor, y: Tensor, mask: Tensor, num_classes: int) -> float:
    """Return the area under the ROC curve, one-vs-rest, averaged over classes.

    Parameters
    ----------
    logits : Tensor of shape (N, C), float
        One score per class.
    y : Tensor of shape (N,), int64
        Classes; -1 (unknown) is ignored.
    mask : Tensor of shape (N,), bool
        Nodes or graphs to score.
    num_classes : int
        C.

    Returns
    -------
    float in [0, 1]
        NaN if no class has both members and non-members in the mask.

    Notes
    -----
    1. The curve of a class without members or without non-members is undefined. The
       mean omits such a class; ``torchmetrics`` would warn and count 0.
    2. With two classes this is the usual binary AUROC.
    """
    from torchmetrics.functional.classification import binary_auroc

    chosen = mask & (y >= 0)
    labels = y[chosen]
    # torchmetrics treats numbers in [0, 1] as probabilities; logits may lie there too
    probabilities = logits[chosen].to(torch.float64).softmax(dim=-1)
    size = torch.bincount(labels, minlength=num_classes)
    defined = ((size > 0) & (size < labels.numel())).nonzero().flatten().tolist()
    if not defined:
        return math.nan
    areas = [
        binary_auroc(probabilities[:, c], (labels == c).long(), validate_args=False)
        for c in defined
    ]
    return min(1.0, float(torch.stack(areas).mean()))  # a float32 sum may be above 1


def pool(scores: Sequence[Scores]) -> dict[str, float]:
    """Average the scores of the clients.

    Parameters
    ----------
    scores : sequence of Scores
        One per client; clients without nodes are ignored.

    Returns
    -------
    dict of str to float
        ``num_nodes`` (the sum), ``accuracy``, ``macro_f1``, ``macro_recall`` (means
        weighted by nodes) and ``mean_accuracy``, ``mean_macro_f1``,
        ``mean_macro_recall`` (unweighted means over the clients with nodes); NaN if no
        client has nodes. If a client has ``auroc``, also ``auroc`` and ``mean_auroc``,
        over the clients that have it.
    """
    counted = [entry for entry in scores if entry.num_nodes > 0]
    num_nodes = int(sum(entry.num_nodes for entry in counted))
    out: dict[str, float] = {"num_nodes": num_nodes}
    for name in SCORE_NAMES:
        weighted = (getattr(entry, name) * entry.num_nodes for entry in counted)
        out[name] = _ratio(weighted, num_nodes)
    for name in SCORE_NAMES:
        values = (getattr(entry, name) for entry in counted)
        out[f"mean_{name}"] = _ratio(values, len(counted))
    ranked = [entry for entry in counted if not math.isnan(entry.auroc)]
    if ranked:
        size = int(sum(entry.num_nodes for entry in ranked))
        out["auroc"] = _ratio((e.auroc * e.num_nodes for e in ranked), size)
        out["mean_auroc"] = _ratio((e.auroc for e in ranked), len(ranked))
    return out


def _ratio(values: Iterable[float], count: int) -> float:
    """Return the mean; the exactly rounded sum is independent of the client order."""
    return math.fsum(values) / count if count else math.nan
