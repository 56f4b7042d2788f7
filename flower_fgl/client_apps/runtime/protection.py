"""Protection of what leaves a client: uploads, and the metrics of every reply."""

import math
from collections.abc import Mapping
from typing import Any

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.core.errors import PayloadError
from flower_fgl.core.metrics import AnyScores
from flower_fgl.core.node_settings import NodeSettings
from flower_fgl.protocols.base import Payload
from flower_fgl.protocols.differential_privacy import (
    clip_and_add_noise,
    numbers_of,
    origin_of,
    refuse_unbounded,
    with_numbers,
)

__all__ = ["limited", "privatize"]

LARGEST_LOSS = 10.0
"""Largest size of a loss of ``scores = "rounded"``."""
ByMode = Mapping[str, Mapping[str, AnyScores]]


def privatize(client: Client, upload: Payload, download: Any = None) -> Payload:
    """Withhold rare classes, clip and add noise; PayloadError if a field has no clipping.

    With ``upload-noise-model = "distributed"`` the client adds its share of the noise
    when the upload is encoded for the secure sum. For weights that upload and download
    both contain under the same names, the difference is clipped. The noise must not be
    reproducible: its seed comes from the operating system, and such a run cannot be
    repeated exactly.
    """
    config = client.config
    if config.min_class_count > 1:
        shared = client.data.graph.class_counts("train") >= config.min_class_count
        upload = upload.withhold(shared, config.min_class_count)
    if not config.upload_clip:
        return upload
    try:
        refuse_unbounded(upload)
    except TypeError as error:
        raise PayloadError(f"upload-clip: {error}") from error
    is_distributed = config.upload_noise_model == "distributed"
    numbers = numbers_of(upload)
    start = origin_of(numbers, numbers_of(download))
    try:
        noised = clip_and_add_noise(
            [tensor.detach().cpu() for tensor in numbers.values()],
            clip=config.upload_clip,
            noise=0.0 if is_distributed else config.upload_noise,
            origin=start,
        )
    except ValueError as error:
        raise PayloadError(f"{error}") from error
    changed: Payload = with_numbers(upload, dict(zip(numbers, noised, strict=True)))
    return changed.in_range()


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
        terms = None
        if loss is not None and not math.isnan(loss):
            loss = round(min(max(float(loss), -LARGEST_LOSS), LARGEST_LOSS), 1)
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
