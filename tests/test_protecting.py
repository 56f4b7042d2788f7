"""What a client keeps to itself, clips and blurs before it uploads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flower_fgl import METHODS, Run, simulate
from flower_fgl.checking import check_graph
from flower_fgl.datasets.files import save_client_graph
from flower_fgl.errors import RunError
from tests.owners import owner_graphs
from tests.test_methods import shortened

OF_CLASSES = ("fedpg", "fedproto", "fedtgp", "opfgl")


def uploads_of(
    monkeypatch: pytest.MonkeyPatch, method: str, settings: dict[str, Any]
) -> tuple[Run, dict[int, Any]]:
    """Run, and return the counts of each client's first upload."""
    seen: dict[int, Any] = {}
    strategy = METHODS[method].load_strategy()
    original = strategy.aggregate

    def aggregate(self: Any, server_round: int, uploads: Any) -> None:
        for pid, upload in uploads.items():
            payload = upload.payload
            counts = getattr(payload, "counts", None)
            seen.setdefault(pid, payload.statistics.count if counts is None else counts)
        original(self, server_round, uploads)

    monkeypatch.setattr(strategy, "aggregate", aggregate)
    return simulate(method, **shortened(method, settings)), seen


@pytest.mark.parametrize("method", OF_CLASSES)
def test_a_class_of_few_training_nodes_is_told_to_nobody(
    method: str, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    full, _ = uploads_of(monkeypatch, method, small)
    counts = {c["partition_id"]: c["class_counts"] for c in full.clients[:3]}
    least = sorted(n for row in counts.values() for n in row)[4]
    run, seen = uploads_of(monkeypatch, method, {**small, "min_class_count": least})
    told = {c["partition_id"]: c["class_counts"] for c in run.clients[:3]}
    hidden = 0
    for pid, row in counts.items():
        assert told[pid] == [n if n >= least else 0 for n in row]
        for label, count in enumerate(row):
            entries = seen[pid][label]
            if count < least:
                hidden += 1
                assert int(entries.sum()) == 0
            else:
                assert int(entries.max()) >= count
                assert int(entries[entries > 0].min()) >= least
    assert 0 < hidden < 9


def test_opfgl_says_so_when_every_class_is_withheld(small: dict[str, Any]) -> None:
    with pytest.raises(RunError, match="statistics of any class"):
        simulate("opfgl", **shortened("opfgl", {**small, "min_class_count": 10**6}))


@pytest.mark.parametrize("method", ["fedpg", "fedproto", "fedtgp"])
def test_clients_that_withhold_every_class_train_alone(
    method: str, small: dict[str, Any]
) -> None:
    run = simulate(method, **small, min_class_count=10**6)
    assert run.status == "completed"
    assert all(row["bytes"]["up"]["prototypes"] < 1500 for row in run.rounds)


def test_check_graph_shows_the_counts_that_are_told(tmp_path: Path) -> None:
    graph = owner_graphs()[0]
    save_client_graph(tmp_path / "ash.npz", graph)
    counts = graph.class_counts("train").tolist()
    least = max(counts)
    report = check_graph(tmp_path / "ash.npz", {"min-class-count": least})
    assert report.description is not None
    told = [n if n == least else 0 for n in counts]
    assert list(report.description.class_counts) == told != counts
