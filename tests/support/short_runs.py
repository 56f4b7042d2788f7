"""Settings of runs that take a moment, and what must not differ between two runs."""

from __future__ import annotations

import json
from typing import Any

from tests.support.methods import collected

__all__ = ["SHORT", "SMALL", "comparable", "shortened", "timeless"]

SMALL: dict[str, Any] = {
    "synthetic": {"nodes": 120, "classes": 3, "features": 8, "blocks": 6},
    "hidden_channels": 8,
    "rounds": 2,
}
SHORT: dict[str, dict[str, Any]] = {
    **collected("SHORT"),
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


def shortened(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    # the classes of these graphs are smaller than O-pFGL's own min-class-count
    least = {"min_class_count": 1} if method == "opfgl" else {}
    return {**least, **settings, **SHORT.get(method, {})}


def comparable(run: Any) -> str:
    """Return all numbers of a run except times."""
    keep = [{k: v for k, v in row.items() if k != "seconds"} for row in run.rounds]
    clients = [{k: v for k, v in row.items() if k != "seconds"} for row in run.clients]
    return json.dumps([keep, clients], sort_keys=True)


def timeless(summary: dict[str, Any]) -> dict[str, Any]:
    """Return a summary without times."""
    skipped = ("seconds", "started", "environment")
    return {key: value for key, value in summary.items() if key not in skipped}
