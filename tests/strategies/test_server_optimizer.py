"""The setting ``server-optimizer`` in runs of methods that average weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flower_fgl import resume, simulate
from flower_fgl.core.errors import ConfigError
from flower_fgl.methods import parse_config
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.simulation.local import run_config_of
from flower_fgl.strategies.fedavg import FedAvg
from tests.support.short_runs import comparable

RULES = ["momentum", "adam", "yogi", "adagrad"]


def run(folder: Path, method: str = "fedavg", **settings: Any) -> Any:
    small = {"synthetic": {"nodes": 120, "features": 8}, "hidden_channels": 8}
    values = {"clients": 3, "rounds": 4, **small, "output_dir": str(folder)}
    return simulate(method, **{**values, **settings})


def losses(run: Any) -> list[float]:
    return [row["loss"] for row in run.rounds]


def test_a_step_of_one_without_momentum_is_the_mean(tmp_path: Path) -> None:
    plain = run(tmp_path)
    step = run(tmp_path, server_optimizer="momentum", server_momentum=0.0)
    assert losses(step) == pytest.approx(losses(plain), abs=1e-5)


def test_each_rule_trains_another_global_model(tmp_path: Path) -> None:
    found = {tuple(losses(run(tmp_path, server_optimizer=rule))) for rule in RULES}
    found.add(
        tuple(losses(run(tmp_path, server_optimizer="adam", server_moments="flower")))
    )
    found.add(tuple(losses(run(tmp_path))))
    assert len(found) == 6


@pytest.mark.parametrize("method", ["fedper", "fedprox"])
def test_other_methods_that_average_weights_take_it(
    method: str, tmp_path: Path
) -> None:
    plain = run(tmp_path, method, rounds=3)
    moved = run(tmp_path, method, rounds=3, server_optimizer="adam")
    assert moved.status == "completed"
    assert losses(moved) != losses(plain)


@pytest.mark.parametrize("secure", [False, True])
def test_the_moments_are_part_of_a_checkpoint(secure: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "server_optimizer": "yogi",
        "secure_aggregation": secure,
        "checkpoint_every": 2,
    }
    whole = run(tmp_path / "whole", **settings)

    def stop(row: Any) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    folder = tmp_path / "cut" / "run"
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, on_round=stop, run_dir=str(folder), **settings)
    again = resume(folder)
    if secure:  # masks are drawn anew
        assert losses(again) == pytest.approx(losses(whole), abs=1e-4)
    else:
        assert comparable(again) == comparable(whole)


def test_buffers_take_the_mean() -> None:
    values = run_config_of(
        method="fedavg",
        dataset="synthetic",
        clients=3,
        seed=0,
        settings={"server_optimizer": "momentum"},
    )
    strategy: Any = FedAvg.__new__(FedAvg)
    strategy.config = parse_config(values)
    start = {"w": torch.zeros(2), "norm.running_var": torch.ones(2)}
    strategy.weights, strategy.trained = Weights(start), frozenset({"w"})
    for number in (1, 2):
        mean = {"w": torch.ones(2), "norm.running_var": torch.full((2,), 0.25)}
        strategy.move_to(mean, number)
    after = strategy.weights.tensors
    assert after["norm.running_var"].tolist() == [0.25, 0.25]
    # Δ = 1, then 0: w = 1, then 1 + 0.9
    torch.testing.assert_close(after["w"], torch.full((2,), 1.9))


@pytest.mark.parametrize("method", ["fedpg", "scaffold", "fedgcn"])
def test_methods_that_do_more_than_averaging_refuse_it(method: str) -> None:
    with pytest.raises(ConfigError, match='server-optimizer = "adam" is not possible'):
        simulate(method, clients=3, rounds=2, server_optimizer="adam")


def test_a_setting_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match="server-momentum"):
        simulate("fedavg", rounds=2, server_optimizer="adagrad", server_momentum=0.5)
