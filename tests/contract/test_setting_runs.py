"""Whole runs in the settings ``closed-set``, ``open-set`` and ``few-shot``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from flower_fgl import Run, simulate
from flower_fgl.cli.main import app
from flower_fgl.core.errors import FglError, RunError
from tests.support.short_runs import of_file, shortened

UNSEEN = ("unseen", "missing", "new_client")
METHODS = ("local", "fedavg", "fedprox")
UNSEEN_METHODS = ("fedavg", "fedlog", "fedntd", "feded", "fed-pub", "fedsage+")
"""FedLoG and the methods it is compared with."""
EMPTY = {
    "num_nodes": 0,
    **dict.fromkeys(
        [
            "accuracy",
            "macro_f1",
            "macro_recall",
            "mean_accuracy",
            "mean_macro_f1",
            "mean_macro_recall",
        ]
    ),
}
"""A column without nodes has no scores, which differs from scores of zero."""


@pytest.fixture
def settings(small: dict[str, object]) -> dict[str, Any]:
    """Settings of a graph with enough nodes of each class."""
    synthetic = {"nodes": 400, "classes": 4, "features": 8, "block_skew": 0.3}
    return {**small, "synthetic": synthetic}


def write_graph(path: Path, edges: list[tuple[int, int]], y: list[int]) -> str:
    """Write a data owner's graph file with two random features."""
    np.savez(
        path,
        x=np.random.default_rng(0).random((len(y), 2)),
        edge_index=np.array(edges).T,
        y=np.array(y),
        class_names=np.array([f"class {c}" for c in range(max(y) + 1)]),
    )
    return str(path)


def cliques(num: int, size: int) -> list[tuple[int, int]]:
    """Return the edges of a ring of cliques."""
    inside = [
        (size * k + i, size * k + j)
        for k in range(num)
        for i in range(size)
        for j in range(i)
    ]
    return inside + [(size * k, size * ((k + 1) % num) + 1) for k in range(num)]


def scores(run: Run) -> dict[str, Any]:
    assert run.best is not None
    return {column: run.best[column] for column in run.best if column != "round"}


@pytest.mark.parametrize("method", METHODS)
def test_a_closed_set_run_scores_all_columns_in_the_best_validation_round(
    method: str, settings: dict[str, Any]
) -> None:
    run = simulate(method, **settings, setting="closed-set")
    assert set(scores(run)) == {"val", "test", *UNSEEN}
    validation = [row["metrics"]["local"]["val"]["accuracy"] for row in run.rounds]
    best = max(range(2), key=lambda i: (validation[i], i))
    assert run.summary["selection"] == "validation"
    assert scores(run) == run.rounds[best]["metrics"]["local"]
    assert (
        scores(run)["new_client"]["num_nodes"] % 3 == 0
    )  # the same graph for all three clients
    assert all(scores(run)[column]["num_nodes"] > 0 for column in UNSEEN)


def test_the_new_client_is_scored_by_the_plain_mean_over_clients(
    settings: dict[str, Any],
) -> None:
    new = scores(simulate("local", **settings, setting="closed-set"))["new_client"]
    assert new["accuracy"] == pytest.approx(new["mean_accuracy"], abs=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_an_open_set_run_has_no_new_client(
    method: str, settings: dict[str, Any]
) -> None:
    run = simulate(method, **settings, setting="open-set")
    assert set(scores(run)) == {"val", "test", "unseen", "missing"}
    assert scores(run)["unseen"]["num_nodes"] > 0


def test_local_training_cannot_predict_missing_classes(
    settings: dict[str, Any],
) -> None:
    long = {**settings, "rounds": 10, "local_epochs": 5}
    run = simulate("local", **long, setting="closed-set")
    assert scores(run)["missing"]["num_nodes"] > 0
    assert scores(run)["missing"]["accuracy"] < 0.02
    assert scores(run)["test"]["accuracy"] > 0.3


def test_a_client_without_missing_classes_has_an_empty_column(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    # neither of two classes can be removed, so no class is missing
    y = [c for c in range(2) for _ in range(12)] * 4
    path = write_graph(tmp_path / "two.npz", cliques(8, 12), y)
    run = simulate("fedavg", path, **of_file(settings), setting="closed-set")
    assert scores(run)["missing"] == EMPTY
    assert scores(run)["unseen"]["num_nodes"] > 0


@pytest.mark.parametrize("setting", ["closed-set", "open-set"])
@pytest.mark.parametrize("method", ["fedavg", "fedlog"])
def test_an_empty_expansion_gives_empty_columns_instead_of_zero_scores(
    method: str, setting: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flower_fgl.datasets.splits.unseen.surroundings",
        lambda *_: np.empty(0, dtype=np.int64),
    )
    # a seed of its own, since partitions are cached
    some = {**shortened(method, settings), "setting": setting, "partition_seed": 987}
    run = simulate(method, **some)
    assert scores(run)["unseen"] == scores(run)["missing"] == EMPTY
    assert scores(run)["test"]["num_nodes"] > 0


@pytest.mark.parametrize("method", UNSEEN_METHODS)
def test_runs_complete_with_an_untrained_class_and_isolated_nodes(
    method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    # the only node of class 3 is removed as its client's rarest class; the hubs of some
    # stars are on other clients, so their leaves have no neighbors
    size, num = 12, 8
    edges = [(size * k, size * k + i) for k in range(num) for i in range(1, size)]
    edges += [(size * k, size * ((k + 1) % num)) for k in range(num)]
    y = [2 if i == 0 else i % 2 for _ in range(num) for i in range(size)]
    y[1] = 3
    path = write_graph(tmp_path / "stars.npz", edges, y)
    run = simulate(
        method, path, **shortened(method, of_file(settings)), setting="closed-set"
    )
    about = [row for row in run.clients if "class_counts" in row]
    assert sum(row["class_counts"][3] for row in about) == 0
    assert any(row["num_edges"] == 0 for row in about)
    assert run.status == "completed"
    assert all(row["failures"] == [] for row in run.rounds)
    assert scores(run)["missing"]["num_nodes"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize("method", UNSEEN_METHODS)
def test_a_client_with_two_classes_left_trains(
    method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    y = [c for _ in range(8) for c in (0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2)]
    path = write_graph(tmp_path / "three.npz", cliques(8, 12), y)
    run = simulate(
        method, path, **shortened(method, of_file(settings)), setting="closed-set"
    )
    counts = [row["class_counts"] for row in run.clients if "class_counts" in row]
    assert [sum(n > 0 for n in row) for row in counts] == [2, 2, 2]
    assert run.status == "completed"
    assert all(row["failures"] == [] for row in run.rounds)


@pytest.mark.parametrize("method", METHODS)
def test_a_few_shot_run_selects_the_last_round_and_scores_test_nodes_twice(
    method: str, settings: dict[str, Any]
) -> None:
    run = simulate(method, **settings, setting="few-shot")
    assert run.summary["selection"] == "last"
    found = scores(run)
    assert found["val"]["num_nodes"] == 0
    assert found["test"]["num_nodes"] == found["test_masked"]["num_nodes"] > 0
    assert found["test_masked"]["accuracy"] >= found["test"]["accuracy"]


def test_masked_scores_ignore_classes_of_other_clients(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    # two clients, each with two classes of its own
    y = [c for c in range(4) for _ in range(40)]
    path = write_graph(tmp_path / "four.npz", cliques(4, 40), y)
    some = {**settings, "clients": 2, "setting": "few-shot"}
    run = simulate("fedavg", path, **of_file(some))
    mine = [row for row in run.clients if row["round"] == 2]
    for row in mine:
        metrics = row["metrics"]["local"]
        # a constant prediction of one of the two own classes is right for half of the nodes
        assert metrics["test_masked"]["accuracy"] >= metrics["test"]["accuracy"]
        assert metrics["test_masked"]["accuracy"] > 0.4


def test_clients_with_fewer_than_two_eligible_classes_are_logged_once(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    y = [0] * 40 + [1] * 120  # for every assignment of the four cliques to two clients
    path = write_graph(tmp_path / "uneven.npz", cliques(4, 40), y)
    some = {**settings, "clients": 2, "setting": "few-shot"}
    run = simulate("fedavg", path, **of_file(some))
    idle = [
        r["partition_id"] for r in run.clients if r["round"] == 0 and not r["trains"]
    ]
    assert len(idle) == 1
    assert caplog.text.count(f"Clients {idle} do not take part") == 1
    assert scores(run)["test"]["num_nodes"] == 30
    for row in run.rounds:
        assert row["failures"] == []
        assert row["replies"] == 1
    assert all(row["partition_id"] not in idle for row in run.clients if row["round"])
    both = simulate("fedavg", path, **of_file(some), evaluate="both")
    assert both.summary["global"]["best"]["test"]["num_nodes"] == 30


def test_disjoint_label_spaces_are_logged(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    y = [c for c in range(4) for _ in range(40)]
    path = write_graph(tmp_path / "four.npz", cliques(4, 40), y)
    some = {**settings, "clients": 2, "setting": "few-shot"}
    assert simulate("fedavg", path, **of_file(some)).status == "completed"
    assert "label spaces do not overlap" in caplog.text
    caplog.clear()
    simulate("fedavg", **settings, setting="few-shot")
    simulate("fedavg", **settings, setting="few-shot", min_class_count=4)  # > shots
    assert "label spaces" not in caplog.text


def test_no_eligible_client_at_all_ends_the_run(settings: dict[str, Any]) -> None:
    with pytest.raises(RunError, match="two classes with more than 25 nodes"):
        simulate("fedavg", **{**settings, "clients": 20}, setting="few-shot")


def test_more_parts_than_nodes_ends_the_run(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    path = write_graph(tmp_path / "tiny.npz", [(0, 1), (1, 2)], [0, 1, 0])
    with pytest.raises(
        FglError, match=r"clients \+ 1 = 4 METIS parts.*Use fewer clients"
    ):
        simulate("fedavg", path, **of_file(settings), setting="closed-set")


def test_the_partition_command_counts_the_nodes_of_every_score_column() -> None:
    words = ["partition", "--clients", "3", "--set", "setting=closed-set"]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    header, *rows = [line for line in done.output.splitlines() if line[0] in "┃│"]
    titles = [cell.strip() for cell in header.strip("┃").split("┃")]
    assert titles[2:8] == ["train", "val", "test", "unseen", "missing", "new client"]
    table = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    for row in table:
        assert int(row[1]) == sum(
            map(int, row[2:5])
        )  # unseen nodes belong to other clients
    sizes = sum(int(row[1]) for row in table)
    assert f"3 clients, {sizes:,} nodes" in done.output
