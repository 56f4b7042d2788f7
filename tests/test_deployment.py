"""Two real SuperNodes on a real SuperLink."""

from __future__ import annotations

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
