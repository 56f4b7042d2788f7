"""The metrics of every reply, limited by the floors of the node that sends them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flower_fgl.core.metrics import AnyScores
from flower_fgl.core.node_settings import NodeSettings

__all__ = ["limited"]

LARGEST_LOSS = 10.0
"""Largest size of a loss of ``scores = "rounded"``."""
ByMode = Mapping[str, Mapping[str, AnyScores]]


def limited(
    limits: NodeSettings,
    scores: ByMode,
    loss: float | None,
    terms: Mapping[str, float] | None,
) -> tuple[ByMode, float | None, Mapping[str, float] | None]:
    """Return the scores (by mode and column), the loss and the terms that a node sends.

    The floors ``scores``, ``min-scored-nodes``, ``share-class-counts`` and
    ``share-target-statistics`` apply; what is not sent is ``None``.

    Notes
    -----
    1. ``min-scored-nodes`` also applies to the values of each predicted number; rounded
       are scores to two decimals, and errors of numbers to two significant digits.
    2. The loss of a crafted model is any weighted sum of class counts, or the mean
       distance of the numbers from a constant. Rounding only shortens what one message
       reveals of it. So a node that shares no class counts, or no statistics of targets,
       sends neither loss nor terms.
    """
    if limits.hides_loss:
        loss, terms = None, None
    elif limits.scores == "rounded":
        loss, terms = _rounded_loss(loss), None
    return _sent(limits, scores), loss, terms


def _sent(limits: NodeSettings, scores: ByMode) -> ByMode:
    """Return the scores that a node sends, rounded if it says so."""
    if limits.scores == "none":
        return {}
    if limits.min_scored_nodes:
        scores = {
            mode: {
                column: values.with_enough(limits.min_scored_nodes)
                for column, values in columns.items()
                if not 0 < values.num_nodes < limits.min_scored_nodes
            }
            for mode, columns in scores.items()
        }
    if limits.scores == "all":
        return scores
    return {
        mode: {column: values.rounded() for column, values in columns.items()}
        for mode, columns in scores.items()
    }


def _rounded_loss(loss: float | None) -> float | None:
    """Clip a loss and round it to one decimal; NaN stays NaN."""
    if loss is None or math.isnan(loss):
        return loss
    return round(min(max(float(loss), -LARGEST_LOSS), LARGEST_LOSS), 1)
