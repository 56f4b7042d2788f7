from __future__ import annotations

from pathlib import Path

import pytest

from flower_fgl.config import RunConfig
from flower_fgl.experiments import read_experiment
from flower_fgl.methods import METHODS

FILES = sorted((Path(__file__).parent.parent / "experiments").glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_experiment_has_valid_settings_and_publishes_rows_it_has(path: Path) -> None:
    experiment = read_experiment(path)
    runs = experiment.runs()
    for run in runs:
        assert RunConfig.parse(run.settings, METHODS).method in METHODS
    assert len({run.name for run in runs}) == len(runs)
    assert set(experiment.published) <= {run.row for run in runs}
