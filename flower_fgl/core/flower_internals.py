"""Everything that this package imports from undocumented modules of Flower.

All other files import from ``flwr.app``, ``flwr.clientapp``, ``flwr.serverapp`` and
``flwr.serverapp.strategy`` only. A new version of Flower may move these names:

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
"""

from __future__ import annotations

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

__all__ = [
    "ErrorCode",
    "FlowerRun",
    "ProtoContext",
    "ProtoMessage",
    "ProtoRecordDict",
    "TaskIdentity",
    "add_exit_handler",
    "context_from_proto",
    "context_to_proto",
    "message_from_proto",
    "message_to_proto",
    "parse_config_args",
    "recorddict_from_proto",
    "recorddict_to_proto",
]
