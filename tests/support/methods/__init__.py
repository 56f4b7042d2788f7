"""All that shared tests must know about a method, one module for each method.

A method that needs none of these has no module. A module may define:

- ``METHOD``: the name, always.
- ``SHORT``: settings that make a run of the method short.
- ``LEAST``: settings that small graphs need, if the test gives no other value.
- ``WEIGHTED``: weight of each term of the loss, and a value at which the term shows after
  two rounds.
- ``NO_TERM``: settings called a weight that weigh no term of a loss, and what they weigh.
- ``NEEDED``: settings without which a term would be left out of a short run.
- ``NETWORKS``: settings with which the method's own network is saved and read.
- ``LOOKS_CLOSER``: true if the server reads single uploads, which could be summed too.
- ``DOWNLOAD_ACTION``: action of the first message with arrays, if it trains in no round.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from flower_fgl.core.model_spec import TYPED
from flower_fgl.methods import METHODS

__all__ = ["OF_PLAIN_GRAPHS", "collected"]

OF_PLAIN_GRAPHS = sorted(
    name for name, row in METHODS.items() if not row.models or {*row.models} - {*TYPED}
)
"""Methods that train on graphs with one kind of nodes and edges."""


def collected(name: str) -> dict[str, Any]:
    """Return the values of one name by method, of the modules that define it."""
    modules = [import_module(f"{__name__}.{m.name}") for m in iter_modules(__path__)]
    return {m.METHOD: getattr(m, name) for m in modules if hasattr(m, name)}
