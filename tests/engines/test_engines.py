"""The law of the three places, as far as one process can show it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flower_fgl import simulate
from flower_fgl.core.errors import ConfigError, DataError, RunError
from tests.support.short_runs import of_file


def test_bad_settings_leave_no_folder(small: dict[str, Any], tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="Did you mean"):
        simulate("fedpox", **small)
    with pytest.raises(ConfigError, match="clients"):
        simulate(**{**small, "clients": 0})
    with pytest.raises(ConfigError, match="121"):
        simulate(**{**small, "clients": 121})
    assert not (tmp_path / "runs").exists()


def test_missing_data_are_explained_before_anything_starts(
    small: dict[str, Any], tmp_path: Any
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError) as error:
        simulate(
            "fedavg", "amazon-clothing", **{**of_file(small), "data_dir": str(empty)}
        )
    assert str(empty) in str(error.value)
    assert "data-dir" in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_the_run_folder_must_be_free(small: dict[str, Any], tmp_path: Any) -> None:
    folder = tmp_path / "taken"
    folder.mkdir()
    (folder / "mine.txt").write_text("keep")
    with pytest.raises(RunError, match="not empty"):
        simulate(**{**small, "run_dir": str(folder)})
    assert [p.name for p in folder.iterdir()] == ["mine.txt"]


def test_threads_and_generators_are_put_back(small: dict[str, Any]) -> None:
    before = torch.get_num_threads(), torch.get_rng_state()
    simulate(**{**small, "threads": 1})
    assert torch.get_num_threads() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_resolved_configuration_gives_the_same_numbers_again(
    small: dict[str, Any], tmp_path: Any
) -> None:
    from flower_fgl.lab.experiments.experiment_file import read_experiment
    from flower_fgl.simulation.local import run_local

    first = simulate("fedprox", **small, fedprox={"mu": 0.1})
    values = dict(read_experiment(first.path / "config.toml").config)
    values["run-dir"] = str(tmp_path / "again")
    again = run_local(values)
    assert again.summary["best"] == first.summary["best"]
    assert again.summary["last"] == first.summary["last"]


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_a_toy_problem_is_learnt(small: dict[str, Any], method: str) -> None:
    easy = {"nodes": 300, "classes": 3, "features": 16, "feature_noise": 0.1}
    easy |= {"blocks": 6, "block_skew": 0.0, "homophily": 1.0}
    run = simulate(method, **{**small, "synthetic": easy, "rounds": 15})
    assert run.best["test"]["accuracy"] > 0.9


def test_optimizer_state_kept_and_reset_differ(small: dict[str, Any]) -> None:
    kept = simulate(**{**small, "optimizer_state": "keep"})
    reset = simulate(**{**small, "optimizer_state": "reset"})
    assert kept.rounds[0]["loss"] == reset.rounds[0]["loss"]
    assert kept.rounds[1]["loss"] != reset.rounds[1]["loss"]


def test_fedprox_with_mu_zero_is_fedavg(small: dict[str, Any]) -> None:
    prox = simulate("fedprox", **small, fedprox={"mu": 0.0})
    avg = simulate("fedavg", **small)
    assert prox.rounds[-1]["metrics"] == avg.rounds[-1]["metrics"]


def test_local_clients_may_have_different_backbones(small: dict[str, Any]) -> None:
    run = simulate("local", **{**small, "model": "gcn,mlp"})
    models = [c["model"] for c in run.clients if c["round"] == 0]
    assert models == ["gcn", "mlp", "gcn"]


def test_a_client_without_training_nodes_is_scored_but_not_trained(
    small: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    # 20 % of fewer than five nodes of a class is none: small clients cannot train
    settings = {**small, "clients": 12, "split": "20/40/40", "partition": "dirichlet"}
    run = simulate(**{**settings, "dirichlet_alpha": 0.3})
    about = [c for c in run.clients if c["round"] == 0]
    idle = [c["partition_id"] for c in about if not c["trains"]]
    assert 0 < len(idle) < 12
    assert "are only evaluated" in caplog.text
    rows = {c["partition_id"]: c for c in run.clients if c["round"] == 1}
    for pid in idle:
        assert "loss" not in rows[pid]
        assert rows[pid]["metrics"]["local"]["test"]["num_nodes"] > 0


def test_a_run_without_any_training_node_says_so(small: dict[str, Any]) -> None:
    with pytest.raises(RunError, match="No client has a training node"):
        simulate(**{**small, "clients": 10, "split": "1/40/59"})


def test_mini_batches_visit_every_training_node(small: dict[str, Any]) -> None:
    run = simulate(**{**small, "batch_size": 4})
    assert run.status == "completed"
    assert run.rounds[0]["loss"] != simulate(**small).rounds[0]["loss"]


def test_clients_of_an_inductive_run_train_on_their_training_nodes_only(
    small: dict[str, Any],
) -> None:
    run = simulate(**{**small, "setting": "inductive"})
    for client in run.clients:
        if client["round"] == 0:
            assert client["num_nodes"] == client["num_train"]
            assert client["num_test"] > 0
    assert run.best["test"]["num_nodes"] > 0


def own_graph(path: Path, **changes: Any) -> str:
    """Write a graph file of 60 nodes in two classes, without any edge."""
    generator = np.random.default_rng(0)
    arrays = {
        "x": generator.normal(size=(60, 4)).astype(np.float32),
        "edge_index": np.empty((2, 0), dtype=np.int64),
        "y": np.arange(60) % 2,
        "class_names": np.array(["no", "yes"]),
    }
    np.savez(path, **{**arrays, **changes})  # type: ignore[arg-type]
    return str(path)


@pytest.mark.parametrize("model", ["gcn", "graphsage", "gat", "gin", "sgc", "appnp"])
def test_clients_without_edges_train(
    small: dict[str, Any], tmp_path: Path, model: str
) -> None:
    path = own_graph(tmp_path / "edgeless.npz")
    settings = {**of_file(small), "partition": "uniform", "model": model}
    run = simulate("fedavg", path, **settings)
    about = [c for c in run.clients if c["round"] == 0]
    assert [c["num_edges"] for c in about] == [0, 0, 0]
    assert math.isfinite(run.rounds[-1]["loss"])


def test_clients_with_one_class_train(small: dict[str, Any], tmp_path: Path) -> None:
    path = own_graph(tmp_path / "one.npz", y=np.zeros(60, dtype=np.int64))
    settings = {**of_file(small), "partition": "uniform", "rounds": 20}
    run = simulate("fedavg", path, **settings)
    assert run.best["test"]["accuracy"] == 1.0
    about = [c for c in run.clients if c["round"] == 0]
    assert all(c["class_counts"][1] == 0 for c in about)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": np.full((60, 4), np.nan, np.float32)}, "finite"),
        ({"y": np.full(60, 7)}, "class"),
        ({"edge_index": np.array([[0], [99]])}, "99"),
        ({"edge_index": np.array([[0.5], [1.0]])}, "edge_index"),
        ({"y": np.array([{}] * 60)}, "Pickled"),
    ],
)
def test_a_malformed_graph_file_is_refused_before_anything_starts(
    small: dict[str, Any], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = own_graph(tmp_path / "bad.npz", **changes)
    with pytest.raises(DataError, match=words) as error:
        simulate("fedavg", path, **of_file(small))
    assert "bad.npz" in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_a_set_of_graphs_is_refused_with_a_reason(
    small: dict[str, Any], real_data: Path
) -> None:
    with pytest.raises(ConfigError, match='needs setting = "graph"'):
        simulate("fedavg", "mutag", **{**of_file(small), "data_dir": str(real_data)})


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["local", "fedavg"])
def test_cora_is_learnt_to_the_level_of_the_literature(
    method: str, real_data: Path, tmp_path: Path
) -> None:
    # 10 METIS clients reach 77 to 79 % (docs/results/baselines.md), the largest class 30 %
    run = simulate(
        method, "cora", data_dir=str(real_data), rounds=30, output_dir=str(tmp_path)
    )
    assert run.best["test"]["accuracy"] > 0.75
    assert run.summary["partition_sha256"].startswith("ed4c4d01")
