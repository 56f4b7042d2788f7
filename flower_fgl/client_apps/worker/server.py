"""The loop of the worker, which handles one message at a time."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from flwr.app import Context, Message

from flower_fgl.client_apps.worker.wire import (
    TAKEN,
    UnreadableError,
    pack_error,
    pack_reply,
    receive_request,
)

__all__ = ["serve"]

Handler = Callable[[Message, Context], Message]
log = logging.getLogger(__name__)
POLL_SECONDS = 1.0


def serve(listener: socket.socket, idle: float) -> None:
    """Handle messages one after the other until none arrives for ``idle`` seconds."""
    handler: Handler | None = None
    listener.settimeout(min(POLL_SECONDS, idle))
    latest = time.monotonic()
    while time.monotonic() - latest < idle:
        try:
            accepted, _ = listener.accept()
        except TimeoutError:
            continue
        with Connection(accepted.detach()) as connection:
            try:
                connection.send_bytes(TAKEN)
                handler = _answer(connection, handler)
            except (EOFError, OSError, UnreadableError) as error:
                log.warning("The connection to a message's process failed: %r", error)
        latest = time.monotonic()


def _answer(connection: Connection[bytes, bytes], handler: Handler | None) -> Handler:
    """Handle one message; create the handler for the first one."""
    message, context = receive_request(connection)
    handler = handler or _new_handler()
    try:
        frames = pack_reply(handler(message, context), context)
    except Exception as error:
        frames = pack_error(error, context)
    for frame in frames:
        connection.send_bytes(frame)
    return handler


def _new_handler() -> Handler:
    """Return a handler with the caches of this process."""
    # imported late: it loads torch, and the first message must be accepted at once
    from flower_fgl.client_apps.dispatch import Dispatcher

    return Dispatcher()
