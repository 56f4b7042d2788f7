"""The experiment files that come with the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from flower_fgl.config import RunConfig
from flower_fgl.experiments import read_experiment
from flower_fgl.methods import METHODS

FILES = sorted((Path(__file__).parents[1] / "experiments").glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_run_of_an_experiment_has_settings_that_parse(path: Path) -> None:
    experiment = read_experiment(path)
    runs = experiment.runs()
    for run in runs:
        RunConfig.parse(run.settings, METHODS)
    assert len({run.name for run in runs}) == len(runs)
    rows = {run.row for run in runs}
    assert set(experiment.published) <= rows
    assert set(experiment.published_f1) <= rows
