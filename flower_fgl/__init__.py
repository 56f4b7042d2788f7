"""Federated graph learning methods as Flower apps.

``flower_fgl.simulate(method="fedavg", dataset="cora", clients=10)`` runs one in this
process; ``flower-fgl run`` and ``flwr run .`` run the same app under Flower.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flower_fgl.local_engine import simulate
    from flower_fgl.methods import METHODS
    from flower_fgl.resuming import resume
    from flower_fgl.runs import Run

__all__ = ["METHODS", "Run", "resume", "simulate"]
__version__ = "0.1.0"


_HOMES = {
    "METHODS": "flower_fgl.methods",
    "Run": "flower_fgl.runs",
    "resume": "flower_fgl.resuming",
    "simulate": "flower_fgl.local_engine",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: a server loads no client code."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
