"""Withheld classes, clipping and noise of a client's uploads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from flower_fgl import METHODS, Run, resume, simulate
from flower_fgl.cli.check_graph import inspect_graph
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.datasets.graph_files.graph_file import save_client_graph
from flower_fgl.protocols.differential_privacy import (
    epsilon,
    numbers_of,
    origin_of,
)
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.prototypes import Prototypes
from flower_fgl.strategies.rounds.messenger import Messenger
from tests.support.owners import owner_graphs
from tests.support.short_runs import comparable, shortened

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


@pytest.mark.thorough
@pytest.mark.parametrize("method", OF_CLASSES)
def test_classes_below_min_class_count_are_withheld(
    method: str, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    full, _ = uploads_of(monkeypatch, method, small)
    counts = {c["partition_id"]: c["class_counts"] for c in full.clients[:3]}
    least = sorted(n for row in counts.values() for n in row)[4]
    run, seen = uploads_of(monkeypatch, method, {**small, "min_class_count": least})
    reported = {c["partition_id"]: c["class_counts"] for c in run.clients[:3]}
    hidden = 0
    for pid, row in counts.items():
        assert reported[pid] == [n if n >= least else 0 for n in row]
        for label, count in enumerate(row):
            entries = seen[pid][label]
            if count < least:
                hidden += 1
                assert int(entries.sum()) == 0
            else:
                assert int(entries.max()) >= count
                assert int(entries[entries > 0].min()) >= least
    assert 0 < hidden < 9


def test_opfgl_fails_if_every_class_is_withheld(small: dict[str, Any]) -> None:
    with pytest.raises(RunError, match="statistics of any class"):
        simulate("opfgl", **shortened("opfgl", {**small, "min_class_count": 10**6}))


@pytest.mark.parametrize("method", ["fedpg", "fedproto", "fedtgp"])
def test_clients_that_withhold_every_class_still_train(
    method: str, small: dict[str, Any]
) -> None:
    run = simulate(method, **small, min_class_count=10**6)
    assert run.status == "completed"
    assert all(row["bytes"]["up"]["prototypes"] < 1500 for row in run.rounds)


def test_check_graph_shows_the_reported_class_counts(tmp_path: Path) -> None:
    graph = owner_graphs()[0]
    save_client_graph(tmp_path / "ash.npz", graph)
    counts = graph.class_counts("train").tolist()
    least = max(counts) + 1
    report = inspect_graph(tmp_path / "ash.npz", {"min-class-count": least})
    assert report.description is not None
    assert report.description.class_counts == (0, 0, 0)


def test_noise_needs_a_clipping_norm(small: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="upload-clip"):
        simulate("fedavg", **small, upload_noise=1.0)


def test_a_method_without_uploads_rejects_upload_clip(small: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="local has no uploads"):
        simulate("local", **small, upload_clip=1.0)


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        (0.0, "no noise, so there is no ε."),
        (2.0, "uploads (2), against readers of single uploads."),
    ],
)
def test_the_log_says_how_private_uploads_were(
    noise: float, said: str, small: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    small |= {"rounds": 2, "upload_clip": 1.0, "upload_noise": noise}
    with caplog.at_level("INFO", logger="flower_fgl"):
        simulate("fedavg", **small)
    start = "Privacy of the uploads: clipped to an L2 norm of 1, "
    (text,) = [text for text in caplog.messages if text.startswith(start)]
    assert text.endswith(said)


@pytest.mark.thorough
@pytest.mark.parametrize("method", sorted(set(METHODS) - {"local"}))
def test_every_upload_is_noised_and_the_summary_reports_epsilon(
    method: str, small: dict[str, Any]
) -> None:
    small = shortened(method, small)
    privacy = {"upload_clip": 0.5, "upload_noise": 2.0, "upload_delta": 1e-4}
    first = simulate(method, **small, **privacy)
    reported = first.summary["upload_privacy"]
    # before round 1, FedLoG uploads prompt generators, FedSage+ generators and gradients,
    # and FedGCN sums of features
    uploads = small["rounds"] + {"fedgcn": 1, "fedlog": 1, "fedsage+": 2}.get(method, 0)
    assert reported["uploads"] == uploads
    assert reported["epsilon"] == epsilon(2.0, uploads, 1e-4)
    assert (reported["clip"], reported["noise"], reported["delta"]) == (0.5, 2.0, 1e-4)
    # The noise does not depend on the seed of the run. The scores of a few nodes may be
    # equal by chance.
    again = (simulate(method, **small, **privacy) for _ in range(4))
    assert any(comparable(run) != comparable(first) for run in again)
    assert sum(first.summary["failures"].values()) == 0


def test_fedsageplus_generators_and_gradients_are_clipped(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, list[float]] = {}
    original = Messenger.query

    def query(*args: Any, brings_upload: bool = False, **named: Any) -> Any:
        sent = original(*args, brings_upload=brings_upload, **named)
        for upload in sent.values() if brings_upload else ():
            squares = [float(t.square().sum()) for t in numbers_of(upload).values()]
            found.setdefault(type(upload).__name__, []).append(sum(squares) ** 0.5)
        return sent

    monkeypatch.setattr(Messenger, "query", query)
    simulate("fedsage+", **shortened("fedsage+", small), upload_clip=0.01)
    assert set(found) == {"GeneratorState", "FeatureGradient"}
    lengths = [length for each in found.values() for length in each]
    assert max(lengths) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("method", sorted(set(METHODS) - {"local"}))
def test_no_upload_exceeds_the_clipping_norm(
    method: str, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[float] = []
    strategy = METHODS[method].load_strategy()
    original = strategy.aggregate

    def aggregate(self: Any, server_round: int, uploads: Any) -> None:
        for pid, upload in uploads.items():
            known = self.download(server_round, pid)
            sent = numbers_of(upload.payload)
            pairs = zip(sent.values(), origin_of(sent, numbers_of(known)), strict=True)
            lengths.append(sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5)
        original(self, server_round, uploads)

    monkeypatch.setattr(strategy, "aggregate", aggregate)
    run = simulate(method, **shortened(method, {**small, "upload_clip": 0.01}))
    assert run.summary["upload_privacy"] == {"clip": 0.01, "noise": 0.0}
    assert sum(run.summary["failures"].values()) == 0
    assert lengths
    assert max(lengths) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("method", ["fedavg", "opfgl"])
def test_noised_uploads_work_with_secure_aggregation(
    method: str, small: dict[str, Any]
) -> None:
    settings = shortened(method, {**small, "secure_aggregation": True})
    run = simulate(method, **settings, upload_clip=1.0, upload_noise=0.5)
    assert run.status == "completed"
    assert run.summary["upload_privacy"]["uploads"] == settings["rounds"]


def test_epsilon_counts_the_uploads_that_a_resumed_run_repeats(
    small: dict[str, Any], tmp_path: Path
) -> None:
    def stop(row: Any) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    settings = {**small, "rounds": 4, "checkpoint_every": 2, "upload_clip": 1.0}
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        simulate(**settings, upload_noise=1.0, run_dir=str(folder), on_round=stop)
    assert resume(folder).summary["upload_privacy"]["uploads"] == 5


def test_weights_are_clipped_around_the_download_and_tables_around_zero() -> None:
    ones = torch.ones
    sent = {"/tensors/w": ones(2), "/tensors/b": ones(1), "/values": ones(3)}
    known = {"/tensors/w": 5 * ones(2), "/tensors/b": ones(4), "/values": ones(3)}
    start = [t.tolist() for t in origin_of(sent, known)]
    assert start == [[5, 5], [0], [0, 0, 0]]


def test_nested_payloads_withhold_rare_classes() -> None:
    @dataclass(frozen=True)
    class Pair(Weights):
        prototypes: Prototypes

    table = Prototypes(torch.ones(3, 1, 2), torch.ones(3, 1, dtype=torch.bool))
    rest = Pair({}, table).withhold(torch.tensor([True, False, True]), 5)
    assert rest.prototypes.present[:, 0].tolist() == [True, False, True]
    assert rest.prototypes.values[1].tolist() == [[0, 0]]
