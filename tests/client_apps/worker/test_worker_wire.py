"""The bytes sent through the socket."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)

import flower_fgl.client_apps.worker
from flower_fgl.client_apps.worker.wire import (
    UnreadableError,
    pack_answer,
    read_answer,
    receive_request,
    send_request,
)
from flower_fgl.core.errors import PayloadError, RunError
from flower_fgl.simulation.local_grid import task_identity

Ends = tuple[Connection, Connection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = Pipe()
    with one, other:
        yield one, other


def records(number: float) -> RecordDict:
    array = Array(np.array([[number, np.nan]], dtype=np.float32))
    return RecordDict(
        {
            "arrays": ArrayRecord({"w": array}),
            "numbers": MetricRecord({"x": number, "n": [1, 2]}),
            "settings": ConfigRecord({"a": b"\x00", "b": True, "c": ["p", "q"]}),
        }
    )


def a_message() -> Message:
    with task_identity(7):
        message = Message(records(0.1), 12, "query.describe", group_id="3", ttl=60.0)
    message.metadata.__dict__["_message_id"] = "abc"
    return message


def a_context() -> Context:
    return Context(7, 12, {"worker-idle": 600}, records(1 / 3), {"rounds": 2}, 5)


def same(one: RecordDict, other: RecordDict) -> bool:
    arrays = one["arrays"]["w"].data == other["arrays"]["w"].data
    plain = [k for k in one if k != "arrays"]
    return (
        arrays and list(one) == list(other) and all(one[k] == other[k] for k in plain)
    )


def send(connection: Connection, frames: list[bytes]) -> None:
    for frame in frames:
        connection.send_bytes(frame)


def test_requests_and_replies_arrive_unchanged(ends: Ends) -> None:
    send_request(ends[0], a_message(), a_context())
    message, context = receive_request(ends[1])
    sent = a_message().metadata
    for name in ("run_id", "dst_node_id", "message_type", "ttl", "src_task_id"):
        assert getattr(message.metadata, name) == getattr(sent, name)
    assert message.metadata.message_id == "abc"
    assert message.metadata.group_id == "3"
    assert same(message.content, records(0.1))
    assert same(context.state, records(1 / 3))
    plain = ("run_id", "node_id", "node_config", "run_config", "series_id")
    for name in plain:
        assert getattr(context, name) == getattr(a_context(), name)
    context.state["settings"] = ConfigRecord({"new": 1})
    send(ends[1], pack_answer(Message(records(2.5), reply_to=message), context))
    requested = a_context()
    reply = read_answer(ends[0], requested)
    assert isinstance(reply, Message)
    assert same(reply.content, records(2.5))
    assert reply.metadata.reply_to_message_id == "abc"
    assert requested.state["settings"] == ConfigRecord({"new": 1})


@pytest.mark.parametrize(
    ("error", "text"),
    [(PayloadError("it lacks x"), "it lacks x"), (KeyError("x"), "KeyError('x')")],
)
def test_an_error_keeps_its_text(ends: Ends, error: Exception, text: str) -> None:
    context = a_context()
    context.state["settings"] = ConfigRecord({"answered": 3})
    send(ends[1], pack_answer(error, context))
    requested = a_context()
    answer = read_answer(ends[0], requested)
    # the failed round counts as answered
    assert requested.state["settings"] == ConfigRecord({"answered": 3})
    assert isinstance(answer, RunError)
    assert str(answer) == text


@pytest.mark.parametrize(
    "frames",
    [
        [b"\x80\x04K\x01."],
        [b"reply", b"garbage", b"garbage"],
        [b"error", b"\xff", b""],
        [b"error", b"no", b"garbage"],
    ],
)
def test_a_malformed_answer_leaves_the_context_unchanged(
    ends: Ends, frames: list[bytes]
) -> None:
    send(ends[1], frames)
    context = a_context()
    with pytest.raises(UnreadableError, match="the worker's answer"):
        read_answer(ends[0], context)
    assert same(context.state, records(1 / 3))


def test_a_malformed_request_is_rejected(ends: Ends) -> None:
    send(ends[0], [b"garbage", b"garbage"])
    with pytest.raises(UnreadableError, match="is not a message"):
        receive_request(ends[1])


def test_only_bytes_pass_through_connections() -> None:
    folder = Path(flower_fgl.client_apps.worker.__file__).parent
    calls = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                calls.add(node.func.attr)
    assert {"send_bytes", "recv_bytes"} <= calls
    assert not {"send", "recv"} & calls  # these methods pickle
