"""Numbers of clients that a round samples, and of uploads that it needs."""

from __future__ import annotations

import math

from flower_fgl.core.settings import GeneralSettings

__all__ = ["describe_sampling", "least_uploads", "num_sampled"]


def num_sampled(settings: GeneralSettings, able: int) -> int:
    """Return how many of the ``able`` trainable clients a round samples."""
    if settings.participants:
        return min(settings.participants, able)
    return math.ceil(settings.participation * able - 1e-9)


def describe_sampling(settings: GeneralSettings) -> str:
    """Return the setting that :func:`num_sampled` uses, with its value."""
    if settings.participants:
        return f"participants = {settings.participants}"
    return f"participation = {settings.participation:g}"


def least_uploads(settings: GeneralSettings) -> int:
    """Return the number of uploads that ``aggregation`` needs to outvote an attacker."""
    if settings.aggregation == "krum":
        return 2 * settings.krum_attackers + 3
    return 1 if settings.aggregation == "mean" else 3
