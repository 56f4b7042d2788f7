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

__all__ = ["TAKEN", "UnreadableError", "pack_error", "pack_reply", "read_answer"]
__all__ += ["receive_request", "send_request"]

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
    frames = connection.recv_bytes(), connection.recv_bytes()
    try:
        return (
            flower_internals.message_from_proto(
                flower_internals.ProtoMessage.FromString(frames[0])
            ),
            flower_internals.context_from_proto(
                flower_internals.ProtoContext.FromString(frames[1])
            ),
        )
    except Exception as error:  # raised by protobuf or by Flower's conversion
        raise UnreadableError(f"the request is not a message: {error}") from error


def pack_reply(reply: Message, context: Context) -> list[bytes]:
    """Return the frames of a reply and of the context's current state."""
    return [
        REPLY,
        flower_internals.message_to_proto(reply).SerializeToString(),
        flower_internals.recorddict_to_proto(context.state).SerializeToString(),
    ]


def pack_error(error: Exception, context: Context) -> list[bytes]:
    """Return the frames of an error and of the context's current state."""
    text = str(error) if isinstance(error, FglError) else repr(error)
    state = flower_internals.recorddict_to_proto(context.state).SerializeToString()
    return [ERROR, text.encode(), state]


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
    frames = [connection.recv_bytes() for _ in range(2)]
    answer: Message | Exception
    try:
        if kind == ERROR:
            answer = RunError(frames[0].decode())
        else:
            answer = flower_internals.message_from_proto(
                flower_internals.ProtoMessage.FromString(frames[0])
            )
        state = flower_internals.recorddict_from_proto(
            flower_internals.ProtoRecordDict.FromString(frames[1])
        )
    except Exception as error:
        raise UnreadableError(f"the worker's answer is malformed: {error}") from error
    context.state = state
    return answer
