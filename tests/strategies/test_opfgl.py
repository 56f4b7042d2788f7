"""The round of O-pFGL: merging of statistics, bytes, lost clients, invalid uploads."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message

from flower_fgl import simulate
from flower_fgl.algorithms.opfgl.class_statistics import (
    ClassStatistics,
    class_statistics,
)
from flower_fgl.algorithms.opfgl.pseudo_graph import PseudoGraph
from flower_fgl.client_apps.dispatch import Dispatcher
from flower_fgl.client_apps.opfgl import OPFGLClientApp
from flower_fgl.core.errors import ConfigError, PayloadError, RunError
from flower_fgl.datasets.sources import load
from flower_fgl.methods import parse_config
from flower_fgl.protocols.base import read_tensors, write_tensors
from flower_fgl.protocols.describe import Description
from flower_fgl.protocols.opfgl import LocalStatistics, no_pseudo_graph
from flower_fgl.strategies import opfgl
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.federation import Federation
from flower_fgl.strategies.opfgl import OPFGL
from tests.support import raw_writers as raw

C, D, FEATURES = 3, 4, 2
MIXED = "gcn:2x16,gcn:3x8,sgc:2x4"


@pytest.fixture
def quick(small: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a run that takes a second."""
    own = {"rounds": 1, "local_epochs": 20, "check_every": 10, "min_replies": 2}
    own["min_class_count"] = 2  # the classes of this graph are small
    return {**small, **own, "opfgl": {"server_steps": 60}}


def server(**settings: Any) -> OPFGL:
    values = {f"opfgl.{k.replace('_', '-')}": v for k, v in settings.items()}
    config = parse_config({"method": "opfgl", "opfgl.server-steps": 60, **values})
    strategy = OPFGL(config)
    about = Description(0, 2, 9, 9, 4, 2, 2, FEATURES, ("a", "b", "c"), (), "gcn")
    strategy.federation = Federation({0: about, 1: about}, {0: 10, 1: 11})
    strategy.prepare()
    return strategy


@pytest.mark.parametrize("least", [5, 1])
def test_a_run_says_which_statistics_its_floor_withholds(
    least: int, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = server()
    strategy.config = replace(strategy.config, min_class_count=least)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        strategy.prepare()
    assert ("min-class-count = 5: clients withhold" in caplog.text) == (least == 5)


def upload(counts: list[int], level: float = 1.0) -> Upload:
    count = torch.tensor(counts)
    held = (count > 0)[:, None]
    mean = held * (torch.arange(C * D).view(C, D) * level)
    variance = held * torch.ones((C, D))
    return Upload(LocalStatistics(ClassStatistics(mean, variance, count, count)), 1.0)


SUMS = {
    "count": torch.tensor([6.0, 4.0, 0.0]),
    "labelled": torch.tensor([3.0, 1.0, 0.0]),
    "owners": torch.tensor([2.0, 1.0, 0.0]),
    "sum": torch.ones(C, D),
    "squares": 10 * torch.ones(C, D),
}


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("count", [1e9, 4.0, 0.0], "sums of count must be at least 0 and .* 18"),
        ("labelled", [-3.0, 1.0, 0.0], "sums of labelled"),
        ("labelled", [8.0, 1.0, 0.0], "sums of labelled .* 8"),
        ("labelled", [3.0, 5.0, 0.0], "more labelled nodes than nodes"),
        ("owners", [3.0, 1.0, 0.0], "0 to 2 owners"),
        ("squares", [10.0, -1.0, 0.0], "squares must not be negative"),
    ],
)
def test_sums_beyond_the_descriptions_are_refused(
    name: str, values: list[float], message: str
) -> None:
    weights = {0: 4.0, 1: 4.0}
    server().check_counts(SUMS, weights)
    with pytest.raises(PayloadError, match=message):
        server().check_counts({**SUMS, name: torch.tensor(values)}, weights)


def test_a_client_that_asks_for_too_many_pseudo_nodes_is_to_blame() -> None:
    strategy = server(node_share=0.5)
    uploads = {0: upload([3, 4, 0]), 1: upload([2 * opfgl.MOST_NODES, 4, 0])}
    with pytest.raises(PayloadError, match=r"set a smaller opfgl\.node-share"):
        strategy.aggregate(1, uploads)
    assert list(strategy.to_blame(uploads)) == [1]
    # one node per class, whatever the counts
    assert server().to_blame(uploads) == {}


def test_an_empty_range_of_distillation_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gamma-min = 0\.2 is above"):
        server(gamma_min=0.2)


def test_the_bytes_of_the_paper_on_cora() -> None:
    classes, width = 7, 2 * 1433
    count = torch.full((classes,), 5)
    zeros = torch.zeros(classes, width)
    made = LocalStatistics(ClassStatistics(zeros, zeros, count, count))
    # D = 2,866; a second count per class is ours
    assert made.num_bytes == 160_552 == 4 * classes * (2 * 2866 + 2)


def test_a_client_without_a_class_does_not_change_its_statistics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[ClassStatistics] = []
    nothing = no_pseudo_graph(FEATURES)

    def make_graph(strategy: OPFGL, statistics: ClassStatistics) -> PseudoGraph:
        seen.append(statistics)
        return nothing

    monkeypatch.setattr(OPFGL, "make_graph", make_graph)
    one, other = upload([3, 4, 0]), upload([0, 0, 5], level=7.0)
    server().aggregate(1, {0: one})
    server().aggregate(1, {0: one, 1: other})
    assert torch.equal(seen[0].mean[:2], seen[1].mean[:2])
    assert torch.equal(seen[0].variance[:2], seen[1].variance[:2])
    assert seen[1].count.tolist() == [3, 4, 5]


def test_one_node_per_class_by_default_and_a_share_of_the_labelled_with_node_share() -> (
    None
):
    strategy = server()
    strategy.aggregate(1, {0: upload([30, 4, 2])})
    assert strategy.pseudo.graph.labels.tolist() == [0, 1, 2]
    strategy = server(node_share=0.1)
    strategy.aggregate(1, {0: upload([30, 4, 2])})
    assert strategy.pseudo.graph.labels.tolist() == [0, 0, 0, 1, 2]


def test_a_class_without_upload_is_left_out_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = server()
    with caplog.at_level(logging.WARNING):
        strategy.aggregate(1, {0: upload([3, 0, 5]), 1: upload([2, 0, 0])})
    assert strategy.pseudo.graph.labels.tolist() == [0, 2]
    assert "statistics of b" in caplog.text


def test_a_single_class_gives_a_pseudo_graph_of_one_node() -> None:
    strategy = server()
    strategy.aggregate(1, {0: upload([0, 4, 0])})
    graph = strategy.pseudo.graph
    assert graph.labels.tolist() == [1]
    assert graph.adjacency.tolist() == [[0.0]]
    assert graph.features.isfinite().all()
    assert strategy.download(1, 0).num_bytes == 4 * (FEATURES + 1 + 1)


def test_the_run_fails_with_a_reason_if_no_class_was_uploaded() -> None:
    with pytest.raises(PayloadError, match="No client uploaded statistics of any"):
        server().aggregate(1, {0: upload([0, 0, 0])})


def test_links_may_be_hard_and_smoothness_inverted() -> None:
    graphs = []
    for settings in ({}, {"links": "hard"}, {"smoothness": "attract"}):
        strategy = server(smoothness_weight=5.0, **settings)
        strategy.aggregate(1, {0: upload([3, 4, 5])})
        graphs.append(strategy.pseudo.graph)
    assert set(graphs[1].adjacency.flatten().tolist()) <= {0.0, 1.0}
    assert not torch.equal(graphs[0].features, graphs[2].features)


def test_the_server_generates_on_the_chosen_device_and_sends_cpu_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    def generate(*tensors: torch.Tensor, **options: Any) -> Any:
        seen.extend(tensor.device.type for tensor in tensors)
        (out,) = [torch.zeros((1, FEATURES))]
        return PseudoGraph(out, torch.zeros(1).long(), torch.zeros((1, 1))), out

    monkeypatch.setattr(opfgl, "generate", generate)
    monkeypatch.setattr(opfgl, "server_device", lambda name: torch.device("meta"))
    strategy = server()
    strategy.aggregate(1, {0: upload([3, 4, 5])})
    assert seen == ["meta"] * 4
    assert strategy.pseudo.graph.features.device.type == "cpu"


def test_a_server_without_the_device_warns_and_uses_its_cpu(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert opfgl.server_device("cpu") == torch.device("cpu")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert opfgl.server_device("cuda:99") == torch.device("cpu")
    assert 'device = "cuda:99"' in caplog.text


@pytest.mark.thorough
def test_the_generator_logs_a_line_every_500_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = server(server_steps=700)
    with caplog.at_level(logging.INFO):
        strategy.aggregate(1, {0: upload([3, 4, 5])})
    lines = [r.getMessage() for r in caplog.records if "Pseudo-graph" in r.getMessage()]
    assert [line.split(",")[0] for line in lines] == [
        "Pseudo-graph: step 500 of 700",
        "Pseudo-graph: step 700 of 700",
    ]


def payload_bytes(run: Any) -> tuple[dict[str, int], dict[str, int]]:
    (row,) = run.rounds
    return row["bytes"]["up"], row["bytes"]["down"]


def test_the_bytes_match_the_formulas_for_any_width(
    quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D = 2 · 8 features; a client uploads the classes of which it has two nodes."""
    held: dict[int, int] = {}
    original = OPFGLClientApp.fit

    def fit(app: Any, client: Any, *rest: Any) -> Any:
        made = original(app, client, *rest)
        held[client.partition_id] = int((made.upload.statistics.count > 0).sum())
        assert made.upload.num_bytes == 4 * held[client.partition_id] * (2 * 16 + 2)
        return made

    monkeypatch.setattr(OPFGLClientApp, "fit", fit)
    runs = [simulate("opfgl", **{**quick, "hidden_channels": h}) for h in (64, 512)]
    up, down = payload_bytes(runs[0])
    assert (up["statistics"], down) == (
        payload_bytes(runs[1])[0]["statistics"],
        payload_bytes(runs[1])[1],
    )
    numbers = sum(4 * classes * (2 * 16 + 2) for classes in held.values())
    assert numbers < up["statistics"] < numbers + 3 * 4 * 300  # 4 arrays' headers each
    numbers = 3 * 4 * (3 * 8 + 3 + 3 * 3)
    assert numbers < down["pseudo-graph"] < numbers + 3 * 3 * 300
    assert set(up) == {"statistics", "metrics"}
    assert set(down) == {"pseudo-graph", "config"}
    for row in runs[0].clients:
        if row["round"] == 1:
            assert row["bytes"]["up"] > 4 * held[row["partition_id"]] * 34
            assert row["bytes"]["down"] > numbers / 3
            assert {"stage-1", "stage-2"} <= set(row["seconds"])


class Meddler:
    """Apply a function to the replies of client 1 to one action."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        how: Callable[[Message], None],
        action: str = "train",
    ) -> None:
        original = Dispatcher.__call__

        def call(app: Any, message: Message, context: Context) -> Message:
            reply = original(app, message, context)
            is_hit = context.node_config["partition-id"] == 1
            if is_hit and message.metadata.message_type == action:
                how(reply)
            return reply

        monkeypatch.setattr(Dispatcher, "__call__", call)


def dies(reply: Message) -> None:
    raise RuntimeError("gone away")


def replaced(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def change(reply: Message) -> None:
        tensors = read_tensors(reply.content, "statistics", is_checked=False)
        tensors |= {name: make(tensors[name]) for name, make in changes.items()}
        reply.content["statistics"] = write_tensors(tensors)

    return change


def wider(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[:, :8]], dim=1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (dies, "gone away"),
        (replaced(variance=lambda v: -v - 1), "at least 0"),
        (replaced(variance=lambda v: v * math.nan), "non-finite"),
        (replaced(mean=lambda m: m * math.inf), "non-finite"),
        (replaced(mean=wider, variance=wider), "16 wide, got 24"),  # h = 2
        (replaced(counts=lambda n: n * 0 + 1), "from 2 nodes on"),
    ],
)
def test_a_client_with_lost_or_invalid_statistics_is_reported_and_evaluated(
    monkeypatch: pytest.MonkeyPatch, quick: dict[str, Any], how: Any, reason: str
) -> None:
    Meddler(monkeypatch, how)
    run = simulate("opfgl", **quick)
    assert run.status == "completed"
    (row,) = run.rounds
    assert row["replies"] == 2
    (failure,) = row["failures"]
    assert failure["partition_id"] == 1
    assert reason in failure["reason"]
    scored = [r["partition_id"] for r in run.clients if "metrics" in r]
    assert scored == [0, 1, 2]


def test_a_client_lost_between_the_exchanges_is_reported_and_evaluated(
    monkeypatch: pytest.MonkeyPatch, quick: dict[str, Any]
) -> None:
    Meddler(monkeypatch, dies, "train.personalise")
    run = simulate("opfgl", **quick)
    (row,) = run.rounds
    assert row["replies"] == 2
    assert [f["partition_id"] for f in row["failures"]] == [1]
    assert [r["partition_id"] for r in run.clients if "metrics" in r] == [0, 1, 2]


def test_too_few_clients_after_the_upload_fail_the_round(
    monkeypatch: pytest.MonkeyPatch, quick: dict[str, Any]
) -> None:
    Meddler(monkeypatch, dies, "train.personalise")
    with pytest.raises(RunError, match=r"2 usable replies of 3.*gone away"):
        simulate("opfgl", **{**quick, "min_replies": 3})


def test_a_client_with_another_depth_is_dropped_and_the_run_continues(
    monkeypatch: pytest.MonkeyPatch, quick: dict[str, Any]
) -> None:
    """Client 1 uses h = 2, the others h = 1."""
    import flower_fgl.client_apps.opfgl as app

    original = app.local_statistics

    def deeper(client: Any) -> Any:
        if client.partition_id == 1:
            object.__setattr__(client.config.method_config, "depth", 2)
        try:
            return original(client)
        finally:
            object.__setattr__(client.config.method_config, "depth", 1)

    monkeypatch.setattr(app, "local_statistics", deeper)
    run = simulate("opfgl", **quick)
    (failure,) = run.rounds[0]["failures"]
    assert "16 wide, got 24. Check that all clients" in failure["reason"]


def test_clients_may_have_backbones_of_any_width(quick: dict[str, Any]) -> None:
    run = simulate("opfgl", **{**quick, "model": MIXED})
    models = {r["partition_id"]: r["model"] for r in run.clients if "model" in r}
    assert models == dict(enumerate(MIXED.split(",")))
    assert run.rounds[0]["replies"] == 3


def write_saint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a homophilic graph of 240 nodes and three classes in GraphSAINT's layout."""
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 3, 240)
    pairs = rng.integers(0, 240, (2400, 2))
    kept = labels[pairs[:, 0]] == labels[pairs[:, 1]]
    monkeypatch.setattr(raw, "NUM_NODES", 240)
    monkeypatch.setattr(raw, "LABELS", labels)
    monkeypatch.setattr(raw, "EDGES", pairs[kept & (pairs[:, 0] != pairs[:, 1])])
    monkeypatch.setattr(
        raw, "ROLES", {"tr": [*range(0, 240, 2)], "va": [1], "te": [*range(3, 240, 2)]}
    )
    raw.write_saint(folder / "Flickr" / "raw")
    monkeypatch.setattr(load, "_check_statistics", lambda *args: None)


@pytest.mark.parametrize("partition", ["louvain-label", "metis-label"])
def test_an_inductive_run_works_on_files_in_the_layout_of_flickr(
    quick: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    partition: str,
) -> None:
    """Statistics use training nodes only, and all clients are evaluated."""
    write_saint(tmp_path / "data", monkeypatch)
    counted: dict[int, tuple[int, int]] = {}
    original = OPFGLClientApp.fit

    def fit(app: Any, client: Any, *rest: Any) -> Any:
        made = original(app, client, *rest)
        inputs, training = client.data.inputs[0], client.data.training
        counted[client.partition_id] = (inputs.num_nodes, training.index.numel())
        own = torch.bincount(training.labels, minlength=3)
        assert made.upload.statistics.count.tolist() == (own * (own > 1)).tolist()
        return made

    monkeypatch.setattr(OPFGLClientApp, "fit", fit)
    settings = {k: v for k, v in quick.items() if k != "synthetic"}
    run = simulate(
        "opfgl",
        **{**settings, "dataset": "flickr", "data_dir": str(tmp_path / "data")},
        setting="inductive",
        partition=partition,
    )
    assert len(counted) == 3
    assert all(nodes == train for nodes, train in counted.values())
    assert run.rounds[0]["replies"] == 3
    assert run.best is not None
    assert run.best["test"]["num_nodes"] > 0


def test_clients_do_not_upload_classes_with_a_single_node(
    quick: dict[str, Any],
) -> None:
    """15 classes of 8 nodes, 20 % for training: clients have 0 or 1 of most classes."""
    synthetic = {"nodes": 120, "classes": 15, "features": 8, "blocks": 6}
    run = simulate("opfgl", **{**quick, "synthetic": synthetic, "split": "30/35/35"})
    assert run.status == "completed"
    assert run.rounds[0]["replies"] == 3


@pytest.mark.slow
def test_the_generator_fits_the_statistics_of_cora(
    real_data: Path, tmp_path: Path
) -> None:
    """L_align falls by 90 % within 3000 steps; one node per class gives no NaN."""
    from flower_fgl.algorithms.opfgl import pseudo_graph

    losses: list[torch.Tensor] = []
    original = pseudo_graph.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        graph, found = original(*args, **kwargs)
        losses.append(found)
        return graph, found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flower_fgl.strategies.opfgl.generate", generate)
        run = simulate(
            "opfgl",
            "cora",
            partition="louvain-label",
            local_epochs=100,
            data_dir=str(real_data),
            output_dir=str(tmp_path),
        )
    align = losses[0][:, 0]
    assert align.isfinite().all()
    assert align[-1] < 0.1 * align[0]
    # 40,440 bytes and the headers of three arrays for each of ten clients
    assert 404_400 < run.rounds[0]["bytes"]["down"]["pseudo-graph"] < 413_400


def test_two_nodes_are_not_reconstructed_from_their_statistics(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]
) -> None:
    """The mean and variance of two rows are these rows: m ± √(s²/2), exactly."""
    rows = torch.tensor([[1.0, -2.0], [3.0, 5.0]])
    stats = class_statistics(rows, torch.tensor([0, 0]), 1)
    half = (stats.variance[0] / 2).sqrt()
    found = torch.stack([stats.mean[0] - half, stats.mean[0] + half])
    torch.testing.assert_close(found, rows)
    # so the method's own default withholds classes below five labelled nodes
    assert parse_config({"method": "opfgl"}).min_class_count == 5
    assert parse_config({"method": "fedavg"}).min_class_count == 1
    seen: list[Any] = []
    original = OPFGL.aggregate

    def aggregate(self: OPFGL, server_round: int, uploads: Any) -> None:
        seen.extend(upload.payload.statistics for upload in uploads.values())
        original(self, server_round, uploads)

    monkeypatch.setattr(OPFGL, "aggregate", aggregate)
    synthetic = {**small["synthetic"], "nodes": 300}
    settings = {**small, "rounds": 1, "local_epochs": 10, "check_every": 5}
    own = {"server_steps": 20, "reliable_degree": 0, "reliable_confidence": 0.0}
    run = simulate("opfgl", **{**settings, "synthetic": synthetic}, opfgl=own)
    assert run.status == "completed"
    # every node is inferred here, but only labelled ones count
    assert any(int(s.count.sum()) > int(s.labelled_count.sum()) for s in seen)
    labelled = torch.stack([s.labelled_count for s in seen])
    assert int(labelled[labelled > 0].min()) >= 5


def test_inferred_nodes_do_not_lift_a_class_above_min_class_count() -> None:
    counts = torch.tensor([5, 4, 9])
    stats = replace(upload([9, 9, 9]).payload.statistics, labelled_count=counts)
    kept = LocalStatistics(stats).withhold(torch.ones(3, dtype=torch.bool), 5)
    assert kept.statistics.count.tolist() == [9, 0, 9]
    assert not kept.statistics.mean[1].any()
    assert not kept.statistics.variance[1].any()
