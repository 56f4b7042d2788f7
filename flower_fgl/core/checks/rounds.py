"""Checks of the clients of a round, and of what protects their uploads."""

from __future__ import annotations

from typing import Any

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.sampling import describe_sampling, least_uploads, num_sampled
from flower_fgl.core.settings import MIN_SECURE_CLIENTS, GeneralSettings
from flower_fgl.core.targets import NUMBERS

__all__ = ["check_rounds"]


def check_rounds(settings: GeneralSettings, method: Any) -> None:
    """Reject too few clients for a round, and a protection that would protect nothing."""
    if settings.evaluate == "mixed" and settings.eval_policy != "stale":
        raise ConfigError(
            'evaluate = "mixed" scores the downloads before they are trained, but '
            f'eval-policy = "{settings.eval_policy}" trains them. Use eval-policy = '
            '"stale".'
        )
    if settings.upload_noise and not settings.upload_clip:
        raise ConfigError(
            f"upload-noise = {settings.upload_noise:g} is a multiple of upload-clip, which "
            "is 0: set upload-clip."
        )
    if settings.clients_per_node > 1 and not settings.clients:
        raise ConfigError(
            f"clients-per-node = {settings.clients_per_node} needs the number of all "
            "clients: set clients."
        )
    _check_sampling(settings, method)
    if settings.upload_noise_model == "distributed":
        _check_distributed(settings)
    if settings.secure_aggregation:
        _check_secure(settings)
    if settings.calibration == "shared":
        _check_calibration(settings)
    if settings.min_clients:
        _check_late(settings)
    if settings.aggregation != "mean":
        _check_aggregation(settings)


def _check_sampling(settings: GeneralSettings, method: Any) -> None:
    """Reject rounds that sample more clients than there are, or too few."""
    if settings.clients and settings.min_replies > settings.clients:
        raise ConfigError(
            f"min-replies must be at most clients = {settings.clients}, "
            f"got {settings.min_replies}."
        )
    if settings.participants and settings.participation != 1:
        raise ConfigError(
            f"participants = {settings.participants} and participation = "
            f"{settings.participation:g} both set the number of sampled clients. Give one."
        )
    is_chosen = settings.participants != method.defaults.get("participants", 0)
    if is_chosen and settings.clients and settings.participants > settings.clients:
        raise ConfigError(
            f"participants must be at most clients = {settings.clients}, got "
            f"{settings.participants}."
        )
    sampled = num_sampled(settings, settings.clients)
    if settings.clients and settings.min_replies > sampled:
        raise ConfigError(
            f"min-replies is {settings.min_replies}, but {describe_sampling(settings)} "
            f"samples {sampled} of {settings.clients} clients per round, so every round "
            "would fail. Lower min-replies or sample more clients."
        )


def _check_calibration(settings: GeneralSettings) -> None:
    """Reject a common calibration without a complete global model, or beside noise."""
    has_own = settings.owners and settings.feature_align == "project"
    reasons = {
        'With feature-align = "project" there is no complete global model': has_own,
        'With class-align = "local" there is no complete global model': (
            settings.has_local_heads
        ),
        "With node-embedding = true there is no complete global model": (
            settings.node_embedding
        ),
        f'With schema-align = "{settings.schema_align}" clients have different parts of a '
        "model": settings.schema_align != "same",
        'With target-scale = "own" the global model predicts no numbers in their units': (
            settings.predicts == NUMBERS and settings.target_scale == "own"
        ),
        "upload-noise protects uploads, and the sums of a calibration have no noise": (
            settings.upload_noise
        ),
        "isotonic maps need the items themselves": settings.calibrator == "isotonic",
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(
                f'{reason}: use calibration = "owner", got "{settings.calibration}".'
            )


def _check_distributed(settings: GeneralSettings) -> None:
    """Reject distributed noise where it would protect nothing."""
    needed = {
        "secure-aggregation = true": settings.secure_aggregation,
        "upload-clip above 0": settings.upload_clip,
        "upload-noise above 0": settings.upload_noise,
        'weight-by = "equal"': settings.weight_by == "equal",
    }
    missing = [text for text, is_set in needed.items() if not is_set]
    if missing:
        raise ConfigError(
            'upload-noise-model = "distributed" adds shares of the noise that are only '
            f"enough in a secure sum of equally weighted uploads: set {missing[0]}, or "
            'use upload-noise-model = "local".'
        )


def _check_secure(settings: GeneralSettings) -> None:
    """Reject secure aggregation for non-additive uploads or too few clients."""
    if 3 * settings.secure_threshold <= 2:
        raise ConfigError(
            "secure-threshold must be above 2/3, so that a server cannot show two groups "
            f"of clients different lists, got {settings.secure_threshold:g}. Remove it, "
            "or set it to 0.67 or more."
        )
    sampled = num_sampled(settings, settings.clients)
    if settings.clients and sampled < MIN_SECURE_CLIENTS:
        raise ConfigError(
            f"secure-aggregation needs {MIN_SECURE_CLIENTS} clients per round: with one or "
            "two, the sum reveals individual updates. clients = "
            f"{settings.clients} and {describe_sampling(settings)} give {sampled}."
        )


def _check_late(settings: GeneralSettings) -> None:
    """Reject ``min-clients`` if all clients are needed from the start."""
    least = settings.min_clients
    if settings.secure_aggregation:
        raise ConfigError(
            "With secure-aggregation all clients exchange keys before round 1: "
            f"min-clients = {least} is not possible. Remove one of the two."
        )
    if settings.clients and least > settings.clients:
        raise ConfigError(
            f"min-clients must be at most clients = {settings.clients}, got {least}."
        )
    if settings.min_replies > least:
        raise ConfigError(
            f"Rounds with min-clients = {least} clients would always fail, since "
            f"min-replies = {settings.min_replies}. Set min-replies to {least} or less."
        )


def _check_aggregation(settings: GeneralSettings) -> None:
    """Reject a robust aggregation that the method, masks or few clients rule out."""
    rule = settings.aggregation
    if settings.secure_aggregation:
        raise ConfigError(
            f'aggregation = "{rule}" compares single uploads, which secure-aggregation '
            "hides from the server. Remove one of the two."
        )
    sampled = num_sampled(settings, settings.clients)
    least = least_uploads(settings)
    if settings.clients and sampled < least:
        raise ConfigError(
            f'aggregation = "{rule}" needs {least} uploads per round'
            + (f" (2·{settings.krum_attackers} + 3)" if rule == "krum" else "")
            + f", but clients = {settings.clients} and {describe_sampling(settings)} give "
            f"{sampled}."
        )
