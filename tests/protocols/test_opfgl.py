"""O-pFGL's payloads: content, number of bytes, rejected content."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.algorithms.opfgl.class_statistics import ClassStatistics
from flower_fgl.algorithms.opfgl.pseudo_graph import PseudoGraph
from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import read_tensors, write_tensors
from flower_fgl.protocols.opfgl import (
    GraphDownload,
    LocalStatistics,
    StatisticsSpec,
    no_pseudo_graph,
)

CLASSES, WIDTH = 10, 6
SPEC = StatisticsSpec(CLASSES, WIDTH, num_nodes=11, num_train=7)


@pytest.fixture
def statistics() -> ClassStatistics:
    """Classes 1 and 8 of ten."""
    count = torch.zeros(CLASSES, dtype=torch.int64)
    count[1], count[8] = 2, 9
    labelled = count.clone()
    labelled[8] = 5
    held = (count > 0)[:, None]
    mean = torch.arange(CLASSES * WIDTH).view(CLASSES, WIDTH) * held * 0.5
    return ClassStatistics(mean, mean.square(), count, labelled)


def test_statistics_come_back_and_only_classes_present_are_sent(
    statistics: ClassStatistics,
) -> None:
    payload = LocalStatistics(statistics)
    content = payload.to_record()
    sent = content.array_records["statistics"]
    assert sent["mean"].shape == (2, WIDTH)
    back = LocalStatistics.from_record(content, SPEC).statistics
    for name in ("mean", "variance", "count", "labelled_count"):
        assert torch.equal(getattr(back, name), getattr(statistics, name)), name
    # mean and variance of two classes, two counts each
    assert payload.num_bytes == 4 * 2 * (2 * WIDTH + 2)


def test_a_client_with_no_class_to_upload_sends_nothing_but_that() -> None:
    zero = torch.zeros(CLASSES, dtype=torch.int64)
    empty = torch.zeros((CLASSES, WIDTH))
    payload = LocalStatistics(ClassStatistics(empty, empty, zero, zero))
    assert payload.num_bytes == 0
    back = LocalStatistics.from_record(payload.to_record(), SPEC)
    assert not back.statistics.count.any()


def with_tensors(record: str, content: RecordDict, **changes: Tensor) -> RecordDict:
    tensors = read_tensors(content, record, is_checked=False)
    return RecordDict({record: write_tensors(tensors | changes)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"variance": torch.full((2, WIDTH), -1.0)},
            "at least 0, got -1",
        ),
        ({"variance": torch.full((2, WIDTH), math.nan)}, "non-finite"),
        ({"mean": torch.full((2, WIDTH), math.inf)}, "non-finite"),
        ({"mean": torch.ones((2, WIDTH + 1))}, "6 wide, got 7.*opfgl.depth"),
        ({"mean": torch.ones((3, WIDTH))}, r"\(2, 6\), got \(3, 6\)"),
        ({"mean": torch.ones((2, WIDTH)).double()}, "float64"),
        ({"counts": torch.tensor([[1, 1], [9, 5]]).int()}, "from 2 nodes on, got 1"),
        ({"counts": torch.tensor([[2, 3], [9, 5]]).int()}, "Labelled nodes"),
        ({"counts": torch.tensor([[2, 2], [9, 5]])}, "int32"),
        (
            {"counts": torch.tensor([[2, 2], [10, 5]]).int()},
            "12 nodes, .* described 11",
        ),
        ({"counts": torch.tensor([[2, 2], [9, 6]]).int()}, "8 labelled .* described 7"),
        ({"present": torch.tensor([255, 255]).byte()}, "beyond the 10 agreed on"),
        ({"present": torch.tensor([64]).byte()}, "shape"),
        ({"more": torch.ones(1)}, "exactly the entries"),
    ],
)
def test_statistics_that_cannot_be_are_refused(
    statistics: ClassStatistics, change: dict[str, Tensor], words: str
) -> None:
    content = LocalStatistics(statistics).to_record()
    bad = with_tensors("statistics", content, **change)
    with pytest.raises(PayloadError, match=words):
        LocalStatistics.from_record(bad, SPEC)


@pytest.fixture
def graph() -> PseudoGraph:
    links = torch.tensor([[0.0, 0.5, 0.0], [0.5, 0.0, 0.25], [0.0, 0.25, 0.0]])
    labels = torch.tensor([0, 4, 9])
    return PseudoGraph(torch.arange(12.0).view(3, 4), labels, links)


def test_a_pseudo_graph_comes_back_and_has_the_stated_size(graph: PseudoGraph) -> None:
    payload = GraphDownload(graph)
    back = GraphDownload.from_record(payload.to_record(), (CLASSES, 4)).graph
    for name in ("features", "labels", "adjacency"):
        assert torch.equal(getattr(back, name), getattr(graph, name)), name
    assert payload.num_bytes == 4 * (3 * 4 + 3 + 3 * 3)


def test_a_pseudo_graph_of_one_node_comes_back() -> None:
    one = PseudoGraph(torch.ones((1, 4)), torch.tensor([2]), torch.zeros((1, 1)))
    back = GraphDownload.from_record(GraphDownload(one).to_record(), (CLASSES, 4))
    assert back.num_bytes == 4 * (4 + 1 + 1)


def test_before_there_is_a_pseudo_graph_nothing_is_sent() -> None:
    payload = GraphDownload(no_pseudo_graph(4))
    assert len(payload.to_record()) == 0
    assert payload.num_bytes == 0
    back = GraphDownload.from_record(RecordDict(), (CLASSES, 4))
    assert back.graph.features.shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda g: replace(g, labels=torch.tensor([0, 4, 10])), "0 to 9, got 0 to 10"),
        (lambda g: replace(g, labels=torch.tensor([-1, 4, 9])), "got -1"),
        (lambda g: replace(g, features=g.features[:, :3]), r"\(3, 4\), got \(3, 3\)"),
        (lambda g: replace(g, features=g.features * math.nan), "non-finite"),
        (lambda g: replace(g, adjacency=g.adjacency.triu()), "symmetric"),
        (lambda g: replace(g, adjacency=g.adjacency + torch.eye(3)), "zero diagonal"),
        (lambda g: replace(g, adjacency=g.adjacency * 4), r"in \[0, 1\]"),
        (lambda g: replace(g, adjacency=-g.adjacency), r"in \[0, 1\]"),
        (lambda g: replace(g, adjacency=g.adjacency[:2]), "shape"),
    ],
)
def test_a_pseudo_graph_that_cannot_be_is_refused(
    graph: PseudoGraph, change: Callable[[PseudoGraph], PseudoGraph], words: str
) -> None:
    content = GraphDownload(change(graph)).to_record()
    with pytest.raises(PayloadError, match=words):
        GraphDownload.from_record(content, (CLASSES, 4))


def test_an_array_too_few_is_refused(graph: PseudoGraph) -> None:
    content = GraphDownload(graph).to_record()
    del content.array_records["pseudo-graph"]["labels"]
    with pytest.raises(PayloadError, match="exactly the entries"):
        GraphDownload.from_record(content, (CLASSES, 4))
