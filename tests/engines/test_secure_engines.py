"""Secure aggregation where clients are other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flower_fgl import Run, simulate
from flower_fgl.simulation.run import run_one
from tests.engines.test_run import numbers
from tests.support.flower_deployment import deployment
from tests.support.short_runs import SMALL


@pytest.fixture
def expected(tmp_path: Path) -> Run:
    """One round of three clients in this process: a message takes seconds elsewhere."""
    settings: dict[str, Any] = {**SMALL, "secure_aggregation": True, "rounds": 1}
    return simulate(clients=3, output_dir=str(tmp_path), **settings)


def values_of(run: Run, folder: Path) -> dict[str, Any]:
    values = {k: v for k, v in run.config.items() if not isinstance(v, dict)}
    for table in ("synthetic", "fedavg"):
        values |= {f"{table}.{k}": v for k, v in run.config[table].items()}
    return values | {"run-dir": str(folder)}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ray_gives_the_numbers_of_the_local_engine(
    expected: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    values = values_of(expected, tmp_path / "ray")
    run = run_one(values, engine="ray", workers=2)
    assert numbers(run) == numbers(expected)
    assert run.rounds[-1]["bytes"] == expected.rounds[-1]["bytes"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_supernodes_give_the_numbers_of_the_local_engine(
    expected: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "deployed"
    nodes = [f"partition-id={i} num-partitions=3" for i in range(3)]
    with deployment(tmp_path / "deployment", nodes) as stage:
        status = stage.run(values_of(expected, folder), seconds=500)
        assert status == "finished:completed", stage.logs()
    assert numbers(Run.load(folder)) == numbers(expected)
