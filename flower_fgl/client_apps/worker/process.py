"""The worker process, which keeps a data owner's graph in memory between messages.

The worker ends after ``worker-idle`` seconds without a message, when its SuperNode has
ended, and on SIGTERM. Its output and log go to the output of the SuperNode.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from flower_fgl.client_apps.worker.socket_path import ParentProcess

if TYPE_CHECKING:
    from flower_fgl.client_apps.dispatch import Dispatcher

__all__ = ["main"]

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0


def main(arguments: list[str]) -> None:
    """Listen on the socket, release the starting process, and handle messages.

    If another worker already holds the socket, return at once. The arguments are the path
    of the socket, ``worker-idle`` in seconds, and the SuperNode's process id and its
    start time in seconds since 1970.
    """
    address = Path(arguments[0])
    parent = ParentProcess(int(arguments[2]), float(arguments[3]))
    lock = _take_lock(address.with_suffix(".lock"))
    if lock is None:
        return
    address.unlink(missing_ok=True)  # left by a worker that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(address))
    listener.listen()
    if os.fork():
        os._exit(0)  # the starting process waits for this one and finds the socket
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Thread(target=_watch, args=(parent, address), daemon=True).start()
    try:
        _serve(listener, float(arguments[1]))
    finally:
        listener.close()
        _clear(address)
        os.close(lock)


def _serve(listener: socket.socket, idle: float) -> None:
    """Handle messages one after the other until none arrives for ``idle`` seconds."""
    # imported late: the starting process waits for the socket only, not for this import;
    # and the fork must happen before a library starts threads
    from flower_fgl.client_apps.worker.wire import TAKEN, UnreadableError

    handler: Dispatcher | None = None
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


def _answer(
    connection: Connection[bytes, bytes], handler: Dispatcher | None
) -> Dispatcher:
    """Handle one message; create the handler, with this process's caches, for the first."""
    from flower_fgl.client_apps.worker.wire import pack_answer, receive_request

    message, context = receive_request(connection)
    if handler is None:
        # imported late: it loads torch, and the first message must be accepted at once
        from flower_fgl.client_apps.dispatch import Dispatcher

        handler = Dispatcher()
    try:
        frames = pack_answer(handler(message, context), context)
    except Exception as error:
        frames = pack_answer(error, context)
    for frame in frames:
        connection.send_bytes(frame)
    return handler


def _take_lock(path: Path) -> int | None:
    """Lock a file until this process ends; ``None`` if another process holds it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        except BlockingIOError:
            os.close(file)
            return None
        except FileNotFoundError:
            pass
        os.close(file)  # its former holder has just removed it


def _watch(parent: ParentProcess, address: Path) -> None:
    """End this process, even inside a message, when its SuperNode has ended."""
    while parent.is_alive():
        time.sleep(POLL_SECONDS)
    _clear(address)
    os._exit(0)


def _clear(address: Path) -> None:
    """Remove the socket and its lock file, while this process still holds the lock."""
    for path in (address, address.with_suffix(".lock")):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
