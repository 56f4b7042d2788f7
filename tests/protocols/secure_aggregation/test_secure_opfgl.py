"""Secure aggregation of O-pFGL's statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import Context, Message

from flower_fgl import Run, simulate
from flower_fgl.algorithms.opfgl.class_statistics import ClassStatistics
from flower_fgl.algorithms.opfgl.pseudo_graph import PseudoGraph
from flower_fgl.client_apps.dispatch import Dispatcher
from flower_fgl.strategies.opfgl import OPFGL


@pytest.fixture
def quick(small: dict[str, Any]) -> dict[str, Any]:
    own = {"rounds": 1, "clients": 5, "local_epochs": 20, "check_every": 10}
    own["min_class_count"] = 2  # the classes of this graph are small
    return {**small, **own, "min_replies": 2, "opfgl": {"server_steps": 20}}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[ClassStatistics]:
    """Pooled statistics from which the server made a pseudo-graph."""
    kept: list[ClassStatistics] = []
    original = OPFGL.make_graph

    def make_graph(self: OPFGL, statistics: ClassStatistics) -> PseudoGraph:
        kept.append(statistics)
        return original(self, statistics)

    monkeypatch.setattr(OPFGL, "make_graph", make_graph)
    return kept


def secure(settings: dict[str, Any]) -> Run:
    return simulate("opfgl", **settings, secure_aggregation=True)


def accuracy(run: Run) -> float:
    return float(run.rounds[0]["metrics"]["local"]["test"]["accuracy"])


def test_pooled_statistics_are_those_of_the_plain_run(
    quick: dict[str, Any], seen: list[ClassStatistics]
) -> None:
    plain, run = simulate("opfgl", **quick), secure(quick)
    one, other = seen
    torch.testing.assert_close(other.mean, one.mean, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(other.variance, one.variance, atol=1e-6, rtol=1e-5)
    assert torch.equal(other.count, one.count)
    assert torch.equal(other.labelled_count, one.labelled_count)
    assert run.rounds[0]["failures"] == plain.rounds[0]["failures"] == []
    assert abs(accuracy(run) - accuracy(plain)) < 0.02


def test_a_client_lost_after_the_shares_is_in_no_sum_and_is_scored(
    quick: dict[str, Any], seen: list[ClassStatistics], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Dispatcher.__call__

    def call(app: Any, message: Message, context: Context) -> Message:
        if (
            message.metadata.message_type == "train"
            and context.node_config["partition-id"] == 3
        ):
            raise RuntimeError("gone")
        return original(app, message, context)

    whole_run = simulate("opfgl", **quick)
    monkeypatch.setattr(Dispatcher, "__call__", call)
    run = secure(quick)
    whole, rest = seen
    assert 0 < int(rest.count.sum()) < int(whole.count.sum())
    (failure,) = run.rounds[0]["failures"]
    assert failure["partition_id"] == 3
    scored = run.rounds[0]["metrics"]["local"]["test"]["num_nodes"]
    assert scored == whole_run.rounds[0]["metrics"]["local"]["test"]["num_nodes"]


def test_nothing_but_masked_sums_goes_up(
    quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = []
    original = Dispatcher.__call__

    def call(app: Any, message: Message, context: Context) -> Message:
        reply = original(app, message, context)
        if message.metadata.message_type == "train":
            uploads.append(reply.content)
        return reply

    monkeypatch.setattr(Dispatcher, "__call__", call)
    run = secure(quick)
    classes, width = 3, 2 * 8
    assert len(uploads) == 5
    for content in uploads:
        (name,) = content.array_records
        (array,) = content.array_records[name].values()
        assert name.startswith("secure-")
        # one more entry, by which the server detects masks that do not cancel
        assert array.numpy().size == 1 + classes * (2 * width + 3)
    assert run.rounds[0]["metrics"]
