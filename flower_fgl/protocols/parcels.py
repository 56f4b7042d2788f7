"""Messages of several clients as one message.

An exchange with clients of one process packs all of their messages: in a call of a worker
process, or in one message to a node that hosts them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flower_fgl.core.errors import PayloadError
from flower_fgl.core.flower_internals import (
    ErrorCode,
    ProtoRecordDict,
    plain_array,
    plain_content,
    plain_metrics,
    plain_record,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flower_fgl.protocols.base import INFO, MEGABYTE, find_record

__all__ = ["HOSTS", "PARCEL", "Parcel", "hosted_clients", "read_hosts"]

HOSTS = "hosts"
"""Action of the query for the number of clients that a node hosts."""
PARCEL = "parcel"
"""Record of a message that holds a parcel."""
UNSERIALISABLE = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
Packed = bytes | tuple[int, tuple[Any, ...]]
"""A record: protobuf, or the position of its layout and its numbers or bytes."""
Layout = tuple[Any, ...]
"""Names of metrics; or name, dtype, shape and stype of every array."""
Letter = tuple[int, str, str, dict[str, int], tuple[int, str] | None]


@dataclass(frozen=True)
class Parcel:
    """Messages or replies of several clients; a record that they share is held once.

    ``records`` are in the form that crosses the process boundary, ``layouts`` the names
    and shapes that they have in common. A letter is ``(client, message type, group,
    names, error)``: ``client`` is its partition-id, or its place in its node; ``names``
    maps the names of its records to positions in ``records``; ``error`` is the code and
    reason of a failed reply.
    """

    records: list[Packed]
    letters: list[Letter]
    layouts: list[Layout]

    @classmethod
    def pack(cls, messages: Iterable[tuple[int, Message]]) -> Parcel:
        """Pack messages by client; content that cannot be serialised becomes an error."""
        records: list[Packed] = []
        positions: dict[int, int] = {}
        letters: list[Letter] = []
        layouts: dict[Layout, int] = {}
        for client, message in messages:
            meta = message.metadata
            error, names = None, {}
            if message.has_error():
                error = message.error.code, str(message.error.reason)
            else:
                try:
                    for name, record in message.content.items():
                        if id(record) not in positions:
                            records.append(_pack_record(record, layouts))
                            positions[id(record)] = len(records) - 1
                        names[name] = positions[id(record)]
                except Exception as reason:
                    error, names = (UNSERIALISABLE, repr(reason)), {}
            letters.append((client, meta.message_type, meta.group_id, names, error))
        return cls(records, letters, list(layouts))

    def to_record(self) -> RecordDict:
        """Pack the parcel as content of one message: an index as JSON text, and bytes."""
        data: list[bytes] = []
        shown: list[Any] = []
        for packed in self.records:
            if isinstance(packed, bytes):
                data.append(packed)
                shown.append(None)
            elif _holds_arrays(self.layouts[packed[0]]):
                data += packed[1]
                shown.append(packed[0])
            else:
                shown.append(packed)
        index = {"letters": self.letters, "layouts": self.layouts, "records": shown}
        record = ConfigRecord({"index": json.dumps(index), "data": data})
        return RecordDict({PARCEL: record})

    @classmethod
    def from_record(cls, content: RecordDict, max_mb: float = math.inf) -> Parcel:
        """Unpack :meth:`to_record`.

        Raises a PayloadError if it is malformed, or larger than ``max_mb`` (10⁶ bytes).
        """
        try:
            record = content.config_records[PARCEL]
            text = str(record["index"])
            size = len(text) + sum(map(len, record["data"]))  # type: ignore[arg-type]
            if size > max_mb * MEGABYTE:
                raise PayloadError(
                    f"the messages of a node have {size / MEGABYTE:.3g} MB, more than "
                    f"max-message-mb for each of its clients, {max_mb:g} MB together"
                )
            index = json.loads(text)
            layouts = [_read_layout(layout) for layout in index["layouts"]]
            data = iter(record["data"])  # type: ignore[arg-type]
            records = [_read_record(r, layouts, data) for r in index["records"]]
            letters = [_read_letter(one, len(records)) for one in index["letters"]]
            if next(data, None) is not None:
                raise ValueError("there are more bytes than records")
        except PayloadError:
            raise
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise PayloadError(f"the parcel is malformed: {error!r}") from error
        return cls(records, letters, layouts)

    def contents(self) -> Iterator[RecordDict]:
        """Unpack the content of every message; messages share their common records."""
        records = [_unpack_record(packed, self.layouts) for packed in self.records]
        for _, _, _, names, _ in self.letters:
            yield plain_content({name: records[at] for name, at in names.items()})


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


def _holds_arrays(layout: Layout) -> bool:
    """Return whether a layout is that of arrays, not of metrics."""
    return not (layout and isinstance(layout[0], str))


def _read_layout(layout: Any) -> Layout:
    """Check a layout of JSON."""
    if all(isinstance(name, str) for name in layout):
        return tuple(layout)
    arrays = [
        (name, dtype, tuple(shape), stype) for name, dtype, shape, stype in layout
    ]
    for name, dtype, shape, stype in arrays:
        _expect(all(type(text) is str for text in (name, dtype, stype)), layout)
        _expect(all(type(size) is int for size in shape), layout)
    return tuple(arrays)


def _read_record(shown: Any, layouts: Sequence[Layout], data: Iterator[Any]) -> Packed:
    """Check a record of JSON, and take its bytes."""
    if shown is None:
        packed: Any = next(data, None)
        _expect(type(packed) is bytes, packed)
        return packed  # type: ignore[no-any-return]
    place, values = (shown, None) if type(shown) is int else shown
    _expect(type(place) is int and 0 <= place < len(layouts), shown)
    layout = layouts[place]
    if values is None:
        values = list(islice(data, len(layout)))
        is_right = all(type(value) is bytes for value in values)
    else:
        is_right = all(type(value) in (int, float) for value in values)
    _expect(is_right and len(values) == len(layout), shown)
    _expect(_holds_arrays(layout) == (type(shown) is int), shown)
    return place, tuple(values)


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


def _pack_record(record: Any, layouts: dict[Layout, int]) -> Packed:
    """Pack one record."""
    layout: Layout
    values: tuple[Any, ...]
    if isinstance(record, ArrayRecord):
        layout = tuple(
            (name, array.dtype, tuple(array.shape), array.stype)
            for name, array in record.items()
        )
        values = tuple(array.data for array in record.values())
        return layouts.setdefault(layout, len(layouts)), values
    has_lists = list in map(type, record.values())
    if isinstance(record, MetricRecord) and record and not has_lists:
        layout, values = tuple(record.keys()), tuple(record.values())
        return layouts.setdefault(layout, len(layouts)), values
    packed: bytes = recorddict_to_proto(RecordDict({"": record})).SerializeToString()
    return packed


def _unpack_record(packed: Packed, layouts: Sequence[Layout]) -> Any:
    """Unpack one record."""
    if isinstance(packed, bytes):
        return recorddict_from_proto(ProtoRecordDict.FromString(packed))[""]
    place, values = packed
    layout = layouts[place]
    if not _holds_arrays(layout):
        return plain_metrics(dict(zip(layout, values, strict=True)))
    return plain_record(
        {
            name: plain_array(dtype, shape, data, stype)
            for (name, dtype, shape, stype), data in zip(layout, values, strict=True)
        }
    )
