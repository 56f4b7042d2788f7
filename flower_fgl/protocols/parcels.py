"""Messages of several clients as one message.

An exchange with clients of one process packs all of their messages: in a call of a worker
process, or in one message to a node that hosts them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from flower_fgl.core import flower_internals
from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import INFO, MEGABYTE, find_record

__all__ = ["HOSTS", "PARCEL", "Parcel", "hosted_clients", "read_hosts"]

HOSTS = "hosts"
"""Action of the query for the number of clients that a node hosts."""
PARCEL = "parcel"
"""Record of a message that holds a parcel."""
UNSERIALISABLE = flower_internals.ErrorCode.CLIENT_APP_RAISED_EXCEPTION
Letter = tuple[int, str, str, dict[str, int], tuple[int, str] | None]


@dataclass(frozen=True)
class Parcel:
    """Messages or replies of several clients; a record that they share is held once.

    Worker processes get it by Ray's pickle, nodes by :meth:`to_record`.
    A letter is ``(client, message type, group, names, error)``: ``client`` is its
    partition-id, or its place in its node; ``names`` maps the names of its records to
    positions in ``records``; ``error`` is the code and reason of a failed reply.
    """

    records: list[Any]
    letters: list[Letter]

    @classmethod
    def pack(cls, messages: Iterable[tuple[int, Message]]) -> Parcel:
        """Pack messages by client."""
        records: list[Any] = []
        positions: dict[int, int] = {}
        letters: list[Letter] = []
        for client, message in messages:
            meta = message.metadata
            error, names = None, {}
            if message.has_error():
                error = message.error.code, str(message.error.reason)
            else:
                for name, record in message.content.items():
                    if id(record) not in positions:
                        positions[id(record)] = len(records)
                        records.append(record)
                    names[name] = positions[id(record)]
            letters.append((client, meta.message_type, meta.group_id, names, error))
        return cls(records, letters)

    def to_record(self) -> RecordDict:
        """Pack the parcel as content of one message: the letters as JSON, and records.

        Content that cannot be serialised becomes an error of its client.
        """
        data: list[bytes] = []
        broken: dict[int, tuple[int, str]] = {}
        for at, record in enumerate(self.records):
            try:
                data.append(_to_bytes(record))
            except Exception as reason:
                data.append(_to_bytes(ConfigRecord()))
                broken[at] = UNSERIALISABLE, repr(reason)
        letters: list[Letter] = []
        for letter in self.letters:
            failed = [broken[at] for at in letter[3].values() if at in broken]
            letters.append((*letter[:3], {}, failed[0]) if failed else letter)
        index = ConfigRecord({"letters": json.dumps(letters), "records": data})
        return RecordDict({PARCEL: index})

    @classmethod
    def from_record(cls, content: RecordDict, max_mb: float = math.inf) -> Parcel:
        """Unpack :meth:`to_record`.

        Raises a PayloadError if it is malformed, or larger than ``max_mb`` (10⁶ bytes).
        """
        try:
            index: Any = content[PARCEL]
            text, data = str(index["letters"]), index["records"]
            size = len(text) + sum(map(len, data))
            if size > max_mb * MEGABYTE:
                raise PayloadError(
                    f"the messages of a node have {size / MEGABYTE:.3g} MB, more than "
                    f"max-message-mb for each of its clients, {max_mb:g} MB together"
                )
            records = [_from_bytes(one) for one in data]
            letters = [_read_letter(one, len(records)) for one in json.loads(text)]
        except PayloadError:
            raise
        except Exception as error:  # whatever a node can send
            raise PayloadError(f"the parcel is malformed: {error!r}") from error
        return cls(records, letters)

    def contents(self) -> Iterator[RecordDict]:
        """Return the content of every message; messages share their common records."""
        for _, _, _, names, _ in self.letters:
            yield flower_internals.plain_content(
                {name: self.records[at] for name, at in names.items()}
            )


def read_hosts(content: RecordDict, most: int) -> int:
    """Return how many clients a node says that it hosts.

    Raises a PayloadError unless these are 1 to ``most``.
    """
    info = find_record(content, INFO, ConfigRecord)
    number = None if info is None else info.get("clients")
    if type(number) is not int or not 1 <= number <= most:
        raise PayloadError(
            f"it hosts {number!r} clients, but clients-per-node is {most}"
        )
    return number


def hosted_clients(place: int, num_nodes: int, num_clients: int) -> range:
    """Return the partition-ids that a node hosts, the one with number ``place`` of all.

    Neighbours in number are on different nodes: with 2, 4, 8 or 16 nodes each has whole
    stacks of clients, and so the numbers of the local engine to the last bit.
    """
    return range(place, num_clients, num_nodes)


def _expect(is_right: bool, found: object) -> None:
    """Raise a TypeError that quotes a part of a parcel unless it is right."""
    if not is_right:
        raise TypeError(f"unexpected {found!r}"[:200])


def _to_bytes(record: Any) -> bytes:
    """Return a record as protobuf."""
    data: bytes = flower_internals.recorddict_to_proto(
        RecordDict({"": record})
    ).SerializeToString()
    return data


def _from_bytes(data: bytes) -> Any:
    """Undo :func:`_to_bytes`."""
    return flower_internals.recorddict_from_proto(
        flower_internals.ProtoRecordDict.FromString(data)
    )[""]


def _read_letter(letter: Any, num_records: int) -> Letter:
    """Check a letter of JSON."""
    client, kind, group, names, error = letter
    _expect(type(client) is int and type(kind) is str and type(group) is str, letter)
    _expect(isinstance(names, dict), letter)
    for at in names.values():
        _expect(type(at) is int and 0 <= at < num_records, letter)
    if error is not None:
        code, reason = error
        _expect(type(code) is int and type(reason) is str, letter)
        error = code, reason
    return client, kind, group, names, error
