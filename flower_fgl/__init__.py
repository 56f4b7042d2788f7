"""Federated graph learning methods as Flower apps.

``flower_fgl.simulate(method="fedavg", dataset="cora", clients=10)`` runs a method in this
process. ``flower-fgl run`` and ``flwr run .`` run the same app with Flower.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flower_fgl.core.version import VERSION

if TYPE_CHECKING:
    from flower_fgl.datasets.pyg_data import to_npz
    from flower_fgl.methods import METHODS
    from flower_fgl.runs.run import Run
    from flower_fgl.simulation.local import simulate
    from flower_fgl.simulation.register import register
    from flower_fgl.simulation.resume import resume

__version__ = VERSION

__all__ = ["METHODS", "Run", "__version__", "register", "resume", "simulate", "to_npz"]


_HOMES = {
    "METHODS": "flower_fgl.methods",
    "Run": "flower_fgl.runs.run",
    "register": "flower_fgl.simulation.register",
    "resume": "flower_fgl.simulation.resume",
    "simulate": "flower_fgl.simulation.local",
    "to_npz": "flower_fgl.datasets.pyg_data",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first access, so that a server loads no client code."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
