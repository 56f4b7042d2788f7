"""Checks of the scale and the loss of numbers."""

from __future__ import annotations

import json

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import kebab
from flower_fgl.core.settings import GeneralSettings, predicted_kind, read_numbers
from flower_fgl.core.targets import CLASSES, NUMBERS

__all__ = ["check_numbers"]

FOR_NUMBERS = (
    "loss",
    "huber_delta",
    "target_weight",
    "target_scale",
    "target_mean",
    "target_std",
)


def check_numbers(settings: GeneralSettings) -> None:
    """Reject settings of numbers for classes and labels, and a scale that is not given."""
    kind = predicted_kind(settings)
    if kind != NUMBERS:
        for name in FOR_NUMBERS:
            if (value := getattr(settings, name)) != getattr(GeneralSettings, name):
                raise ConfigError(_wrong(name, value, "numbers", kind))
    if kind == CLASSES and settings.weight_by == "entries":
        raise ConfigError(_wrong("weight_by", "entries", "labels and numbers", kind))
    if kind == NUMBERS and settings.target_scale == "given":
        _check_given(settings)
    elif kind == NUMBERS and settings.target_scale == "shared":
        _check_shared(settings)


def _wrong(name: str, value: object, wanted: str, kind: str) -> str:
    """Say that a setting is for another kind of target."""
    shown = json.dumps(value, ensure_ascii=False)
    return f"{kebab(name)} = {shown} is for {wanted}, but the targets are {kind}."


def _check_given(settings: GeneralSettings) -> None:
    """Reject means and deviations that are missing, malformed or not as many."""
    found = {}
    for name in ("target_mean", "target_std"):
        text = getattr(settings, name)
        try:
            found[name] = read_numbers(text)
        except ValueError:
            raise ConfigError(
                f'With target-scale = "given", {kebab(name)} must be finite numbers, one '
                f'for each target and separated by commas as in "-3.1,2.4", got "{text}".'
            ) from None
    means, stds = found.values()
    if min(stds) <= 0:
        raise ConfigError(f"target-std must be above 0, got {settings.target_std}.")
    if len(means) != len(stds):
        raise ConfigError(
            f"target-mean has {len(means)} numbers, but target-std has {len(stds)}: give "
            "one of each for every target."
        )


def _check_shared(settings: GeneralSettings) -> None:
    """Reject the exchange of statistics where they may not leave a client."""
    if not settings.share_target_statistics:
        raise ConfigError(
            'share-target-statistics = false, but target-scale = "shared" sends each '
            'owner\'s mean and spread. Set target-scale = "given" or "own".'
        )
    if settings.secure_aggregation:
        raise ConfigError(
            "secure-aggregation = true hides single uploads, but target-scale = "
            '"shared" sends each owner\'s mean and spread. Set target-scale = "given" or '
            '"own".'
        )
