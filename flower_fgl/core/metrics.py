"""Scores of one client on one node set, and their average over clients.

Accuracy, macro-F1 and macro-recall equal those of torchmetrics, whose import takes a
second: too long where each message starts a new process. It is imported for areas only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from flower_fgl.core.score_names import EXTRA_SCORES, NO_SCORES, SCORE_NAMES

if TYPE_CHECKING:
    from flower_fgl.core.regression import NumberScores

__all__ = ["AbsentClasses", "AnyScores", "Scores", "auprc", "auroc", "link_ranking"]
__all__ += [
    "mean_area",
    "pool",
    "precision_recall_area",
    "roc_area",
    "score",
    "score_rows",
]
__all__ += ["score_areas", "score_links"]

AbsentClasses = Literal["ignore", "zero"]


@dataclass(frozen=True)
class Scores:
    """Scores of one model on one set of nodes or graphs, from 0 to 1.

    NaN if ``num_nodes`` is 0, which the run folder stores as ``null``. Those from
    ``auroc`` on are NaN, and omitted from records, where they are not computed or
    undefined.
    """

    num_nodes: int  # labelled nodes; in graph classification, graphs
    accuracy: float
    macro_f1: float
    macro_recall: float
    auroc: float = math.nan  # area under the ROC curve
    auprc: float = math.nan  # area under the precision-recall curve
    mrr: float = math.nan  # mean reciprocal rank of links
    hits: float = math.nan  # Hits@K of links
    precision_at_k: float = math.nan  # of the positive class, as the next four
    threshold: float = math.nan  # chosen on validation
    threshold_precision: float = math.nan
    threshold_recall: float = math.nan
    threshold_f1: float = math.nan
    micro_f1: float = math.nan  # with several labels per item, of all labels together
    ece: float = math.nan  # calibration error of the probabilities
    brier: float = math.nan
    ece_calibrated: float = math.nan
    brier_calibrated: float = math.nan
    coverage: float = math.nan  # share of the items whose conformal set holds the truth
    set_share: float = math.nan  # mean share of all classes in a set
    reliability: tuple[float, ...] = ()
    """With ``calibration = "owner"``, the reliability diagrams before and after, (2, 3,
    15): number of items, sum of confidences and of hits of each bin."""

    def selected(self, main_score: str) -> float:
        """Return the score by which models are selected, NaN where it is undefined."""
        return float(getattr(self, main_score))

    def as_dict(self) -> dict[str, float]:
        """Return the four numbers by name, and those others that are not NaN."""
        out = {name: getattr(self, name) for name in ("num_nodes", *SCORE_NAMES)}
        extra = {name: getattr(self, name) for name in EXTRA_SCORES}
        return out | {n: value for n, value in extra.items() if not math.isnan(value)}

    def as_record(self) -> dict[str, Any]:
        """Return what is sent: :meth:`as_dict`, and the diagrams if there are any."""
        found: dict[str, Any] = self.as_dict()
        return found | (
            {"reliability": [*self.reliability]} if self.reliability else {}
        )

    def rounded(self) -> Scores:
        """Round all scores to two decimals; the threshold comes from a fixed grid."""
        names = [f.name for f in fields(self) if f.name not in NO_SCORES]
        each = {name: round(getattr(self, name), 2) for name in names}
        return replace(self, **each, reliability=())

    def with_enough(self, least: int) -> Scores:
        """Return the scores, which are those of all items together."""
        return replace(self, reliability=())


AnyScores: TypeAlias = "Scores | NumberScores"
"""Scores of classes, or of numbers: see :class:`~flower_fgl.core.regression.NumberScores`,
which is imported only where numbers are predicted."""


def score(
    logits: Tensor,
    y: Tensor,
    mask: Tensor,
    num_classes: int,
    *,
    absent_classes: AbsentClasses = "ignore",
) -> Scores:
    """Score predictions on the labelled nodes of a mask.

    ``logits`` are (N, C), the classes ``y`` (N,), -1 if unknown, the ``mask`` (N,). A
    class that is neither a label nor a prediction counts in the macro means as 0 with
    ``absent_classes = "zero"``, else not at all, as in torchmetrics.

    Notes
    -----
    1. A class that is predicted but has no node scores 0 in both macro means, as in
       ``torchmetrics``' ``multiclass_recall`` and ``multiclass_f1_score``.
    """
    chosen = mask & (y >= 0)
    labels = y[chosen]
    predicted, group = logits[chosen].argmax(dim=-1), torch.zeros_like(labels)
    (found,) = score_rows(
        predicted, labels, group, 1, num_classes, absent_classes=absent_classes
    )
    return found


def score_rows(
    predicted: Tensor,
    labels: Tensor,
    group: Tensor,
    num_groups: int,
    num_classes: int,
    *,
    absent_classes: AbsentClasses = "ignore",
) -> list[Scores]:
    """Score predicted classes (t,) of the nodes of several groups, see :func:`score`.

    ``group`` (t,) is the number of the group of each node.
    """
    first, is_hit = group * num_classes, predicted == labels

    def count(cells: Tensor) -> Tensor:
        found = torch.bincount(cells, minlength=num_groups * num_classes)
        return found.view(num_groups, num_classes).to(torch.float64)

    true_pos = count((first + labels)[is_hit])
    positive, support = count(first + predicted), count(first + labels)
    predicted_or_true = support + positive - true_pos
    f1 = 2 * true_pos / (true_pos + predicted_or_true).clamp(min=1)
    recall = true_pos / support.clamp(min=1)
    num_present = (predicted_or_true > 0).sum(dim=1)
    # one transfer for all numbers: each one synchronises the GPU
    columns = [
        support.sum(1), true_pos.sum(1), f1.sum(1), recall.sum(1), num_present,
    ]  # fmt: skip
    out = [Scores(0, math.nan, math.nan, math.nan)] * num_groups
    for place, row in enumerate(torch.stack(columns, dim=1).tolist()):
        size, hits, sum_f1, sum_recall, present = row
        if size:
            over = num_classes if absent_classes == "zero" else present
            rates = hits / size, sum_f1 / over, sum_recall / over
            out[place] = Scores(int(size), *rates)
    return out


def auroc(logits: Tensor, y: Tensor, mask: Tensor, num_classes: int) -> float:
    """Return the area under the ROC curve, one-vs-rest, averaged over classes.

    Arguments are as for :func:`score`. NaN if no class has both members and non-members.

    Notes
    -----
    1. The curve of a class without members or without non-members is undefined. The
       mean omits such a class; ``torchmetrics`` would warn and count 0.
    2. With two classes this is the usual binary AUROC.
    """
    probabilities, labels, defined = _one_against_rest(logits, y, mask, num_classes)
    return mean_area(roc_area(probabilities[:, c], labels == c) for c in defined)


def auprc(logits: Tensor, y: Tensor, mask: Tensor, num_classes: int) -> float:
    """Return the area under the precision-recall curve (average precision).

    Arguments and the mean over classes are as for :func:`auroc`.

    Notes
    -----
    1. With two classes it is the area of class 1, which is the rare one in all binary
       datasets here. With more classes it is the mean one-vs-rest, over the classes that
       have both members and non-members.
    2. A constant score has the share of the class as its area, not 0.5.
    """
    probabilities, labels, defined = _one_against_rest(logits, y, mask, num_classes)
    chosen = defined if num_classes > 2 else defined[1:]  # of two, both are defined
    return mean_area(
        precision_recall_area(probabilities[:, c], labels == c) for c in chosen
    )


def mean_area(areas: Iterable[Tensor]) -> float:
    """Return the mean of areas under curves, NaN without any."""
    found = list(areas)
    # a float32 sum may be above 1
    return min(1.0, float(torch.stack(found).mean())) if found else math.nan


def roc_area(score: Tensor, is_member: Tensor) -> Tensor:
    """Return the area under the ROC curve of one class, of shape (), from n items."""
    from torchmetrics.functional.classification import binary_auroc

    return binary_auroc(score, is_member.long(), validate_args=False)


def precision_recall_area(probability: Tensor, is_member: Tensor) -> Tensor:
    """Return the area under the precision-recall curve of one class, from n items.

    Some items belong to the class, and some do not. The result, a float32 sum of shape
    (), may be slightly above 1.
    """
    from torchmetrics.functional.classification import binary_average_precision

    return binary_average_precision(probability, is_member.long(), validate_args=False)


def _one_against_rest(
    logits: Tensor, y: Tensor, mask: Tensor, num_classes: int
) -> tuple[Tensor, Tensor, list[int]]:
    """Return probabilities and classes, and the classes whose curve is defined."""
    chosen = mask & (y >= 0)
    labels = y[chosen]
    # torchmetrics treats numbers in [0, 1] as probabilities; logits may lie there too
    probabilities = logits[chosen].to(torch.float64).softmax(dim=-1)
    size = torch.bincount(labels, minlength=num_classes)
    defined = ((size > 0) & (size < labels.numel())).nonzero().flatten().tolist()
    return probabilities, labels, defined


def score_areas(
    scores: Scores, logits: Tensor, y: Tensor, mask: Tensor, num_classes: int
) -> Scores:
    """Add AUROC and AUPRC of nodes, graphs or classified edges to their other scores."""
    return replace(
        scores,
        auroc=auroc(logits, y, mask, num_classes),
        auprc=auprc(logits, y, mask, num_classes),
    )


def score_links(
    scores: Scores, logits: Tensor, y: Tensor, mask: Tensor, *, k: int
) -> Scores:
    """Add AUROC, AUPRC, MRR and Hits@K of pairs of nodes.

    ``logits`` (P, 2) are of the classes ``no link`` and ``link``, ``y`` (P,) is 1 for an
    edge, and ``mask`` (P,) has at least one edge and one negative.
    """
    chosen, labels = logits[mask].to(torch.float64), y[mask]
    margin = chosen[:, 1] - chosen[:, 0]
    area = precision_recall_area(margin.sigmoid(), labels == 1)
    mrr, hits = link_ranking(margin, labels, k=k)
    return replace(
        scores,
        auroc=auroc(logits, y, mask, 2),
        auprc=min(1.0, float(area)),
        mrr=mrr,
        hits=hits,
    )


def link_ranking(score: Tensor, y: Tensor, *, k: int) -> tuple[float, float]:
    """Rank each edge among all negatives by the scores (P,); ``y`` (P,) is 1 for an edge.

    Returns the mean of 1 / rank over the edges, and the share of the edges with a rank of
    at most K: NaN with fewer than K negatives, among which every edge has such a rank.

    Notes
    -----
    1. The rank of an edge is 1 plus the number of negatives with a higher score, plus half
       of those with the same score.
    """
    edges, negatives = score[y == 1], score[y == 0].sort().values
    not_lower = len(negatives) - torch.searchsorted(negatives, edges)
    higher = len(negatives) - torch.searchsorted(negatives, edges, right=True)
    rank = 1 + (higher + not_lower).to(torch.float64) / 2
    hits = float((rank <= k).to(torch.float64).mean())
    return float((1 / rank).mean()), hits if len(negatives) >= k else math.nan


def pool(scores: Sequence[AnyScores]) -> dict[str, Any]:
    """Average the scores of the clients that have nodes, or of those with numbers.

    Returns ``num_nodes`` (the sum), ``accuracy``, ``macro_f1``, ``macro_recall`` (means
    weighted by nodes) and ``mean_accuracy``, ``mean_macro_f1``, ``mean_macro_recall``
    (unweighted means); NaN if no client has nodes. If a client has ``auroc``, also
    ``auroc`` and ``mean_auroc``, over the clients that have it; likewise every other
    extra score. Scores of numbers: see :func:`~flower_fgl.core.regression.pool_numbers`.
    """
    if scores and not isinstance(scores[0], Scores):
        from flower_fgl.core.regression import pool_numbers

        return pool_numbers(cast("Sequence[NumberScores]", scores))
    counted = [entry for entry in scores if entry.num_nodes > 0]
    num_nodes = int(sum(entry.num_nodes for entry in counted))
    out: dict[str, float] = {"num_nodes": num_nodes}
    for name in SCORE_NAMES:
        weighted = (getattr(entry, name) * entry.num_nodes for entry in counted)
        out[name] = _ratio(weighted, num_nodes)
    for name in SCORE_NAMES:
        values = (getattr(entry, name) for entry in counted)
        out[f"mean_{name}"] = _ratio(values, len(counted))
    for name in EXTRA_SCORES:
        ranked = [
            (entry.num_nodes, value)
            for entry in counted
            if not math.isnan(value := getattr(entry, name))
        ]
        if ranked:
            size = sum(number for number, _ in ranked)
            out[name] = _ratio((number * value for number, value in ranked), size)
            out[f"mean_{name}"] = _ratio((value for _, value in ranked), len(ranked))
    return out


def _ratio(values: Iterable[float], count: int) -> float:
    """Return the mean; the exactly rounded sum is independent of the client order."""
    return math.fsum(values) / count if count else math.nan
