"""Messages of the local engine, which are built without Flower's constructors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.common.serde import recorddict_to_proto

from flower_fgl.protocols.base import (
    message_like,
    plain_array,
    plain_content,
    plain_metrics,
    plain_record,
    reply_with,
    write_tensors,
)
from flower_fgl.simulation.local_grid import carry, task_identity


def about(message: Message) -> dict[str, Any]:
    """Return the metadata without the times."""
    known = vars(message.metadata)
    return {n: v for n, v in known.items() if n not in ("_created_at", "_ttl")}


def test_messages_are_those_of_flowers_constructor() -> None:
    content = RecordDict({"c": ConfigRecord({"n": 1})})
    with task_identity(9):
        sent = Message(content, 5, "train", group_id="3", dst_task_id=8)
        other = Message(content, 6, "train", group_id="3", dst_task_id=8)
        like = message_like(sent, content, _dst_node_id=6)
        sent.metadata.__dict__["_message_id"] = "m"
        expected = Message(content, reply_to=sent)
        reply = reply_with(sent, content)
    for made, right in ((like, other), (reply, expected)):
        assert vars(made).keys() == vars(right).keys()
        assert about(made) == about(right)
        assert made.content is content
        assert not made.has_error()
        assert made.metadata.ttl == pytest.approx(right.metadata.ttl, abs=1)
        assert made.metadata.created_at == pytest.approx(
            right.metadata.created_at, abs=1
        )


def test_a_reply_says_nothing_of_the_delivery_of_its_message() -> None:
    content = RecordDict({"c": ConfigRecord({"n": 1})})
    with task_identity(9):
        sent = Message(content, 5, "train")
        sent.metadata.delivered_at = "2026-01-01T00:00:00"  # as by a SuperLink
        reply, right = reply_with(sent, content), Message(content, reply_to=sent)
    assert reply.metadata.delivered_at == ""
    assert about(reply) == about(right)


def test_records_are_those_of_flowers_constructors() -> None:
    array = Array("float32", (2,), "numpy.ndarray", b"1234")
    made = plain_array("float32", (2,), b"1234")
    assert vars(made) == vars(array)
    records = ArrayRecord({"a": array}), MetricRecord({"x": 1, "y": 0.5})
    plain = plain_record({"a": made}), plain_metrics({"x": 1, "y": 0.5})
    for one, other in zip(plain, records, strict=True):
        assert one == other
        assert one.object_id == other.object_id  # what a deployment transmits
    whole = plain_content({"r": plain[0], "m": plain[1]})
    same = RecordDict({"r": records[0], "m": records[1]})
    assert whole.object_id == same.object_id
    assert recorddict_to_proto(whole) == recorddict_to_proto(same)
    with pytest.raises(TypeError):
        plain_metrics({"x": "text"})  # type: ignore[dict-item]


def test_carried_content_shares_no_object_and_is_equal() -> None:
    content = RecordDict(
        {
            "a": write_tensors({"w": torch.rand(2)}),
            "m": MetricRecord({"x": 1, "y": float("inf"), "z": [1, 2]}),
            "p": MetricRecord({"x": 1, "y": -0.0, "big": 2**63}),
            "c": ConfigRecord({"n": 1}),
        }
    )
    found = carry(content)
    assert found == content
    for name, record in content.items():
        assert found[name] is not record
    assert found["a"]["w"] is not content["a"]["w"]  # type: ignore[index, call-overload]


@pytest.mark.parametrize(
    "record",
    [MetricRecord({"x": 2**64}), MetricRecord({"x": -(2**63) - 1})],
)
def test_what_flower_cannot_transmit_fails_in_the_local_engine(
    record: MetricRecord,
) -> None:
    with pytest.raises(ValueError, match="range"):
        carry(RecordDict({"m": record}))
    with pytest.raises(ValueError, match="surrogates"):
        carry(RecordDict({"m": MetricRecord({"\ud800": 1.0})}))
