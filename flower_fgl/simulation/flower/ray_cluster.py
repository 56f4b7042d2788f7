"""Check that the Ray cluster of ``RAY_ADDRESS`` answers, before a run joins it.

Ray waits for minutes for a cluster that has ended, and its error then names neither the
variable nor the address.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path

from flower_fgl.core.errors import RunError
from flower_fgl.simulation.resources import on_cluster

__all__ = ["REMEDY", "require_cluster"]

CONNECT_SECONDS = 10.0
"""Seconds within which the cluster must answer."""
REMEDY = (
    "Unset RAY_ADDRESS, or set RAY_ADDRESS=local, to run without a cluster; or start the "
    "cluster, and set RAY_ADDRESS to the host and port that `ray start` prints."
)
_PAUSE = 0.2
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""Beginning of an HTTP/2 connection, which every gRPC server answers with a frame of
settings (RFC 9113, section 3.4)."""
_SETTINGS = 4  # type of that frame, its fourth byte


def require_cluster(environment: Mapping[str, str]) -> None:
    """Raise a RunError if ``RAY_ADDRESS`` is no address, or nothing answers there.

    ``environment`` is that of the process that joins the cluster, which has ten seconds
    to answer.
    """
    if not on_cluster(environment):
        return
    text = environment["RAY_ADDRESS"]
    address = text
    if text == "auto":  # Ray reads the address of the last cluster from a file
        file = Path(environment.get("RAY_TMPDIR") or "/tmp", "ray/ray_current_cluster")
        if not file.is_file():
            return  # without it Ray searches the processes, and fails at once
        address = file.read_text(encoding="utf-8").strip()
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise RunError(
            f'RAY_ADDRESS = "{text}" is no address of a Ray cluster, HOST:PORT. {REMEDY}'
        )
    end = time.monotonic() + CONNECT_SECONDS
    has_tls = environment.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    while True:
        try:
            left = max(end - time.monotonic(), _PAUSE)
            _connect((host.strip("[]"), int(port)), left, has_tls=has_tls)
            return
        except (OSError, OverflowError) as error:
            if time.monotonic() + _PAUSE < end:
                time.sleep(_PAUSE)
                continue
            where = "" if address == text else f" ({address})"
            raise RunError(
                f'RAY_ADDRESS = "{text}"{where}, but no Ray cluster answers there within '
                f"{CONNECT_SECONDS:g} s: {error}. {REMEDY}"
            ) from error


def _connect(address: tuple[str, int], seconds: float, *, has_tls: bool) -> None:
    """Raise an OSError unless a gRPC server answers; with TLS unless any server does."""
    with socket.create_connection(address, timeout=seconds) as connection:
        if has_tls:
            return
        connection.sendall(_HELLO)
        begin = connection.recv(9, socket.MSG_WAITALL)
        if len(begin) < 9 or begin[3] != _SETTINGS:
            raise OSError("the program that listens there is not Ray")
