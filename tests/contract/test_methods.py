"""The contract that every row of METHODS must keep."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message, RecordDict

from flower_fgl import METHODS, resume, simulate
from flower_fgl.client_app import DispatchingClientApp
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.state import MemoryStates
from flower_fgl.core.errors import ConfigError
from flower_fgl.methods import parse_config
from flower_fgl.protocols.base import read_scores
from flower_fgl.protocols.secure_aggregation.additive import AdditivePayload
from flower_fgl.simulation.local import run_config_of
from flower_fgl.simulation.local_grid import LocalGrid, task_identity
from flower_fgl.strategies.base import FglStrategy
from flower_fgl.strategies.rounds.describe_exchange import discover
from flower_fgl.strategies.rounds.messenger import Failure, send_receive
from flower_fgl.strategies.rounds.round_log import RoundLog
from tests.support.short_runs import SMALL, comparable, shortened, timeless
from tests.support.tiny_graphs import write_tiny

HEADER_BYTES = 300
"""Largest overhead per array of Flower and the .npy format: header and name."""

every_method = pytest.mark.parametrize("method", sorted(METHODS))
several_rounds = [name for name, row in METHODS.items() if not row.is_one_shot]


@dataclass
class Stage:
    """A method after the describe exchange, with its clients in this process."""

    strategy: FglStrategy
    grid: LocalGrid
    session: Session

    def replies(self, server_round: int) -> dict[int, Message]:
        """Run the training exchange of a round."""
        self.strategy.loop.log = RoundLog(server_round)
        sent = self.strategy.train_messages(
            server_round, self.strategy.federation.trainable
        )
        self.sent = messages = self.strategy.messenger.by_receiver(sent)
        return send_receive(self.grid, messages, timeout=60).replies

    def next_download(self) -> bytes:
        """Return the next download of client 0 as bytes."""
        return content_bytes(self.strategy.download(99, 0).to_record())


def content_bytes(content: RecordDict) -> bytes:
    return (
        b"".join(
            name.encode() + array.data
            for record in content.array_records.values()
            for name, array in record.items()
        )
        + repr(sorted((k, dict(v)) for k, v in content.config_records.items())).encode()
    )


@pytest.fixture
def settings() -> dict[str, Any]:
    """Additional settings of the stage; tests override them."""
    return {}


@pytest.fixture
def stage(method: str, settings: dict[str, Any]) -> Iterator[Stage]:
    values = run_config_of(
        method=method,
        dataset="synthetic",
        clients=3,
        seed=0,
        settings=shortened(method, {**SMALL, **settings}),
    )
    config = parse_config(values)
    session = Session(memory=MemoryStates())
    with task_identity(5):
        grid = LocalGrid(DispatchingClientApp(session), 3, values, run_id=5)
        strategy = METHODS[method].load_strategy()(config)
        strategy.messenger.grid = grid
        strategy.federation = discover(grid, config)
        strategy.prepare()
        yield Stage(strategy, grid, session)


@every_method
def test_rounds_run_and_give_scores(method: str, reference_run: Any) -> None:
    run = reference_run(method)
    assert run.status == "completed"
    trained = [row["round"] for row in run.rounds if row["phase"] == "train"]
    assert trained == [1, 2][: run.config["rounds"]]
    assert 0 <= run.best["test"]["accuracy"] <= 1
    assert run.summary["partition_sha256"]


@every_method
def test_a_method_classifies_graphs_or_rejects_them(
    method: str, small: dict[str, Any], tmp_path: Path
) -> None:
    write_tiny(tmp_path / "data")
    settings = {
        **{k: v for k, v in shortened(method, small).items() if k != "synthetic"},
        "dataset": "tu:TINY",
        "data_dir": str(tmp_path / "data"),
        "setting": "graph",
        "partition": "uniform",
        "model": "gin",
    }
    if not METHODS[method].graphs:
        with pytest.raises(ConfigError, match="classifies nodes only"):
            simulate(method, **settings)
        return
    first, second = (simulate(method, **settings, seed=4) for _ in range(2))
    assert first.summary["selection"] == "last"
    assert first.best["test"]["num_nodes"] == 6
    assert 0 <= first.best["test"]["auroc"] <= 1
    assert comparable(first) == comparable(second)


@every_method
def test_the_same_seed_gives_the_same_run(
    method: str, small: dict[str, Any], reference_run: Any
) -> None:
    small = shortened(method, small)
    first = reference_run(method)
    torch.manual_seed(2)
    second = simulate(method, **small, seed=4)
    assert comparable(first) == comparable(second)
    other = simulate(method, **small, seed=5)
    assert comparable(other) != comparable(first)


@pytest.mark.parametrize("method", several_rounds)
def test_a_resumed_run_equals_the_run_that_was_not_interrupted(
    method: str, small: dict[str, Any], tmp_path: Path
) -> None:
    # a client that is not sampled keeps its state of earlier rounds
    settings = {
        **shortened(method, small),
        "rounds": 5,
        "checkpoint_every": 2,
        "participation": 0.6,
    }
    whole = simulate(method, **settings)
    torch.manual_seed(3)

    def stop(row: Any) -> None:
        if (
            row["round"] == 4
        ):  # before its checkpoint, while states are already of round 4
            raise KeyboardInterrupt

    folder = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        simulate(method, **settings, run_dir=str(folder), on_round=stop)
    rounds: list[int] = []
    resumed = resume(folder, on_round=lambda row: rounds.append(row["round"]))
    assert rounds == [3, 4, 5]
    assert comparable(resumed) == comparable(whole)
    assert timeless(resumed.summary) == timeless(whole.summary)
    models = [sorted(run.path.glob("model.*")) for run in (resumed, whole)]
    one, other = ([path.read_bytes() for path in paths] for paths in models)
    assert one == other
    assert not (folder / "checkpoint").exists()


@every_method
def test_payloads_round_trip_bit_for_bit_and_have_the_stated_size(
    method: str, stage: Stage
) -> None:
    replies = stage.replies(1)
    strategy = stage.strategy
    for pid, reply in replies.items():
        payload = strategy.up.from_record(reply.content, strategy.upload_spec(pid))
        sent = RecordDict({n: reply.content[n] for n in strategy.up.records})
        check_size(payload, sent)
        assert content_bytes(payload.to_record()) == content_bytes(sent)
    for pid, message in stage.sent.items():
        payload = strategy.download(1, pid)
        names = [n for n in message.content if n in strategy.down.records]
        sent = RecordDict({n: message.content[n] for n in names})
        check_size(payload, sent)
        assert content_bytes(payload.to_record()) == content_bytes(sent)


def check_size(payload: Any, sent: RecordDict) -> None:
    arrays = sum(len(record) for record in sent.array_records.values())
    counted = sum(record.count_bytes() for record in sent.values())
    assert payload.num_bytes <= counted <= payload.num_bytes + HEADER_BYTES * arrays


@every_method
def test_only_payloads_and_metrics_cross_the_wire(method: str, stage: Stage) -> None:
    strategy = stage.strategy
    for reply in stage.replies(1).values():
        assert set(reply.content) <= {*strategy.up.records, "metrics"}
    for message in stage.sent.values():
        assert set(message.content) <= {*strategy.down.records, "config"}


@every_method
def test_aggregation_ignores_the_order_of_the_replies(
    method: str, stage: Stage
) -> None:
    replies = list(stage.replies(1).values())
    del stage.strategy.messenger.grid
    reverse = copy.deepcopy(stage.strategy)
    stage.strategy.aggregate_train(1, replies)
    reverse.aggregate_train(1, replies[::-1])
    before = stage.next_download()
    stage.strategy = reverse
    assert stage.next_download() == before


@every_method
def test_one_usable_reply_suffices(method: str, stage: Stage) -> None:
    replies = stage.replies(1)
    _, metrics = stage.strategy.aggregate_train(1, [replies[0]])
    assert metrics is not None
    assert metrics["num-replies"] == 1


@every_method
def test_no_reply_keeps_the_state(method: str, stage: Stage) -> None:
    before = stage.next_download()
    stage.strategy.loop.log = RoundLog(1)
    assert stage.strategy.aggregate_train(1, []) == (None, None)
    assert stage.next_download() == before


@every_method
def test_evaluation_changes_neither_weights_nor_generators(
    method: str, stage: Stage
) -> None:
    stage.strategy.read_uploads(stage.replies(1))
    state = torch.get_rng_state()
    stage.strategy.loop.log = RoundLog(1)
    seen = []
    for _ in range(2):
        asked = stage.strategy.evaluate_messages(1, is_local=True, is_global=False)
        messages = stage.strategy.messenger.by_receiver(asked)
        exchange = send_receive(stage.grid, messages, timeout=60)
        assert exchange.failures == []
        seen.append(
            [
                read_scores(reply.content.metric_records["metrics"])
                for reply in exchange.replies.values()
            ]
        )
        forget_evaluation(stage.session)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 3
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("settings", [{"eval_policy": "refresh-all"}])
@pytest.mark.parametrize("method", several_rounds)
def test_scoring_a_refreshed_model_changes_nothing(method: str, stage: Stage) -> None:
    stage.strategy.read_uploads(stage.replies(1))
    generator = torch.get_rng_state()
    states = stored(stage.session)
    seen = []
    for _ in range(2):
        stage.strategy.loop.log = RoundLog(1)
        stage.strategy.evaluate_round(1)
        assert stage.strategy.loop.log.failures == []
        seen.append(stage.strategy.loop.log.pooled()["local"])
        forget_evaluation(stage.session)
    assert json.dumps(seen[0]) == json.dumps(seen[1])
    assert stored(stage.session) == states
    assert torch.equal(torch.get_rng_state(), generator)


def forget_evaluation(session: Session) -> None:
    """Let the clients answer the evaluation of this round again; they do so only once."""
    assert session.memory is not None
    for state in session.memory._states.values():
        del state.values["answered/evaluate"]


def stored(session: Session) -> dict[Any, Any]:
    """Return the states of all clients in a comparable form."""
    assert session.memory is not None
    return {
        key: (
            {name: tensor.tolist() for name, tensor in state.tensors.items()},
            dict(state.values),
        )
        for key, state in session.memory._states.items()
    }


@every_method
def test_the_reason_of_a_failed_round_counts_each_client_once(
    method: str, stage: Stage
) -> None:
    log = RoundLog(1)
    log.failures += [Failure(2, "gone"), Failure(2, "gone"), Failure(0, "gone")]
    log.close(is_ok=False, min_replies=1)
    assert "gone (2 clients)" in log.why_failed()


@every_method
def test_a_row_of_methods_names_existing_classes(method: str) -> None:
    row = METHODS[method]
    assert issubclass(row.load_strategy(), FglStrategy)
    client_app = row.load_client_app()
    assert client_app.down is row.load_strategy().down
    assert client_app.up is row.load_strategy().up
    assert row.paper
    assert row.payload
    up = row.load_strategy().up
    assert row.uploads == bool(up.records)
    assert not row.additive or issubclass(up, AdditivePayload)
