"""The metrics of every reply, limited by the floors of the node that sends them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import fields, replace

from flwr.app import MetricRecord

from flower_fgl.core.metrics import Scores
from flower_fgl.core.node_settings import NodeSettings, parse_node_config
from flower_fgl.core.options import Scalar
from flower_fgl.core.score_names import NO_SCORES
from flower_fgl.protocols.base import plain_metrics, write_scores

__all__ = ["pack_metrics"]

LARGEST_LOSS = 10.0
"""Largest size of a loss of ``scores = "rounded"``."""
SCORE_FIELDS = [f.name for f in fields(Scores) if f.name not in NO_SCORES]
ByMode = Mapping[str, Mapping[str, Scores]]


def pack_metrics(
    node: Mapping[str, Scalar],
    scores: ByMode,
    seconds: Mapping[str, float],
    *,
    loss: float | None = None,
    terms: Mapping[str, float] | None = None,
) -> MetricRecord:
    """Pack loss, scores and seconds of a reply, as far as the node sends them.

    Parameters
    ----------
    node : mapping of str to bool, int, float or str
        Node config; its floors ``scores``, ``min-scored-nodes`` and
        ``share-class-counts`` apply.
    scores : mapping of str to (mapping of str to Scores)
        Scores by mode and column.
    seconds : mapping of str to float
        Parts of the time.
    loss : float, optional
        Training loss.
    terms : mapping of str to float, optional
        Terms of the loss and other numbers of the training.

    Notes
    -----
    1. The loss of a crafted model is any weighted sum of class counts. Rounding only
       shortens what one message reveals of it. So a node that shares no class counts
       sends neither loss nor terms.
    """
    limits = parse_node_config(node)
    if limits.scores == "none" or not limits.share_class_counts:
        loss, terms = None, None
    elif limits.scores == "rounded":
        loss, terms = _rounded_loss(loss), None
    flat = write_scores(
        {
            mode: {column: values.as_dict() for column, values in columns.items()}
            for mode, columns in _sent(limits, scores).items()
        }
    )
    metrics: dict[str, int | float] = {**flat, "worker": os.getpid()}
    metrics |= {f"seconds/{name}": value for name, value in seconds.items()}
    # the server refuses a reply with a number that is not finite
    finite = {n: value for n, value in (terms or {}).items() if math.isfinite(value)}
    metrics |= {f"terms/{name}": value for name, value in finite.items()}
    if loss is not None:
        metrics["loss"] = float(loss)
    return plain_metrics(metrics)


def _sent(limits: NodeSettings, scores: ByMode) -> ByMode:
    """Return the scores that a node sends, rounded if it says so."""
    if limits.scores == "none":
        return {}
    if limits.min_scored_nodes:
        scores = {
            mode: {
                column: values
                for column, values in columns.items()
                if not 0 < values.num_nodes < limits.min_scored_nodes
            }
            for mode, columns in scores.items()
        }
    if limits.scores == "all":
        return scores
    return {
        mode: {column: _rounded(values) for column, values in columns.items()}
        for mode, columns in scores.items()
    }


def _rounded(scores: Scores) -> Scores:
    """Round all scores to two decimals; the threshold comes from a fixed grid."""
    return replace(
        scores, **{name: round(getattr(scores, name), 2) for name in SCORE_FIELDS}
    )


def _rounded_loss(loss: float | None) -> float | None:
    """Clip a loss and round it to one decimal; NaN stays NaN."""
    if loss is None or math.isnan(loss):
        return loss
    return round(min(max(float(loss), -LARGEST_LOSS), LARGEST_LOSS), 1)
