"""Runs that classify whole graphs, end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flower_fgl import simulate
from flower_fgl.cli.main import app
from tests.support.tiny_graphs import write_tiny

MUTAG_MAJORITY = 125 / 188


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, Any]:
    write_tiny(tmp_path / "data")
    return {
        "dataset": "tu:TINY",
        "data_dir": str(tmp_path / "data"),
        "output_dir": str(tmp_path / "runs"),
        "setting": "graph",
        "partition": "uniform",
        "model": "gin",
        "clients": 3,
        "hidden_channels": 16,
        "rounds": 2,
    }


@pytest.mark.thorough
@pytest.mark.parametrize("batch_size", [0, 4])
def test_fedavg_learns_to_separate_rings_from_stars(
    batch_size: int, tiny: dict[str, Any]
) -> None:
    # a client trains on nine graphs; the graph without edges may be a test graph
    run = simulate("fedavg", **{**tiny, "rounds": 20, "batch_size": batch_size})
    assert run.best["test"]["accuracy"] >= 5 / 6
    assert run.rounds[-1]["loss"] < 0.3


def test_without_validation_the_last_round_is_selected(tiny: dict[str, Any]) -> None:
    run = simulate("fedavg", **{**tiny, "evaluate": "both", "weight_by": "nodes"})
    assert run.summary["selection"] == "last"
    assert run.best["round"] == 2
    about = [row for row in run.clients if row["round"] == 0]
    assert [row["num_nodes"] for row in about] == [10, 10, 10]
    assert [row["num_train"] for row in about] == [8, 8, 8]
    assert sum(row["num_edges"] for row in about) == 130
    assert [sum(row["class_counts"]) for row in about] == [8, 8, 8]
    assert "test AUROC" in run.table()
    for name in ("auroc", "auprc"):
        assert 0 <= run.summary["global"]["best"]["test"][name] <= 1


def test_validation_graphs_select_the_round(tiny: dict[str, Any]) -> None:
    run = simulate("local", **{**tiny, "split": "60/20/20"})
    assert run.summary["selection"] == "validation"
    assert run.best["val"]["num_nodes"] == 6


def test_clients_may_have_different_backbones(tiny: dict[str, Any]) -> None:
    run = simulate("local", **{**tiny, "model": "gin,gcnii,sgc"})
    models = [row["model"] for row in run.clients if row["round"] == 0]
    assert models == ["gin", "gcnii", "sgc"]


def test_fine_tuned_models_are_scored_on_graphs(tiny: dict[str, Any]) -> None:
    run = simulate("fedavg", **{**tiny, "fedavg": {"finetune_epochs": 2}})
    assert run.summary["finetuned"]["test"]["num_nodes"] == 6


def test_node_classification_reports_no_auroc(small: dict[str, Any]) -> None:
    run = simulate("fedavg", **small)
    assert not {"auroc", "auprc"} & run.best["test"].keys()
    assert "AUROC" not in run.table()


def options(tiny: dict[str, Any], **changes: str) -> list[str]:
    values = {"setting": "graph", "data-dir": tiny["data_dir"], **changes}
    pairs = [part for k, v in values.items() for part in ("--set", f"{k}={v}")]
    return ["--dataset", "tu:TINY", "--clients", "3", "--rule", "uniform", *pairs]


def test_the_partition_command_counts_graphs(tiny: dict[str, Any]) -> None:
    done = CliRunner().invoke(app, ["partition", *options(tiny)])
    assert done.exit_code == 0, done.output
    assert "3 clients, 30 graphs, 130 of 130 edges kept (100.0%)" in done.output


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "local"])
def test_mutag_accuracy_exceeds_the_majority_class(
    method: str, real_data: Path, tmp_path: Path
) -> None:
    run = simulate(
        method,
        "mutag",
        data_dir=str(real_data),
        setting="graph",
        partition="uniform",
        model="gin",
        rounds=30,
        output_dir=str(tmp_path),
    )
    assert run.best["test"]["num_nodes"] == 30
    # 30 test graphs, of which 20 are of the larger class
    assert run.best["test"]["accuracy"] > MUTAG_MAJORITY
    assert run.best["test"]["auroc"] > 0.7
