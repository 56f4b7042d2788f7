"""A server whose SuperLink was killed ends with an error."""

from __future__ import annotations

import signal
import socket
import threading
import time

import pytest

from flower_fgl.core.connection_watch import runtime_address, watch_connection
from flower_fgl.core.errors import RunError


def listen() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ("--insecure --runtime-api-address 127.0.0.1:9091", ("127.0.0.1", 9091)),
        ("--runtime-api-address=fl.example.org:80 --token x", ("fl.example.org", 80)),
        ("--runtime-api-address https://host:443", ("host", 443)),
        ("--runtime-api-address [::1]:9091", ("::1", 9091)),
        ("--runtime-api-address host", None),
        ("--runtime-api-address", None),
        ("run", None),
    ],
)
def test_the_address_is_read_from_the_command_line(
    words: str, address: tuple[str, int] | None
) -> None:
    assert runtime_address(["flwr-serverapp", *words.split()]) == address


def test_a_server_that_listens_no_more_ends_the_block() -> None:
    server = listen()
    before = signal.getsignal(signal.SIGUSR1)
    clock = time.monotonic()

    def wait_as_flower_does() -> None:
        with watch_connection(server.getsockname(), give_up=0.4, every=0.1):
            time.sleep(1.0)
            server.close()
            threading.Event().wait(30)

    with pytest.raises(RunError, match=r"SuperLink at 127\.0\.0\.1:\d+ could not be"):
        wait_as_flower_does()
    assert 1.3 < time.monotonic() - clock < 15
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_short_absence_and_a_busy_main_thread_change_nothing() -> None:
    server = listen()
    address = server.getsockname()
    with watch_connection(address, give_up=5.0, every=0.05):
        server.close()
        time.sleep(0.3)
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        time.sleep(0.3)
    server.close()
    assert not [t for t in threading.enumerate() if t.name == "superlink-watch"]


def test_without_an_address_or_outside_the_main_thread_nothing_is_watched() -> None:
    with watch_connection(None):
        assert not [t for t in threading.enumerate() if t.name == "superlink-watch"]
    found: list[list[str]] = []

    def watch() -> None:
        with watch_connection(("127.0.0.1", 1)):
            found.append([t.name for t in threading.enumerate()])

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert "superlink-watch" not in found[0]
