"""What the owner's worker does with messages: the arithmetic of a client, one at a time."""

from __future__ import annotations

import logging
import socket
import time
from multiprocessing.connection import Connection

from flower_fgl.client_app import DispatchingClientApp
from flower_fgl.client_apps.worker.wire import (
    TAKEN,
    UnreadableError,
    pack_error,
    pack_reply,
    receive_request,
)

__all__ = ["serve"]

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0


def serve(listener: socket.socket, idle: float) -> None:
    """Handle messages one after the other until none came for a while.

    Parameters
    ----------
    listener : socket
        Of the Unix domain; it listens.
    idle : float
        Seconds without a message after which this returns.
    """
    app: DispatchingClientApp | None = None
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
                app = _answer(connection, app)
            except (EOFError, OSError, UnreadableError) as error:
                log.warning("A message's process was lost: %r", error)
        latest = time.monotonic()


def _answer(
    connection: Connection[bytes, bytes], app: DispatchingClientApp | None
) -> DispatchingClientApp | None:
    """Handle one message, with a new ClientApp if there is none yet."""
    message, context = receive_request(connection)
    try:
        app = app or _new_app()
        frames = pack_reply(app(message, context), context)
    except Exception as error:
        frames = pack_error(error)
    for frame in frames:
        connection.send_bytes(frame)
    return app


def _new_app() -> DispatchingClientApp:
    """Return a ClientApp that handles everything in this process."""
    # here and not above: it imports torch, and the first message must be taken at once
    from flower_fgl.client_apps.runtime.session import Workplace

    return DispatchingClientApp(Workplace())
