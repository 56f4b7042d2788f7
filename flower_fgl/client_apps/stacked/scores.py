"""Scores of many clients at once, equal to those of ``core.metrics.score``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flower_fgl.client_apps.runtime.client import EMPTY
from flower_fgl.core.metrics import AbsentClasses, Scores

__all__ = ["Column", "score_segments"]


class Column:
    """The labelled nodes of one score column of K clients: masks and classes of each.

    Each client has ``num_rows`` rows in stacked representations.
    """

    def __init__(
        self, masks: Sequence[Tensor], labels: Sequence[Tensor], num_rows: int
    ) -> None:
        found = [mask.nonzero().squeeze(1) for mask in masks]
        counts = torch.tensor([len(rows) for rows in found])
        device = masks[0].device
        places = torch.repeat_interleave(torch.arange(len(found)), counts).to(device)
        self.client = places
        self.index = torch.cat(found) + places * num_rows
        self.labels = torch.cat(
            [y[rows] for y, rows in zip(labels, found, strict=True)]
        )
        self.counts: list[int] = counts.tolist()

    def __len__(self) -> int:
        return len(self.index)


def score_segments(
    logits: Tensor,
    column: Column,
    num_classes: int,
    *,
    absent_classes: AbsentClasses = "ignore",
) -> list[Scores]:
    """Score logits (K, n, C) of each client, see :func:`flower_fgl.core.metrics.score`."""
    clients = len(column.counts)
    rows = logits.flatten(0, 1).index_select(0, column.index)
    predicted, first = rows.argmax(dim=-1), column.client * num_classes
    is_hit = predicted == column.labels

    def count(cells: Tensor) -> Tensor:
        found = torch.bincount(cells, minlength=clients * num_classes)
        return found.view(clients, num_classes).to(torch.float64)

    true_pos = count((first + column.labels)[is_hit])
    positive, support = count(first + predicted), count(first + column.labels)
    predicted_or_true = support + positive - true_pos
    f1 = 2 * true_pos / (true_pos + predicted_or_true).clamp(min=1)
    recall = true_pos / support.clamp(min=1)
    num_present = (predicted_or_true > 0).sum(dim=1)
    sums = torch.stack(
        [true_pos.sum(1), f1.sum(1), recall.sum(1), num_present], dim=1
    ).tolist()
    out = [EMPTY] * clients
    for place, size in enumerate(column.counts):
        if size:
            hits, sum_f1, sum_recall, present = sums[place]
            over = num_classes if absent_classes == "zero" else present
            out[place] = Scores(size, hits / size, sum_f1 / over, sum_recall / over)
    return out
