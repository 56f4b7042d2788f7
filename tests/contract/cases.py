"""The cases of the contract: every method of this package."""

from __future__ import annotations

from flower_fgl import METHODS
from flower_fgl.testing import MethodCase
from tests.support.methods import collected
from tests.support.short_runs import shortened

__all__ = ["CASES"]

WEIGHTED, NEEDED = collected("WEIGHTED"), collected("NEEDED")
DOWNLOAD_ACTIONS = collected("DOWNLOAD_ACTION")

CASES = [
    MethodCase(
        name,
        short=shortened(name, {}),
        weights=WEIGHTED.get(name, {}),
        needed=NEEDED.get(name, {}),
        download_action=DOWNLOAD_ACTIONS.get(name, ""),
    )
    for name in sorted(METHODS.own)
]
