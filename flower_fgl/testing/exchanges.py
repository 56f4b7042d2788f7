"""Contract of a method's payloads, aggregation, evaluation and malformed messages."""

import copy
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from flower_fgl.client_app import DispatchingClientApp
from flower_fgl.client_apps.base import FglClientApp
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.state import MemoryStates
from flower_fgl.methods import parse_config
from flower_fgl.protocols.base import read_metrics, write_tensors
from flower_fgl.protocols.differential_privacy import numbers_of
from flower_fgl.protocols.secure_aggregation.additive import AdditivePayload
from flower_fgl.simulation.local import run_config_of
from flower_fgl.simulation.local_grid import LocalGrid, task_identity
from flower_fgl.strategies.base import FglStrategy
from flower_fgl.strategies.rounds.discovery import discover
from flower_fgl.strategies.rounds.messenger import send_receive
from flower_fgl.strategies.rounds.round_log import RoundLog
from flower_fgl.testing.case import Contract, MethodCase, applies_to

__all__ = ["PICKLES", "ExchangeContract", "Stage", "StageContract", "WireContract"]
__all__ += ["content_bytes", "garbage"]


@dataclass
class Stage:
    """A method after the describe exchange, with three clients in this process.

    ``session`` has the state of the clients, ``sent`` the messages of the last exchange
    by partition-id.
    """

    strategy: FglStrategy
    grid: LocalGrid
    session: Session
    sent: Mapping[int, Message] = field(default_factory=dict)

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

    def forget_evaluation(self) -> None:
        """Let the clients answer the evaluation of this round again."""
        assert self.session.memory is not None
        for state in self.session.memory._states.values():
            del state.values["answered/evaluate"]

    def stored(self) -> dict[Any, Any]:
        """Return the states of all clients in a comparable form."""
        assert self.session.memory is not None
        return {
            key: (
                {name: tensor.tolist() for name, tensor in state.tensors.items()},
                dict(state.values),
            )
            for key, state in self.session.memory._states.items()
        }


def content_bytes(content: RecordDict) -> bytes:
    """Return the names and bytes of all arrays of a message, and its config."""
    return (
        b"".join(
            name.encode() + array.data
            for record in content.array_records.values()
            for name, array in record.items()
        )
        + repr(sorted((k, dict(v)) for k, v in content.config_records.items())).encode()
    )


class StageContract(Contract):
    """Base of the tests that look at single exchanges of a method."""

    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        """Additional settings of the stage; a test may override them."""
        return {}

    @pytest.fixture
    def stage(self, case: MethodCase, settings: dict[str, Any]) -> Iterator[Stage]:
        """Prepare the server half; three clients are described."""
        values = case.settings(**settings)
        config = run_config_of(
            method=values.pop("method"),
            dataset="synthetic",
            clients=values.pop("clients"),
            seed=0,
            settings=values,
        )
        parsed = parse_config(config)
        session = Session(memory=MemoryStates())
        with task_identity(5):
            grid = LocalGrid(DispatchingClientApp(session), 3, config, run_id=5)
            strategy = case.row.load_strategy()(parsed)
            strategy.messenger.grid = grid
            strategy.federation = discover(grid, parsed)
            strategy.prepare()
            yield Stage(strategy, grid, session)


HEADER_BYTES = 300
"""Largest overhead per array of Flower and the .npy format: header and name."""

has_rounds = applies_to(
    lambda case: not case.row.is_one_shot, "the method has one round only"
)


class ExchangeContract(StageContract):
    """Payloads, aggregation and evaluation of a method, one exchange at a time."""

    def test_the_row_names_existing_classes(self, case: MethodCase) -> None:
        row = case.row
        strategy, client_app = row.load_strategy(), row.load_client_app()
        assert issubclass(strategy, FglStrategy)
        assert issubclass(client_app, FglClientApp)
        assert client_app.down is strategy.down, "both halves need the same down"
        assert client_app.up is strategy.up, "both halves need the same up"
        assert row.paper, "name the paper in the row"
        assert row.payload, "state the bytes per round and client in the row"
        assert row.uploads == bool(strategy.up.records)
        assert not row.additive or issubclass(strategy.up, AdditivePayload)

    def test_payloads_round_trip_bit_for_bit_and_have_the_stated_size(
        self, case: MethodCase, stage: Stage
    ) -> None:
        replies = stage.replies(1)
        strategy = stage.strategy
        for pid, reply in replies.items():
            payload = strategy.up.from_record(reply.content, strategy.upload_spec(pid))
            sent = RecordDict({n: reply.content[n] for n in strategy.up.records})
            _check_size(payload, sent)
            assert content_bytes(payload.to_record()) == content_bytes(sent)
        for pid, message in stage.sent.items():
            payload = strategy.download(1, pid)
            names = [n for n in message.content if n in strategy.down.records]
            sent = RecordDict({n: message.content[n] for n in names})
            _check_size(payload, sent)
            assert content_bytes(payload.to_record()) == content_bytes(sent)

    def test_only_payloads_and_metrics_cross_the_wire(
        self, case: MethodCase, stage: Stage
    ) -> None:
        strategy = stage.strategy
        for pid, reply in stage.replies(1).items():
            assert set(reply.content) <= {*strategy.up.records, "metrics"}
            payload = strategy.up.from_record(reply.content, strategy.upload_spec(pid))
            sent = {
                x for t in numbers_of(payload).values() for x in t.flatten().tolist()
            }
            for name, value in reply.content.metric_records["metrics"].items():
                if name.startswith("terms/") and not float(value).is_integer():  # type: ignore[arg-type]
                    rounded = torch.tensor(value, dtype=torch.float32).item()
                    assert rounded not in sent, (
                        f"{name} is sent without the upload's noise"
                    )
        for message in stage.sent.values():
            assert set(message.content) <= {*strategy.down.records, "config"}

    def test_aggregation_ignores_the_order_of_the_replies(
        self, case: MethodCase, stage: Stage
    ) -> None:
        replies = list(stage.replies(1).values())
        del stage.strategy.messenger.grid
        reverse = copy.deepcopy(stage.strategy)
        stage.strategy.aggregate_train(1, replies)
        reverse.aggregate_train(1, replies[::-1])
        before = stage.next_download()
        stage.strategy = reverse
        assert stage.next_download() == before

    def test_a_failed_aggregation_changes_nothing(
        self, case: MethodCase, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replies = list(stage.replies(1).values())
        del stage.strategy.messenger.grid
        strategy, spared = stage.strategy, copy.deepcopy(stage.strategy)
        aggregate = strategy.aggregate

        def fail(*arguments: Any) -> None:
            aggregate(*arguments)
            raise RuntimeError("after the aggregation")

        for server_round in (1, 2):
            before = stage.next_download()
            with monkeypatch.context() as context:
                context.setattr(strategy, "aggregate", fail)
                failed = strategy.aggregate_train(server_round, replies)
            assert failed == (None, None)
            assert stage.next_download() == before
            strategy.loop.log = RoundLog(server_round)
            _, metrics = strategy.aggregate_train(server_round, replies)
            # some methods accept the uploads of a round only in that round
            assert metrics is not None or server_round > 1
            spared.loop.log = RoundLog(server_round)
            assert spared.aggregate_train(server_round, replies)[1] == metrics
            after = stage.next_download()
            stage.strategy = spared
            assert stage.next_download() == after
            stage.strategy = strategy

    def test_one_usable_reply_suffices(self, case: MethodCase, stage: Stage) -> None:
        replies = stage.replies(1)
        _, metrics = stage.strategy.aggregate_train(1, [replies[0]])
        assert metrics is not None
        assert metrics["num-replies"] == 1

    def test_no_reply_keeps_the_state(self, case: MethodCase, stage: Stage) -> None:
        before = stage.next_download()
        stage.strategy.loop.log = RoundLog(1)
        assert stage.strategy.aggregate_train(1, []) == (None, None)
        assert stage.next_download() == before

    def test_evaluation_changes_neither_weights_nor_generators(
        self, case: MethodCase, stage: Stage
    ) -> None:
        stage.strategy.read_uploads(stage.replies(1))
        state = torch.get_rng_state()
        stage.strategy.loop.log = RoundLog(1)
        seen = []
        for _ in range(2):
            asked = stage.strategy.evaluate_messages(
                1, is_local=True, is_global=case.row.has_global_model
            )
            messages = stage.strategy.messenger.by_receiver(asked)
            exchange = send_receive(stage.grid, messages, timeout=60)
            assert exchange.failures == []
            seen.append(
                [
                    read_metrics(reply.content.metric_records["metrics"]).scores
                    for reply in exchange.replies.values()
                ]
            )
            stage.forget_evaluation()
        assert seen[0] == seen[1]
        assert len(seen[0]) == 3
        assert torch.equal(torch.get_rng_state(), state)

    @has_rounds
    @pytest.mark.parametrize("settings", [{"eval_policy": "refresh-all"}], ids=[""])
    def test_scoring_a_refreshed_model_changes_nothing(
        self, case: MethodCase, stage: Stage
    ) -> None:
        stage.strategy.read_uploads(stage.replies(1))
        generator = torch.get_rng_state()
        states = stage.stored()
        seen = []
        for _ in range(2):
            stage.strategy.loop.log = RoundLog(1)
            stage.strategy.evaluate(1, stage.strategy.configure_evaluate(1))
            assert stage.strategy.loop.log.failures == []
            seen.append(stage.strategy.loop.log.pooled()["local"])
            stage.forget_evaluation()
        assert json.dumps(seen[0]) == json.dumps(seen[1])
        assert stage.stored() == states
        assert torch.equal(torch.get_rng_state(), generator)


def _check_size(payload: Any, sent: RecordDict) -> None:
    """Compare ``num_bytes`` with what a message holds."""
    arrays = sum(len(record) for record in sent.array_records.values())
    counted = sum(record.count_bytes() for record in sent.values())
    assert payload.num_bytes <= counted <= payload.num_bytes + HEADER_BYTES * arrays


uploads = applies_to(lambda case: case.row.uploads, "the method uploads nothing")


class Bomb:
    """Records whether a pickle was opened."""

    opened = False


def open_bomb() -> None:
    """Record that the pickle was opened, which calls this function."""
    Bomb.opened = True


PICKLE = f"c{open_bomb.__module__}\n{open_bomb.__name__}\n)R.".encode()
"""A pickle that calls ``open_bomb()``: GLOBAL, EMPTY_TUPLE, REDUCE, STOP."""


def of_objects() -> Array:
    """Put the pickle into an .npy file of objects."""
    stream = io.BytesIO()
    header = {"descr": "|O", "fortran_order": False, "shape": (1,)}
    np.lib.format.write_array_header_1_0(stream, header)
    data = stream.getvalue() + PICKLE
    return Array("object", (1,), "numpy.ndarray", data)


PICKLES = {
    "stored as a pickle": Array("object", (1,), "pickle", PICKLE),
    "disguised as an array": Array("float32", (1,), "numpy.ndarray", PICKLE),
    "an array of objects": of_objects(),
}


def _replaced(content: RecordDict, array: Array) -> RecordDict:
    """Return a content with another first array."""
    name, record = next(iter(content.array_records.items()))
    arrays = {**record, next(iter(record)): array}
    return RecordDict({**content, name: ArrayRecord(arrays)})


def garbage(content: RecordDict) -> dict[str, RecordDict]:
    """Return malformed versions of an upload by what is wrong with them."""
    name, record = next(iter(content.array_records.items()))
    first = next(iter(record.values()))
    short = Array(first.dtype, first.shape, first.stype, first.data[:-3])
    noise = Array("f", (1,), "numpy.ndarray", bytes(range(256)))
    more = {**record, **write_tensors({"more": torch.ones(1)})}
    other = write_tensors({"conv.weight": torch.ones(3, 3)})
    alone = {"metrics": content["metrics"]}
    return {
        "nothing": RecordDict(alone),
        "random bytes": _replaced(content, noise),
        "a truncated array": _replaced(content, short),
        "a config in its place": RecordDict({**content, name: ConfigRecord({"x": 1})}),
        "one array too many": RecordDict({**content, name: ArrayRecord(more)}),
        # Flower's byte count fails on empty values
        "an empty text": RecordDict({**alone, "odd": ConfigRecord({"x": ""})}),
        "an empty list": RecordDict({**alone, "odd": ConfigRecord({"x": []})}),
        "another method's upload": RecordDict({**alone, "elsewhere": other}),
    }


class WireContract(StageContract):
    """No pickle is opened, and a malformed upload costs one client one round."""

    @uploads
    def test_a_pickled_upload_is_rejected_unopened_and_logged(
        self, case: MethodCase, stage: Stage
    ) -> None:
        Bomb.opened = False
        replies = stage.replies(1)
        whole = replies[1].content
        for what, array in PICKLES.items():
            stage.strategy.loop.log = RoundLog(1)
            replies[1].content = _replaced(whole, array)
            assert sorted(stage.strategy.read_uploads(replies)) == [0, 2], what
            (failure,) = stage.strategy.loop.log.failures
            assert failure.partition_id == 1
            assert not Bomb.opened, what

    @uploads
    def test_a_pickled_download_is_rejected_unopened(
        self, case: MethodCase, stage: Stage
    ) -> None:
        Bomb.opened = False
        stage.strategy.aggregate_train(1, list(stage.replies(1).values()))
        for what, array in PICKLES.items():
            sent = stage.strategy.train_messages(2, [0], action=case.download_action)
            assert sent[0].content.array_records
            sent[0].content = _replaced(sent[0].content, array)
            exchange = send_receive(stage.grid, {0: sent[0]}, timeout=60)
            assert not exchange.replies, what
            reason = exchange.failures[0].reason
            assert "holds no plain array" in reason or "is stored as pickle" in reason
            assert not Bomb.opened, what

    @uploads
    def test_malformed_uploads_are_rejected_and_logged(
        self, case: MethodCase, stage: Stage
    ) -> None:
        replies = stage.replies(1)
        for what, content in garbage(replies[1].content).items():
            stage.strategy.loop.log = RoundLog(1)
            replies[1].content = content
            assert sorted(stage.strategy.read_uploads(replies)) == [0, 2], what
            (failure,) = stage.strategy.loop.log.failures
            assert failure.partition_id == 1
