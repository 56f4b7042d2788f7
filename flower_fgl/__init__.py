"""Federated graph learning methods as Flower apps.

``flower_fgl.simulate(method="fedavg", dataset="cora", clients=10)`` runs a method in this
process. ``flower-fgl run`` and ``flwr run .`` run the same app with Flower.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flower_fgl.core.version import VERSION

if TYPE_CHECKING:
    from flower_fgl.cli.run import run_experiment
    from flower_fgl.datasets.pyg_data import to_npz
    from flower_fgl.lab.results import Run, RunSet, compare, load
    from flower_fgl.lab.simulate import resume, simulate
    from flower_fgl.methods import METHODS
    from flower_fgl.simulation.register import register

__version__ = VERSION

__all__ = ["METHODS", "Run", "RunSet", "__version__", "compare", "load", "register"]
__all__ += ["resume", "run_experiment", "simulate", "to_npz"]


_HOMES = {
    "METHODS": "flower_fgl.methods",
    "Run": "flower_fgl.lab.results",
    "RunSet": "flower_fgl.lab.results",
    "compare": "flower_fgl.lab.results",
    "load": "flower_fgl.lab.results",
    "register": "flower_fgl.simulation.register",
    "resume": "flower_fgl.lab.simulate",
    "run_experiment": "flower_fgl.cli.run",
    "simulate": "flower_fgl.lab.simulate",
    "to_npz": "flower_fgl.datasets.pyg_data",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first access, so that a server loads no client code."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, which tab completion in a notebook shows."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
