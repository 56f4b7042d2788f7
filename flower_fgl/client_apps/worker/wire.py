"""The bytes exchanged by a message process and the data owner's worker.

Frames in order, each sent with ``Connection.send_bytes``:

=========  ===========================================================================
sender     frames
=========  ===========================================================================
worker     ``taken``, at once: the worker is free for a message
process    the message, the context
worker     on success: ``reply``, the reply message, the context's state
worker     on error: ``error``, the error's text, the context's state
=========  ===========================================================================
"""

from __future__ import annotations

from multiprocessing.connection import Connection

from flwr.app import Context, Message

from flower_fgl.core import flower_internals
from flower_fgl.core.errors import FglError, RunError

__all__ = ["TAKEN", "UnreadableError", "pack_answer", "read_answer", "receive_request"]
__all__ += ["send_request"]

TAKEN, REPLY, ERROR = b"taken", b"reply", b"error"


class UnreadableError(Exception):
    """A message or reply cannot be written to, or read from, the socket's bytes."""


def send_request(
    connection: Connection[bytes, bytes], message: Message, context: Context
) -> None:
    """Send a message and its context; OSError if the worker has ended.

    Protobuf allows 2 GB: UnreadableError for more.
    """
    try:
        frames = [
            flower_internals.message_to_proto(message).SerializeToString(),
            flower_internals.context_to_proto(context).SerializeToString(),
        ]
    except Exception as error:
        raise UnreadableError(f"the message cannot be serialized: {error}") from error
    for frame in frames:
        connection.send_bytes(frame)


def receive_request(connection: Connection[bytes, bytes]) -> tuple[Message, Context]:
    """Receive a message and its context; UnreadableError if the bytes are neither."""
    message, context = connection.recv_bytes(), connection.recv_bytes()
    try:
        proto = flower_internals.ProtoContext.FromString(context)
        return _message_from(message), flower_internals.context_from_proto(proto)
    except Exception as error:  # raised by protobuf or by Flower's conversion
        raise UnreadableError(f"the request is not a message: {error}") from error


def pack_answer(answer: Message | Exception, context: Context) -> list[bytes]:
    """Return the frames of a reply or an error, and of the context's current state."""
    if isinstance(answer, Message):
        kind, body = (
            REPLY,
            flower_internals.message_to_proto(answer).SerializeToString(),
        )
    else:
        text = str(answer) if isinstance(answer, FglError) else repr(answer)
        kind, body = ERROR, text.encode()
    state = flower_internals.recorddict_to_proto(context.state).SerializeToString()
    return [kind, body, state]


def read_answer(
    connection: Connection[bytes, bytes], context: Context
) -> Message | Exception:
    """Receive a reply or an error, and replace the context's state after the last frame.

    UnreadableError if the bytes are neither; EOFError or OSError if the worker has ended.
    """
    kind = connection.recv_bytes()
    if kind not in (REPLY, ERROR):
        raise UnreadableError(
            f"the worker's answer must begin with reply or error, got {kind[:20]!r}"
        )
    body, state = connection.recv_bytes(), connection.recv_bytes()
    answer: Message | Exception
    try:
        answer = RunError(body.decode()) if kind == ERROR else _message_from(body)
        found = flower_internals.ProtoRecordDict.FromString(state)
        context.state = flower_internals.recorddict_from_proto(found)
    except Exception as error:
        raise UnreadableError(f"the worker's answer is malformed: {error}") from error
    return answer


def _message_from(frame: bytes) -> Message:
    """Read a message."""
    found = flower_internals.ProtoMessage.FromString(frame)
    return flower_internals.message_from_proto(found)
