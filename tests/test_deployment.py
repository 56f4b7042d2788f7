"""Two real SuperNodes on a real SuperLink."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from flower_fgl import Run, simulate

from .conftest import SMALL
from .flower_deployment import deployment
from .test_run import numbers


@pytest.mark.timeout(300)
def test_two_supernodes_give_the_numbers_of_the_local_engine(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SMALL, "evaluate": "both"}
    expected = simulate("fedprox", clients=2, output_dir=str(tmp_path), **settings)
    values = {k: v for k, v in expected.config.items() if not isinstance(v, dict)}
    values |= {f"synthetic.{k}": v for k, v in expected.config["synthetic"].items()}
    values |= {f"fedprox.{k}": v for k, v in expected.config["fedprox"].items()}
    folder = tmp_path / "deployed"
    values["run-dir"] = str(folder)
    nodes = [f"partition-id={i} num-partitions=2" for i in range(2)]
    with deployment(tmp_path / "deployment", nodes) as stage:
        status = stage.run(values)
        assert status == "finished:completed", stage.logs()
    run = Run.load(folder)
    assert run.status == "completed"
    assert run.summary["engine"] == "deployment"
    assert numbers(run) == numbers(expected)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_killed_deployment_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SMALL, "rounds": 3, "checkpoint_every": 1}
    expected = simulate("fedavg", clients=2, output_dir=str(tmp_path), **settings)
    values = {k: v for k, v in expected.config.items() if not isinstance(v, dict)}
    values |= {f"synthetic.{k}": v for k, v in expected.config["synthetic"].items()}
    folder = tmp_path / "deployed"
    values["run-dir"] = str(folder)
    nodes = [
        f'partition-id={i} num-partitions=2 state-dir="{tmp_path}/owner-{i}"'
        for i in range(2)
    ]
    with deployment(tmp_path / "first", nodes) as stage:
        stage.submit(values)
        end = time.monotonic() + 150
        lines = folder / "rounds.jsonl"
        while not lines.exists() or lines.read_bytes().count(b"\n") < 2:
            assert time.monotonic() < end, stage.logs()
            time.sleep(0.1)
        time.sleep(1)  # into round 3
    assert Run.load(folder).status == "running"  # all killed
    with deployment(tmp_path / "second", nodes) as stage:
        status = stage.run({**values, "resume": True}, seconds=270)
        assert status == "finished:completed", stage.logs()
    run = Run.load(folder)
    assert run.status == "completed"
    assert numbers(run) == numbers(expected)
