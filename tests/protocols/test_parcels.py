"""Parcels as content of one message."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from flower_fgl.core.errors import PayloadError
from flower_fgl.core.flower_internals import (
    ProtoRecordDict,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flower_fgl.protocols.base import write_tensors
from flower_fgl.protocols.parcels import PARCEL, Parcel, hosted_clients, read_hosts
from flower_fgl.simulation.local_grid import task_identity

KINDS = {
    "weights": write_tensors({"w": torch.rand(2, 3), "b": torch.rand(())}),
    "no weights": ArrayRecord({}),
    "metrics": MetricRecord({"loss": math.nan, "worker": 3, "big": 0.1 + 0.2}),
    "no metrics": MetricRecord(),
    "lists": MetricRecord({"a": [1, 2], "b": 0.5}),
    "config": ConfigRecord({"text": "ä", "is": True, "bytes": b"1"}),
}


def packed() -> Parcel:
    with task_identity(1):
        sent = [Message(RecordDict(KINDS), dst_node_id=3, message_type="train")]
        sent.append(Message(RecordDict({"weights": KINDS["weights"]}), 4, "train"))
        sent[0].metadata.__dict__["_message_id"] = "m"
        lost = Message(Error(2, "no data"), reply_to=sent[0])
        return Parcel.pack([*enumerate(sent), (7, lost)])


def test_every_kind_of_record_crosses_the_wire() -> None:
    parcel = packed()
    wire = recorddict_to_proto(parcel.to_record()).SerializeToString()
    content = recorddict_from_proto(ProtoRecordDict.FromString(wire))
    assert PARCEL in content
    found = Parcel.from_record(content)
    assert repr(found) == repr(parcel)
    first, second, third = found.contents()
    for name, record in KINDS.items():
        assert type(first[name]) is type(record)
        assert repr(first[name]) == repr(record), name
    assert second["weights"] is first["weights"]  # a broadcast travels once
    assert not third
    assert [letter[0] for letter in found.letters] == [0, 1, 7]
    assert found.letters[2][-1] == (2, "no data")


def test_content_that_cannot_be_serialised_is_an_error_of_its_client() -> None:
    bad = ConfigRecord({"n": 1})
    bad.__dict__["_data"]["n"] = 1 << 70
    with task_identity(1):
        sent = [Message(RecordDict({"config": bad}), 3, "train")]
        sent.append(Message(RecordDict({"config": KINDS["config"]}), 4, "train"))
    parcel = Parcel.from_record(Parcel.pack(enumerate(sent)).to_record())
    assert [letter[-1] is None for letter in parcel.letters] == [False, True]
    assert list(parcel.contents())[1]["config"]["text"] == "ä"


def changed(letters: Any = (), **changes: Any) -> RecordDict:
    """Return a parcel with other letters or records."""
    record = packed().to_record().config_records["parcel"]
    text = json.dumps(letters)
    return RecordDict({"parcel": ConfigRecord({**record, "letters": text, **changes})})


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"parcel": ConfigRecord({"letters": "{", "records": [b""]})}),
        RecordDict(
            {"parcel": ConfigRecord({"letters": "[" * 10**5, "records": [b""]})}
        ),
        RecordDict({"parcel": ConfigRecord({"letters": "{}", "records": [1]})}),
        RecordDict({"parcel": ConfigRecord({"letters": "[]"})}),
        changed(records=[b"no protobuf"]),
        changed(records=[b""]),
        changed(records=["text"]),
        changed(records=[1.0]),
        changed(letters=[["0", "train", "", {}, None]]),
        changed(letters=[[True, "train", "", {}, None]]),
        changed(letters=[[0, "train", "", {"a": 99}, None]]),
        changed(letters=[[0, "train", "", {"a": -1}, None]]),
        changed(letters=[[0, "train", "", [], None]]),
        changed(letters=[[0, "train", "", {}, [2]]]),
        changed(letters=[[0, "train", "", {}, [2, 3]]]),
        changed(letters=[[0, "train", ""]]),
    ],
)
def test_a_malformed_parcel_is_refused(content: RecordDict) -> None:
    with pytest.raises(PayloadError, match="malformed"):
        Parcel.from_record(content)


def test_a_parcel_above_its_limit_is_refused_before_it_is_read() -> None:
    content = packed().to_record()
    assert Parcel.from_record(content, 0.01)
    with pytest.raises(PayloadError, match="max-message-mb"):
        Parcel.from_record(content, 0.0005)


@pytest.mark.parametrize(("clients", "nodes"), [(10, 4), (8, 8), (1000, 8), (7, 3)])
def test_every_client_is_on_one_node(clients: int, nodes: int) -> None:
    parts = [hosted_clients(place, nodes, clients) for place in range(nodes)]
    assert sorted(pid for part in parts for pid in part) == [*range(clients)]
    sizes = [len(part) for part in parts]
    assert max(sizes) == -(-clients // nodes)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("number", [0, 5, -1, True, 2.0, "2", None])
def test_a_node_hosts_as_many_clients_as_the_setting_allows(number: Any) -> None:
    info = {} if number is None else {"clients": number}
    with pytest.raises(PayloadError, match="clients-per-node is 4"):
        read_hosts(RecordDict({"info": ConfigRecord(info)}), 4)
    assert read_hosts(RecordDict({"info": ConfigRecord({"clients": 4})}), 4) == 4
