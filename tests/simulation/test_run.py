"""Checks of a run's options before its folder is made."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from flower_fgl.core.errors import ConfigError
from flower_fgl.simulation.run import run_one


@pytest.mark.parametrize("number", [-1.0, math.nan, math.inf, 1.5, 1e-320])
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_wrong_number_of_gpus_starts_nothing(
    number: float, engine: str, tmp_path: Path
) -> None:
    values = {"clients": 2, "output-dir": str(tmp_path / "runs")}
    with pytest.raises(ConfigError, match="client_gpus must be 0, a fraction"):
        run_one(values, engine=engine, client_gpus=number)
    assert not list(tmp_path.iterdir())
