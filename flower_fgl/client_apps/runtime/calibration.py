"""Calibration of a model with a client's validation items, and scores of what it gives."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flower_fgl.algorithms.calibration import (
    Surroundings,
    bin_errors,
    brier,
    calibrated,
    calibration_error,
    class_sums,
    fit,
    half_widths,
    in_intervals,
    in_sets,
    number_shapes,
    number_sums,
    probabilities,
    sum_shapes,
)
from flower_fgl.core.calibration import Calibration
from flower_fgl.core.config import RunConfig
from flower_fgl.core.metrics import AnyScores
from flower_fgl.core.target_scale import TargetScale
from flower_fgl.core.targets import LABELS

__all__ = ["Items", "calibrate", "score_calibrated", "shared_sums"]

Items = tuple[Tensor, Tensor]
"""Outputs (n, C), and classes (n,), labels (n, C) or numbers (n, T) of a column."""
Draw = Callable[[str, int], Tensor]
"""Returns the uniform draws (n,) for the conformal scores of a column of n items."""


def calibrate(
    items: Items | None,
    config: RunConfig,
    scale: TargetScale | None,
    draw: Draw,
    around: Surroundings | None = None,
) -> Calibration:
    """Calibrate by the validation items of one client, ``None`` if it has none.

    ``around`` is their graph, which ``conformal-score = "daps"`` needs.
    """
    if items is None:
        return Calibration("owner", 0)
    outputs, y = items
    return fit(
        outputs if scale is None else scale.restore(outputs),
        y,
        draw("val", len(y)),
        coverage=config.coverage,
        score=config.conformal_score,
        has_numbers=scale is not None,
        is_isotonic=config.calibrator == "isotonic",
        around=around,
    )


def shared_sums(
    items: Items | None,
    config: RunConfig,
    scale: TargetScale | None,
    draw: Draw,
    num_outputs: int,
) -> dict[str, Tensor]:
    """Sum over the validation items of one client, zeros if it has none."""
    if items is None and scale is None:
        is_free = config.predicts == LABELS
        shapes = sum_shapes(is_free=is_free)
    elif items is None:
        shapes = number_shapes(num_outputs)
    else:
        outputs, y = items
        if scale is not None:
            return number_sums(scale.restore(outputs), y, scale.std)
        return class_sums(outputs, y, draw("val", len(y)), config.conformal_score)
    return {n: torch.zeros(shape, dtype=torch.float64) for n, shape in shapes.items()}


def score_calibrated(
    scores: Mapping[str, AnyScores],
    items: Mapping[str, Items],
    calibration: Calibration,
    scale: TargetScale | None,
    draw: Draw,
    around: Mapping[str, Surroundings],
) -> dict[str, AnyScores]:
    """Add calibration error, Brier score, coverage and size of sets to each column.

    The column ``val`` is not scored: its coverage would say nothing. ``around`` has the
    graph of each column for the score ``daps``.
    """
    out = dict(scores)
    for column, (outputs, y) in items.items():
        if column == "val":
            continue
        found = out[column]
        if scale is None:
            u, graph = draw(column, len(y)), around.get(column)
            more = _class_scores(outputs, y, u, calibration, graph)
        else:
            more = _interval_scores(scale, outputs, y, calibration)
        out[column] = replace(found, **more)
    return out


def _class_scores(
    logits: Tensor,
    y: Tensor,
    u: Tensor,
    calibration: Calibration,
    around: Surroundings | None,
) -> dict[str, Any]:
    """Return the scores of probabilities and of sets of one column."""
    is_free = y.dim() == 2
    more: dict[str, Any] = {}
    before = probabilities(logits, 1.0, is_free=is_free)
    found = {"ece": calibration_error(bin_errors(before, y)), "brier": brier(before, y)}
    if calibration.items:
        p = calibrated(logits, calibration, is_free=is_free)
        found["ece_calibrated"] = calibration_error(bin_errors(p, y))
        found["brier_calibrated"] = brier(p, y)
        if calibration.source == "owner":
            sums = torch.stack([bin_errors(before, y), bin_errors(p, y)])
            more["reliability"] = tuple(sums.flatten().tolist())
        if calibration.coverage:
            is_in = in_sets(p, calibration, u, around)
            held = is_in[y == 1] if is_free else is_in.gather(1, y[:, None])
            if len(held):
                found["coverage"] = float(held.to(torch.float64).mean())
            found["set_share"] = float(is_in.to(torch.float64).mean())
    return more | {name: min(value, 1.0) for name, value in found.items()}


def _interval_scores(
    scale: TargetScale, outputs: Tensor, values: Tensor, calibration: Calibration
) -> dict[str, Any]:
    """Return coverage and width of the intervals of numbers."""
    if not calibration.coverage:
        return {}
    predicted = scale.restore(outputs)
    held, known = in_intervals(predicted, values, calibration)
    half = half_widths(predicted, calibration)
    widths = [
        2 * _mean(column[is_known]) / spread
        for column, spread, is_known in zip(
            half.T, scale.std.tolist(), known.T, strict=True
        )
        if bool(is_known.any()) and bool(column.isfinite().all())
    ]
    width = math.fsum(widths) / len(widths) if widths else math.nan
    return {"coverage": float(held.sum() / known.sum()), "interval": width}


def _mean(values: Tensor) -> float:
    """Return a mean that is exact for equal values."""
    return float(values[0] + (values - values[0]).mean())
