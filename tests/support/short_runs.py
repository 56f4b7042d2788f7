"""Settings of runs that take a moment, and what must not differ between two runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flower_fgl.testing.case import SMALL, comparable, timeless
from tests.support.methods import collected

__all__ = [
    "SHORT",
    "SMALL",
    "comparable",
    "of_file",
    "shortened",
    "timeless",
]

SHORT: dict[str, dict[str, Any]] = collected("SHORT")
LEAST: dict[str, dict[str, Any]] = collected("LEAST")


def shortened(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**LEAST.get(method, {}), **settings, **SHORT.get(method, {})}


def of_file(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those of the synthetic graph."""
    return {key: value for key, value in settings.items() if key != "synthetic"}
