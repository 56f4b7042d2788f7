"""Contract of a method in the settings ``closed-set``, ``open-set`` and ``few-shot``."""

from __future__ import annotations

from typing import Any

import pytest

from flower_fgl.core.errors import ConfigError
from flower_fgl.lab.simulate import simulate
from flower_fgl.testing.case import Contract, MethodCase

__all__ = ["SettingContract"]

COLUMNS = {
    "few-shot": ("test_masked",),
    "open-set": ("unseen", "missing"),
    "closed-set": ("unseen", "missing", "new_client"),
}
"""Node sets that each setting scores besides the test nodes."""


class SettingContract(Contract):
    """A run in each setting of the data.

    A method that needs edges between clients (``Method.needs_cross_edges``) runs in the
    settings that have them and refuses the others.
    """

    @pytest.mark.parametrize("setting", sorted(COLUMNS))
    def test_a_method_runs_in_every_setting(
        self, case: MethodCase, setting: str, short: dict[str, Any]
    ) -> None:
        # enough nodes of each class
        graph = {"nodes": 400, "classes": 4, "features": 8, "block_skew": 0.3}
        values = {"synthetic": graph, "setting": setting, "evaluate": "local"}
        if case.row.needs_cross_edges and setting != "few-shot":
            with pytest.raises(ConfigError, match="sums over the edges between"):
                simulate(**{**short, **values})
            return
        run = simulate(**{**short, **values})
        assert run.best is not None
        assert ("new_client" in run.best) == (setting == "closed-set")
        for column in ("test", *COLUMNS[setting]):
            assert run.best[column]["num_nodes"] > 0
            assert 0 <= run.best[column]["accuracy"] <= 1
        assert all(row["failures"] == [] for row in run.rounds)
