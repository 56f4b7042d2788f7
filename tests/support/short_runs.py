"""Settings of runs that take a moment, and what must not differ between two runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flower_fgl.testing.case import SMALL, comparable, timeless
from tests.support.methods import collected

__all__ = [
    "LEAST",
    "SHORT",
    "SMALL",
    "comparable",
    "of_file",
    "shortened",
    "timeless",
]

SHORT: dict[str, dict[str, Any]] = {
    **collected("SHORT"),
    "adpfedgnn": {"local_epochs": 1},
    "f2l": {"local_epochs": 1, "f2l": {"inner_steps": 2}},
    "fedpano": {"participants": 0},
    "fedlog": {
        "fedlog": {
            "nodes_per_class": 2,
            "encoder_channels": 8,
            "prompt_epochs": 2,
            "prompt_networks": 2,
        }
    },
    "opfgl": {
        "rounds": 1,
        "local_epochs": 20,
        "check_every": 10,
        "opfgl": {"server_steps": 60},
    },
    "fedsage+": {
        "fedsage+": {"gen_rounds": 2, "gen_channels": 8, "gen_wide_channels": 16}
    },
}
"""Settings that make a method's runs short."""


# the classes of these graphs are smaller than O-pFGL's own min-class-count
LEAST: dict[str, dict[str, Any]] = {"opfgl": {"min_class_count": 1}}


def shortened(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**LEAST.get(method, {}), **settings, **SHORT.get(method, {})}


def of_file(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those of the synthetic graph."""
    return {key: value for key, value in settings.items() if key != "synthetic"}
