"""Everything that relies on undocumented parts of Flower.

All other files import from ``flwr.app``, ``flwr.clientapp``, ``flwr.serverapp`` and
``flwr.serverapp.strategy`` only, and build messages and records with this module or with
Flower's constructors. A new version of Flower may move these names:

========================================  ==============================================
names                                     used for
========================================  ==============================================
``add_exit_handler``                      the run folder's status when Flower ends a run
``ErrorCode``                             clients that sent no reply
``FlowerRun``, ``TaskIdentity``           a ``Grid`` without a SuperLink
``parse_config_args``                     the text of ``--node-config``
``…_to_proto``, ``…_from_proto``,         messages between processes of one machine, and
``Proto…``                                their size in bytes
========================================  ==============================================

The functions below build Flower's objects attribute by attribute, in a tenth of the time
that its constructors take. The tests compare them with what those build.
"""

import time
from collections.abc import Mapping

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.common.config import parse_config_args
from flwr.common.constant import ErrorCode
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.supercore.exit import add_exit_handler
from flwr.supercore.run import Run as FlowerRun
from flwr.supercore.task_identity import TaskIdentity

__all__ = ["NUMPY", "ErrorCode", "FlowerRun", "ProtoContext", "ProtoMessage"]
__all__ += ["ProtoRecordDict", "TaskIdentity", "add_exit_handler", "answer_message"]
__all__ += ["carried", "context_from_proto", "context_to_proto", "message_from_proto"]
__all__ += ["message_like", "message_to_proto", "parse_config_args", "plain_array"]
__all__ += ["plain_content", "plain_metrics", "plain_record", "recorddict_from_proto"]
__all__ += ["recorddict_to_proto", "reply_with"]

Record = ArrayRecord | ConfigRecord | MetricRecord
NUMPY = "numpy.ndarray"
"""Flower's name for the form of arrays, ``.npy`` bytes."""
LARGEST_INT = 1 << 63
"""Integers of at least this size have other forms in protobuf."""


def plain_array(
    dtype: str, shape: tuple[int, ...], data: bytes, stype: str = NUMPY
) -> Array:
    """Build ``Array(dtype, shape, stype, data)`` from arguments of these types."""
    array = Array.__new__(Array)
    array.__dict__.update(
        _is_dirty=True, dtype=dtype, shape=shape, stype=stype, data=data
    )
    return array


def plain_record(arrays: Mapping[str, Array]) -> ArrayRecord:
    """Build an ArrayRecord of arrays with names of type ``str``, without copies."""
    record = ArrayRecord()
    record.__dict__["_data"].update(arrays)
    return record


def plain_metrics(values: Mapping[str, int | float]) -> MetricRecord:
    """Build ``MetricRecord(values)`` from names of type ``str``; numbers are checked."""
    if not {float, int}.issuperset(map(type, values.values())):
        return MetricRecord(dict(values))
    record = MetricRecord()
    record.__dict__["_data"].update(values)
    return record


def plain_content(records: Mapping[str, Record]) -> RecordDict:
    """Build ``RecordDict(records)`` of records with names of type ``str``."""
    content = RecordDict()
    content.__dict__["_data"].update(records)
    return content


def carried(name: str, record: Record) -> Record:
    """Return a record as its receiver gets it through Flower's wire format.

    Arrays hold bytes already, so they become new, checked objects around the same bytes.
    What protobuf would not change is copied, the rest converted to protobuf and back.
    Raises a TypeError or ValueError if an entry cannot be serialised.
    """
    if isinstance(record, ArrayRecord):
        if type(record) is ArrayRecord and all(map(_is_plain, record.values())):
            return plain_record(
                {
                    entry: plain_array(a.dtype, a.shape, a.data, a.stype)
                    for entry, a in record.items()
                }
            )
        return ArrayRecord.from_array_dict(dict(record.items()))
    if type(record) is MetricRecord:
        is_text = name.isascii() and all(map(str.isascii, record.keys()))
        if is_text and all(map(_is_kept, record.values())):
            return record.copy()
    data = recorddict_to_proto(RecordDict({name: record})).SerializeToString()
    return recorddict_from_proto(ProtoRecordDict.FromString(data))[name]


def _is_plain(array: Array) -> bool:
    """Return whether the fields of an array have the types that Flower checks."""
    return (
        type(array.dtype) is str
        and type(array.stype) is str
        and type(array.shape) is tuple
        and type(array.data) is bytes
        and all(isinstance(size, int) for size in array.shape)
    )


def _is_kept(value: object) -> bool:
    """Return whether protobuf transmits a metric unchanged, without rounding it."""
    kind = type(value)
    return kind is float or (kind is int and abs(value) < LARGEST_INT)  # type: ignore[arg-type]


def message_like(message: Message, content: RecordDict, **fields: object) -> Message:
    """Build a message with the metadata of another one, except for some ``fields``."""
    about = Metadata.__new__(Metadata)
    changed = {f"_{name}": value for name, value in fields.items()}
    about.__dict__.update(vars(message.metadata), _created_at=time.time(), **changed)
    made = Message.__new__(Message)
    made.__dict__.update(_metadata=about, _content=content, _error=None)
    return made


def reply_with(message: Message, content: RecordDict) -> Message:
    """Build ``Message(content, reply_to=message)``, in less time within one process."""
    known = vars(message.metadata)
    if message.metadata.delivered_at:  # a copy would name the delivery of the message
        return Message(content, reply_to=message)
    return message_like(
        message,
        content,
        message_id="",
        reply_to_message_id=known["_message_id"],
        src_node_id=known["_dst_node_id"],
        dst_node_id=known["_src_node_id"],
        src_task_id=known["_dst_task_id"],
        dst_task_id=known["_src_task_id"],
        ttl=known["_created_at"] + known["_ttl"] - time.time(),
    )


def answer_message(
    message: Message, message_id: str, answer: RecordDict | Error
) -> Message:
    """Build the reply to a message that gets its id here, as a SuperLink gives it."""
    message.metadata.__dict__["_message_id"] = message_id
    if isinstance(answer, RecordDict):
        return reply_with(message, answer)
    return Message(answer, reply_to=message)
