"""Checks that settings are known, and compatible with each other and with the method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flower_fgl.core.checks.data import check_data
from flower_fgl.core.checks.names import check_names
from flower_fgl.core.checks.needs import check_needs
from flower_fgl.core.checks.numbers import check_numbers
from flower_fgl.core.checks.rounds import check_rounds
from flower_fgl.core.checks.training import check_training
from flower_fgl.core.settings import GeneralSettings

__all__ = ["check_names", "check_settings"]


def check_settings(
    settings: GeneralSettings, method: Any, methods: Mapping[str, Any]
) -> None:
    """Reject settings that the method, or another setting, rules out.

    Raises
    ------
    ConfigError
        If the method cannot do what a setting needs, or if two settings contradict each
        other. It names the methods of the table that can.
    """
    check_data(settings)
    check_numbers(settings)
    check_needs(settings, method, methods)
    check_training(settings, method)
    check_rounds(settings, method)
