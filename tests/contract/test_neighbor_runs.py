"""``num-neighbors`` runs with every method that says so, and changes its training."""

from __future__ import annotations

from pathlib import Path

import pytest

from flower_fgl import METHODS, simulate
from tests.support.short_runs import SMALL, comparable, shortened

SAMPLING = sorted(name for name, row in METHODS.items() if row.samples_neighbors)


def test_the_methods_that_sample_neighbours() -> None:
    assert set(SAMPLING) >= {"local", "fedavg", "fedprox", "fedper", "fedrep"}


@pytest.mark.parametrize("method", SAMPLING)
def test_drawn_neighbours_change_the_training(method: str, tmp_path: Path) -> None:
    settings = {**shortened(method, SMALL), "rounds": 2, "batch_size": 8, "clients": 3}
    runs = [
        simulate(
            method, **settings, num_neighbors=numbers, output_dir=str(tmp_path / name)
        )
        for name, numbers in (("few", "1,1"), ("again", "1,1"), ("all", ""))
    ]
    few, again, whole = (comparable(run) for run in runs)
    assert all(run.status == "completed" for run in runs)
    assert few == again
    assert few != whole
