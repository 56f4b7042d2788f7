"""``aggregation``: one malicious client of ten, and where the setting is possible."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from benchmarks.poisoning import RULES, honest_accuracy, run_poisoned
from flower_fgl import METHODS, Run, simulate
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.core.unused_settings import reject_unused_settings
from flower_fgl.methods import parse_config
from flower_fgl.strategies.fedavg import FedAvg
from flower_fgl.strategies.partly_shared import PartlyShared
from tests.support.short_runs import SMALL, comparable, shortened

ROBUST = sorted(name for name, row in METHODS.items() if row.robust)
MEDIUM: dict[str, Any] = {
    "synthetic": {"nodes": 800, "classes": 4, "features": 32, "feature_noise": 3.0},
    "hidden_channels": 16,
    "rounds": 10,
    "evaluate": "global",
    "evaluate_every": 10,
}


def accuracy(folder: Path, attack: str, rule: str) -> float:
    run = run_poisoned(attack, 1, folder, **MEDIUM, aggregation=rule)
    return honest_accuracy(run, 1)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> float:
    return accuracy(tmp_path_factory.mktemp("clean") / "run", "none", "mean")


@pytest.mark.thorough
@pytest.mark.parametrize("attack", ["huge", "flip"])
def test_one_client_of_ten_ruins_the_mean(
    attack: str, clean: float, tmp_path: Path
) -> None:
    assert accuracy(tmp_path / "run", attack, "mean") < clean - 0.2


@pytest.mark.thorough
@pytest.mark.parametrize("attack", ["huge", "flip"])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "mean"])
def test_a_robust_rule_stays_near_the_run_without_the_attacker(
    rule: str, attack: str, clean: float, tmp_path: Path
) -> None:
    assert clean > 0.6  # chance is a quarter
    assert accuracy(tmp_path / "run", attack, rule) > clean - 0.08


def run_of(method: str, **settings: Any) -> Run:
    settings = {**shortened(method, SMALL), "rounds": 2, "participants": 0, **settings}
    return simulate(method, clients=5, **settings)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ROBUST)
def test_every_method_with_the_flag_runs_with_every_rule(
    method: str, tmp_path: Path
) -> None:
    settings = {"participation": 1.0, "output_dir": str(tmp_path)}
    if method == "fedpano":
        del settings["participation"]
    for rule in RULES[1:]:
        run = run_of(method, aggregation=rule, **settings)
        assert run.status == "completed"
        trained = [row for row in run.rounds if row["phase"] == "train"]
        assert [row["replies"] for row in trained] == [5, 5]


def test_the_flag_is_set_for_methods_that_only_average_weights() -> None:
    for name, row in METHODS.items():
        strategy = row.load_strategy()
        only_averages = (
            issubclass(strategy, FedAvg)
            and strategy.aggregate is FedAvg.aggregate
            # no exchanges before round 1
            and strategy.prepare in (FedAvg.prepare, PartlyShared.prepare)
        )
        assert row.robust == only_averages, name


def test_the_guide_lists_all_methods_with_the_flag() -> None:
    path = Path(__file__).parents[2] / "docs" / "robust-aggregation.md"
    guide = path.read_text("utf-8")
    listed = guide.partition("methods support it:")[2].partition("Their servers")[0]
    assert re.findall(r"`([a-z0-9+-]+)`", listed) == ROBUST


def test_norm_clip_with_a_large_bound_is_the_mean_to_the_bit(tmp_path: Path) -> None:
    plain = run_of("fedavg", output_dir=str(tmp_path / "a"))
    run = run_of(
        "fedavg",
        aggregation="norm-clip",
        norm_bound=1e9,
        output_dir=str(tmp_path / "b"),
    )
    for row in run.rounds:
        assert row["numbers"].pop("clipped") == 0
        assert row["numbers"].pop("norm_bound") == 1e9
    assert comparable(run) == comparable(plain)


def test_krum_with_one_upload_sends_that_client_s_weights(tmp_path: Path) -> None:
    run = run_of(
        "fedavg", aggregation="krum", krum_keep=1, output_dir=str(tmp_path), rounds=1
    )
    assert run.rounds[0]["numbers"]["largest_update"] > 0


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"method": "fedpg"},
            "fedpg does more with its uploads.*support it: .*f2l, fedala",
        ),
        ({"secure-aggregation": True}, "secure-aggregation hides from the server"),
        ({"clients": 2}, "needs 3 uploads per round, but clients = 2"),
        (
            {"aggregation": "krum", "clients": 10, "krum-attackers": 4},
            r"needs 11 uploads per round \(2·4 \+ 3\), but clients = 10",
        ),
        ({"clients": 10, "participants": 2}, "participants = 2 give 2"),
        ({"aggregation": "mode"}, "mean"),
        ({"trimmed-share": 0.5}, "below 0.5|less than 0.5|< 0.5"),
    ],
)
def test_a_robust_aggregation_that_is_not_possible_is_refused(
    values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_config({"method": "fedavg", "aggregation": "median", **values})


@pytest.mark.parametrize(
    "key", ["trimmed-share", "krum-attackers", "krum-keep", "norm-bound"]
)
def test_a_setting_of_another_rule_is_refused_on_the_command_line(key: str) -> None:
    config: RunConfig = parse_config({"method": "fedavg", "aggregation": "median"})
    with pytest.raises(ConfigError, match=f"{key} has no effect: it needs aggregation"):
        reject_unused_settings([key], [config])


def test_too_few_trainable_clients_for_the_rule_end_the_run_before_round_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWER_FGL_CACHE", str(tmp_path / "cache"))
    y = torch.arange(30) % 2
    graph = Data(x=torch.eye(2)[y], edge_index=torch.zeros(2, 0).long(), y=y)
    graph.train_mask, graph.val_mask, graph.test_mask = (
        torch.arange(30) % 3 == part for part in range(3)
    )
    idle = graph.clone()
    idle.train_mask = y < 0
    owners = [graph, graph, idle]
    short: dict[str, Any] = {"rounds": 1, "output_dir": str(tmp_path / "runs")}
    with pytest.raises(
        RunError, match=r'2 of 3 clients can train.*"median" needs 3 uploads'
    ):
        simulate("fedavg", owners, aggregation="median", **short)


def test_a_round_with_too_few_uploads_for_the_rule_fails(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flower_fgl.client_apps.fedavg import FedAvgClientApp

    fit = FedAvgClientApp.fit

    def failing(self: Any, client: Any, server_round: int, download: Any) -> Any:
        if client.partition_id == 0:
            raise ValueError("down")
        return fit(self, client, server_round, download)

    monkeypatch.setattr(FedAvgClientApp, "fit", failing)
    assert simulate(**small).status == "completed"
    with pytest.raises(RunError, match="2 usable replies of 3 sampled clients"):
        simulate(**small, aggregation="median")
