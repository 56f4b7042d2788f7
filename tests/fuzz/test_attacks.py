"""Single replies that ended, slowed or decided a run for all clients."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord

from flower_fgl import Run, simulate
from flower_fgl.client_apps.dispatch import Dispatcher
from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import read_tensors, write_tensors
from flower_fgl.protocols.describe import ClassAgreement, Description
from flower_fgl.protocols.differential_privacy import check_clipped, clip_and_add_noise
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.simulation.local_grid import LocalGrid, task_identity
from flower_fgl.strategies.fedavg import FedAvg
from flower_fgl.strategies.rounds.messenger import send_receive
from flower_fgl.strategies.rounds.round_log import Failure
from tests.support.short_runs import shortened

Change = Callable[[Message], None]


@pytest.fixture
def attack(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change, str], None]:
    """Return a function that lets client 1 change its replies to a kind of message."""

    def start(change: Change, kind: str = "train") -> None:
        original = Dispatcher.__call__

        def call(app: Any, message: Message, context: Context) -> Message:
            reply = original(app, message, context)
            is_mine = context.node_config["partition-id"] == 1
            if is_mine and message.metadata.message_type == kind:
                change(reply)
            return reply

        monkeypatch.setattr(Dispatcher, "__call__", call)

    return start


def metrics(**changes: Any) -> Change:
    """Change metrics of a reply; ``__`` stands for ``/`` in a name."""

    def change(reply: Message) -> None:
        made = {**reply.content["metrics"]}
        made |= {key.replace("__", "/"): value for key, value in changes.items()}
        reply.content["metrics"] = MetricRecord(made)

    return change


def filled(value: float) -> Change:
    """Fill all weights with a number."""

    def change(reply: Message) -> None:
        arrays = reply.content.array_records["weights"]
        made = {n: torch.full(a.shape, value) for n, a in arrays.items()}
        reply.content["weights"] = write_tensors(made)

    return change


def raw(data: Callable[[bytes], bytes]) -> Change:
    """Change the bytes of the first array of the weights."""

    def change(reply: Message) -> None:
        arrays = dict(reply.content.array_records["weights"])
        name = next(iter(arrays))
        old = arrays[name]
        made = Array(old.dtype, tuple(old.shape), old.stype, data(old.data))
        reply.content["weights"] = ArrayRecord({**arrays, name: made})

    return change


def with_header(text: str) -> Callable[[bytes], bytes]:
    head = text.encode()
    return lambda _: b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head


def only_client_1_is_dropped(run: Run, words: str = "") -> None:
    assert run.status == "completed"
    for row in run.rounds:
        assert {f["partition_id"] for f in row["failures"]} == {1}
        assert row["replies"] == 2
        reason = row["failures"][0]["reason"]
        assert words in reason
        assert len(reason) <= 500
        assert reason.isprintable()


SHAPE = "{'descr': '<f4', 'fortran_order': False, 'shape': %s, }\n"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "change",
    [
        metrics(local__val__num_nodes=float("inf")),
        metrics(local__val__num_nodes=1e15),
        metrics(local__val__num_nodes=2**62),
        metrics(worker=[1, 2]),
        metrics(seconds__train=[1.0, 2.0]),
        metrics(loss=1e308),
        metrics(**{f"terms__{i}": 1.0 for i in range(20_000)}),
        metrics(**{"terms__" + "x" * 26_000: 1.0}),
        metrics(**{"\x1b[31m" * 5000: 1.0}),
        metrics(terms__x=float("nan")),
        metrics(
            global__val__num_nodes=15.0,
            global__val__accuracy=1.0,
            global__val__macro_f1=1.0,
            global__val__macro_recall=1.0,
        ),
        metrics(
            local__train__num_nodes=5.0,
            local__train__accuracy=1.0,
            local__train__macro_f1=1.0,
            local__train__macro_recall=1.0,
        ),
        raw(lambda data: data[:40]),
        raw(with_header("(" * 9000)),
        raw(with_header(SHAPE % "(10")),
        raw(with_header(SHAPE % f"({10**23},)")),
        raw(with_header(SHAPE % f"(0, {10**23})")),
        filled(1e38),
    ],
)
def test_a_reply_that_cannot_be_is_dropped_alone(
    attack: Any, small: dict[str, Any], change: Change
) -> None:
    attack(change)
    only_client_1_is_dropped(simulate(**small))


@pytest.mark.parametrize("method", ["fedsem", "fedavg", "fedala", "f2l", "pfedfsl"])
def test_huge_weights_do_not_make_the_state_infinite(
    attack: Any, small: dict[str, Any], method: str
) -> None:
    attack(filled(1e38))
    run = simulate(method, **shortened(method, small))
    only_client_1_is_dropped(run, "size 1e+38")


def test_a_client_does_not_fill_the_log(
    attack: Any, small: dict[str, Any], tmp_path: Path
) -> None:
    attack(metrics(**{f"terms__{i}": 1.0 for i in range(20_000)}))
    run = simulate(**small)
    sizes = [path.stat().st_size for path in run.path.glob("*.jsonl")]
    assert sum(sizes) < 20_000


def test_names_of_foreign_records_do_not_fill_the_log(
    attack: Any, small: dict[str, Any]
) -> None:
    def change(reply: Message) -> None:
        for number in range(300):
            reply.content[f"record {number}" * 20] = MetricRecord({})

    attack(change)
    run = simulate(**small)
    only_client_1_is_dropped(run, "unexpected records")
    assert len(json.dumps(run.rounds[0]["bytes"])) < 1000


def test_an_error_text_is_shortened_and_escaped(
    attack: Any, small: dict[str, Any]
) -> None:
    def change(reply: Message) -> None:
        raise RuntimeError("\x1b[2J" + "x" * 26_000)

    attack(change)
    only_client_1_is_dropped(simulate(**small))
    assert len(Failure(0, "\x1b" * 26_000).reason) <= 500


def test_a_client_that_claims_a_dead_worker_does_not_end_a_deployment() -> None:
    def client(message: Message, context: Context) -> Message:
        raise RuntimeError("ActorDiedError: the actor died")

    with task_identity(5):
        grid = LocalGrid(client, 1)
        message = Message(
            write_and_pack({}), dst_node_id=grid.get_node_ids()[0], message_type="train"
        )
        failures = send_receive(grid, {0: message}, timeout=5).failures
    assert "actor died" in failures[0].reason


def write_and_pack(tensors: dict[str, torch.Tensor]) -> Any:
    return Weights(tensors).to_record()


class Brittle(LocalGrid):
    """Loses all replies of a pull if one cannot be decoded, as Flower's grid does."""

    def pull_messages(self, message_ids: Any) -> list[Message]:
        replies = super().pull_messages(message_ids)
        if any("bad" in reply.content for reply in replies):
            raise KeyError("no such object")
        return replies


def test_a_reply_that_flower_cannot_decode_is_dropped_alone() -> None:
    def client(message: Message, context: Context) -> Message:
        content = Weights({}).to_record()
        if context.node_config["partition-id"] == 1:
            content["bad"] = MetricRecord({})
        return Message(content, reply_to=message)

    with task_identity(5):
        grid = Brittle(client, 3)
        for turn in range(2):
            messages = {
                pid: Message(Weights({}).to_record(), node, "train")
                for pid, node in enumerate(grid.get_node_ids())
            }
            exchange = send_receive(grid, messages, timeout=0.2)
            assert 1 in {failure.partition_id for failure in exchange.failures}
            if turn:  # replies are pulled one by one after the first failure
                assert sorted(exchange.replies) == [0, 2]
                assert "Flower cannot decode" in exchange.failures[0].reason


# ---------------------------------------------------------------- descriptions
def description(**changes: Any) -> Description:
    about: dict[str, Any] = {
        "partition_id": 0,
        "num_partitions": 3,
        "num_nodes": 40,
        "num_edges": 60,
        "num_train": 10,
        "num_val": 10,
        "num_test": 20,
        "num_features": 8,
        "class_names": ("a", "b"),
        "class_counts": (4, 6),
        "model": "gcn",
        "partition_sha256": "ab",
    }
    return Description(**{**about, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"partition_id": 2**61, "num_partitions": 2**61 + 1},
        {"num_partitions": 10**8},
        {"num_train": 2**62, "num_nodes": 2**62, "class_counts": ()},
        {"num_train": 41},
        {"num_nodes": 2**40},
        {"num_val": 10**15},
        {"class_counts": (4, 7)},
        {"class_names": tuple(map(str, range(20_000))), "class_counts": ()},
        {"class_names": ("a", "x" * 26_000)},
        {"class_names": ("a", "b\n\x1b[31m")},
        {"model": "x" * 26_000},
        {"partition_sha256": "x" * 26_000},
        {"public_key": b"\x00" * 10**6},
    ],
)
def test_descriptions_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    assert Description.from_record(description().to_record()) == description()
    clock = time.process_time()
    with pytest.raises(PayloadError) as error:
        Description.from_record(description(**changes).to_record())
    assert time.process_time() - clock < 1
    assert len(str(error.value)) <= 500
    assert str(error.value).isprintable()


def test_an_agreement_of_too_many_clients_is_refused() -> None:
    content = ClassAgreement(0, 10**8, ("a",)).to_record()
    with pytest.raises(PayloadError, match="num-partitions"):
        ClassAgreement.from_record(content)


# ---------------------------------------------------------------- headers of arrays
def test_only_headers_that_the_library_writes_are_read() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    good = write_tensors({"a": tensor})["a"]
    start = 10 + int.from_bytes(good.data[8:10], "little")
    body = good.data[start:]
    stream = io.BytesIO()
    np.lib.format.write_array_header_2_0(
        stream, {"descr": "<f4", "fortran_order": False, "shape": (2, 3)}
    )
    fortran = good.data.replace(b"False", b"True ")
    others = [
        stream.getvalue() + body,
        fortran,
        good.data + b"\x00",
        good.data[:-1],
        good.data.replace(b"(2, 3)", b"(3, 2)"),
        good.data.replace(b", }", b",}") + b" ",
        good.data.replace(b"'", b'"'),
        good.data.replace(b"(2, 3)", b"(6,  )"),
    ]
    content = write_and_pack({"a": tensor})
    assert torch.equal(read_tensors(content, "weights")["a"], tensor)
    for data in others:
        array = Array(good.dtype, tuple(good.shape), good.stype, data)
        content["weights"] = ArrayRecord({"a": array})
        with pytest.raises(PayloadError, match="no plain array"):
            read_tensors(content, "weights")


# ---------------------------------------------------------------- clipping
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_clipped_uploads_pass_the_check_and_scaled_ones_do_not(noise: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1, 50, 5000):
        start = 100 * torch.randn(size, generator=generator)
        upload = start + torch.randn(size, generator=generator)
        (clipped,) = clip_and_add_noise(
            [upload], clip=0.5, noise=noise, origin=[start], generator=generator
        )
        download = Weights({"w": start})
        check_clipped(Weights({"w": clipped}), download, clip=0.5, noise=noise)
        far = Weights({"w": start + 100 * (clipped - start)})
        with pytest.raises(PayloadError, match=r"upload-clip = 0\.5"):
            check_clipped(far, download, clip=0.5, noise=noise)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedavg", "fedpg", "fedlog", "opfgl", "fedsage+"])
def test_a_client_that_does_not_clip_is_dropped(
    attack: Any, small: dict[str, Any], method: str
) -> None:
    def change(reply: Message) -> None:
        for name, record in reply.content.array_records.items():
            arrays = {
                n: Array(a.numpy() * np.float32(1000))
                if "f" in a.numpy().dtype.kind
                else a
                for n, a in record.items()
            }
            reply.content[name] = ArrayRecord(arrays)

    settings = {**shortened(method, small), "upload_clip": 0.01}
    honest = simulate(method, **settings)
    assert not any(row["failures"] for row in honest.rounds)
    attack(change)
    run = simulate(method, **settings)
    for row in run.rounds:
        if row["phase"] == "train":
            assert {f["partition_id"] for f in row["failures"]} == {1}
            assert "upload-clip = 0.01" in row["failures"][0]["reason"]


# ---------------------------------------------------------------- the aggregate
def test_a_non_finite_aggregate_keeps_the_state_and_fails_the_round(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]
) -> None:
    original = FedAvg.aggregate

    def aggregate(self: FedAvg, server_round: int, uploads: Any) -> None:
        original(self, server_round, uploads)
        if server_round == 2:
            name = next(iter(self.shapes))
            self.weights.tensors[name][:] = torch.inf

    monkeypatch.setattr(FedAvg, "aggregate", aggregate)
    run = simulate(**small)
    assert [row["status"] for row in run.rounds] == ["ok", "failed"]
    assert "is not finite; the previous state is kept" in run.rounds[1]["reason"]


def test_the_upload_to_blame_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, attack: Any, small: dict[str, Any]
) -> None:
    original = FedAvg.aggregate

    def aggregate(self: FedAvg, server_round: int, uploads: Any) -> None:
        original(self, server_round, uploads)
        if max(float(t.abs().max()) for t in self.weights.tensors.values()) > 1e9:
            raise OverflowError("too large")

    monkeypatch.setattr(FedAvg, "aggregate", aggregate)
    attack(filled(1e14))
    only_client_1_is_dropped(simulate(**small), "by far the largest number")
