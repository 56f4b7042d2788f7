"""What passes between a message's process and the owner's worker, as bytes.

Frames in order, each sent by ``Connection.send_bytes``:

=========  ===========================================================================
worker     ``taken``, at once: it has time for a message
process    the message, the context
worker     ``reply``, the reply's message, the context's state
worker     or ``error`` and JSON: the error's module, class, text and traceback
=========  ===========================================================================
"""

from __future__ import annotations

import builtins
import contextlib
import json
import traceback
from multiprocessing.connection import Connection

from flwr.app import Context, Message
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

from flower_fgl.core import errors

__all__ = [
    "TAKEN",
    "UnreadableError",
    "pack_error",
    "pack_reply",
    "read_answer",
    "receive_request",
    "send_request",
]

TAKEN, REPLY, ERROR = b"taken", b"reply", b"error"


class UnreadableError(Exception):
    """What came through the socket, or should go, is not what it must be."""


def send_request(
    connection: Connection[bytes, bytes], message: Message, context: Context
) -> None:
    """Send a message and its context.

    Raises
    ------
    UnreadableError
        If they are more than protobuf can hold (2 GB).
    OSError
        If the worker is gone.
    """
    try:
        frames = [
            message_to_proto(message).SerializeToString(),
            context_to_proto(context).SerializeToString(),
        ]
    except Exception as error:
        raise UnreadableError(f"the message cannot be handed on: {error}") from error
    for frame in frames:
        connection.send_bytes(frame)


def receive_request(connection: Connection[bytes, bytes]) -> tuple[Message, Context]:
    """Receive a message and its context.

    Raises
    ------
    UnreadableError
        If it is neither.
    EOFError, OSError
        If the message's process is gone.
    """
    frames = connection.recv_bytes(), connection.recv_bytes()
    try:
        return (
            message_from_proto(ProtoMessage.FromString(frames[0])),
            context_from_proto(ProtoContext.FromString(frames[1])),
        )
    except Exception as error:  # protobuf's own, or one of a class it filled
        raise UnreadableError(f"this is no message: {error}") from error


def pack_reply(reply: Message, context: Context) -> list[bytes]:
    """Return the frames of a reply and of the context's state as it is now."""
    return [
        REPLY,
        message_to_proto(reply).SerializeToString(),
        recorddict_to_proto(context.state).SerializeToString(),
    ]


def pack_error(error: Exception) -> list[bytes]:
    """Return the frames of an error."""
    told = {
        "module": type(error).__module__,
        "class": type(error).__qualname__,
        "text": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    return [ERROR, json.dumps(told).encode()]


def read_answer(
    connection: Connection[bytes, bytes], context: Context
) -> Message | Exception:
    """Receive an answer; of a reply, put the new state into the context.

    Parameters
    ----------
    connection : Connection
        From the worker, which was sent a request.
    context : Context
        Its ``state`` is replaced once all has arrived.

    Returns
    -------
    Message or Exception
        The reply, or the error that handling the message raised.

    Raises
    ------
    UnreadableError
        If it is neither.
    EOFError, OSError
        If the worker is gone.
    """
    kind = connection.recv_bytes()
    if kind not in (REPLY, ERROR):
        raise UnreadableError(f"its answer began with {kind[:20]!r}")
    frames = [connection.recv_bytes() for _ in range(2 if kind == REPLY else 1)]
    try:
        if kind == ERROR:
            return _error_from(json.loads(frames[0]))
        reply = message_from_proto(ProtoMessage.FromString(frames[0]))
        state = recorddict_from_proto(ProtoRecordDict.FromString(frames[1]))
    except Exception as error:
        raise UnreadableError(f"its answer cannot be read: {error}") from error
    context.state = state
    return reply


def _error_from(told: dict[str, str]) -> Exception:
    """Make an error of the class and text that were told.

    Classes of this package and of Python are looked up; any other is made anew under its
    name, since to import its module may cost what the worker is there to save.
    """
    module, name, text = told["module"], told["class"], told["text"]
    homes = {errors.__name__: errors, builtins.__name__: builtins}
    made = None
    found = getattr(homes.get(module), name, None)
    if isinstance(found, type) and issubclass(found, Exception):
        with contextlib.suppress(Exception):  # some take more than a text
            made = found(text)
    if made is None or str(made) != text:  # e.g. a KeyError quotes its text once more
        body = {"__module__": module, "__qualname__": name, "__str__": lambda _: text}
        made = type(name.rpartition(".")[2], (Exception,), body)(text)
    made.add_note(f"In the owner's worker:\n{told['traceback']}")
    return made
