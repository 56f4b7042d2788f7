"""The worker: handles one owner's messages, keeping the graph and all else in between.

It ends after ``worker-idle`` seconds without a message, when its SuperNode is gone, and on
SIGTERM. What it prints and logs goes where the SuperNode's own lines go.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from flower_fgl.client_apps.worker.socket_path import ParentProcess

__all__ = ["main"]

POLL_SECONDS = 1.0


def main(arguments: list[str]) -> None:
    """Listen, let the starter go on, and handle messages; do nothing if another does.

    Parameters
    ----------
    arguments : list of str
        The socket's path, ``worker-idle``, and the number and start of the SuperNode.
    """
    address, master = (
        Path(arguments[0]),
        ParentProcess(int(arguments[2]), float(arguments[3])),
    )
    lock = _take_lock(address.with_suffix(".lock"))
    if lock is None:
        return
    address.unlink(missing_ok=True)  # of one that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(address))
    listener.listen()
    if os.fork():
        os._exit(0)  # whoever waits for this process finds the socket
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Thread(target=_watch, args=(master, address), daemon=True).start()
    # here and not above: who starts a worker waits for the socket, not for Flower; and a
    # process forks before its libraries have threads
    from flower_fgl.client_apps.worker.server import serve

    try:
        serve(listener, float(arguments[1]))
    finally:
        listener.close()
        _clear(address)
        os.close(lock)


def _take_lock(path: Path) -> int | None:
    """Hold a file that goes free when this process ends; ``None`` if another holds it."""
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
        os.close(file)  # whoever held it has just removed it


def _watch(master: ParentProcess, address: Path) -> None:
    """End this process, whatever it does, when its SuperNode is gone."""
    while master.is_alive():
        time.sleep(POLL_SECONDS)
    _clear(address)
    os._exit(0)


def _clear(address: Path) -> None:
    """Remove the socket and its lock, which this process still holds."""
    for path in (address, address.with_suffix(".lock")):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
