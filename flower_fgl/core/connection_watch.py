"""End a ServerApp whose SuperLink no longer answers, or whose run was stopped.

Flower retries a call to a SuperLink for ever, also if that was killed. After ``flwr
stop`` the ServerApp gets a signal with its next call; a call that is under way may fail
by another error.
"""

import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from flower_fgl.core.errors import RunError

__all__ = ["prefer_stop", "runtime_address", "watch_connection"]

log = logging.getLogger(__name__)
GIVE_UP_SECONDS = 60.0
"""A SuperLink that was restarted with its database can be reached again by then."""
PROBE_SECONDS = 5.0
SIGNAL_SECONDS = 1.0
"""Seconds for which a stopped ServerApp waits for Flower's signal."""


def runtime_address(arguments: Sequence[str]) -> tuple[str, int] | None:
    """Return host and port of the SuperLink from ``sys.argv``, ``None`` without them."""
    for word, value in zip(arguments, [*arguments[1:], ""], strict=False):
        name, equals, rest = word.partition("=")
        if name == "--runtime-api-address":
            host, _, port = (rest if equals else value).rpartition(":")
            host = host.rpartition("//")[2].strip("[]")
            return (host, int(port)) if host and port.isdigit() else None
    return None


@contextlib.contextmanager
def watch_connection(
    address: tuple[str, int] | None,
    *,
    give_up: float = GIVE_UP_SECONDS,
    every: float = PROBE_SECONDS,
) -> Iterator[None]:
    """Raise a RunError inside the block once the SuperLink cannot be reached any more.

    A thread opens a TCP connection every ``every`` seconds. When that has failed for
    ``give_up`` seconds, it interrupts the main thread, wherever that waits. Nothing is
    watched without an address, outside the main thread, or where threads cannot get
    signals.
    """
    main = threading.main_thread()
    can_interrupt = hasattr(signal, "pthread_kill")
    if address is None or not can_interrupt or threading.current_thread() is not main:
        yield
        return
    done, where = threading.Event(), f"{address[0]}:{address[1]}"

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not done.is_set():
            done.set()
            raise RunError(
                f"The SuperLink at {where} could not be reached for {give_up:g} s: it was "
                "killed, or the network is down. Start it again, then resume the run "
                "from its last checkpoint (docs/resume.md)."
            )

    def watch() -> None:
        last = time.monotonic()
        while not done.wait(every):
            try:
                socket.create_connection(address, timeout=every).close()
            except OSError as error:
                away = time.monotonic() - last
                log.warning("The SuperLink at %s does not answer: %s", where, error)
                if away >= give_up and not done.is_set():
                    signal.pthread_kill(main.ident or 0, signal.SIGUSR1)
                    return
            else:
                last = time.monotonic()

    before = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=watch, name="superlink-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def prefer_stop(call: Callable[[], object]) -> Iterator[None]:
    """Let Flower's signal end a stopped run (SystemExit) before an error of Flower does.

    ``flwr stop`` deletes the messages of the run, so that sending some fails. ``call``
    calls the SuperLink: if the run was stopped, Flower sends the signal then.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("flwr", "httpx"):
            try:
                call()
            except Exception:  # refused: another thread of Flower sends the signal
                time.sleep(SIGNAL_SECONDS)
        raise
