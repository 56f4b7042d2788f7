"""The message process: it sends its message to the data owner's worker.

This module must not import torch, nor any module that does.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path

from flwr.app import Context, Message

from flower_fgl.client_apps.worker.socket_path import (
    ParentProcess,
    find_parent_process,
    worker_socket,
)
from flower_fgl.client_apps.worker.wire import (
    TAKEN,
    UnreadableError,
    read_answer,
    send_request,
)
from flower_fgl.core.errors import RunError
from flower_fgl.core.options import Scalar
from flower_fgl.runs.state_files import kept_states

__all__ = ["ask_worker", "idle_seconds"]

log = logging.getLogger(__name__)
TRIES = 5
START_SECONDS = 60.0
BUSY_SECONDS = 5.0
INSTALLING = "--allow-runtime-dependency-installation"


def idle_seconds(node: Mapping[str, Scalar]) -> float:
    """Return the node config's ``worker-idle``; raise RunError if it is not a number ≥ 0.

    These are the seconds without a message after which the worker ends; 0 for no worker.
    """
    idle = node.get("worker-idle", 0)
    if isinstance(idle, bool) or not isinstance(idle, int | float) or not idle >= 0:
        raise RunError(
            "The node config's worker-idle must be a number of seconds, 0 for no worker, "
            f"got {idle!r}. Start the SuperNode with --node-config 'worker-idle=600 …'."
        )
    return float(idle)


def ask_worker(
    message: Message,
    context: Context,
    *,
    idle: float,
    instead: Callable[[Message, Context], Message],
) -> Message:
    """Handle a message in the data owner's worker, or by ``instead`` in this process.

    ``idle`` is ``worker-idle`` in seconds. The context's state is replaced by the one
    that the worker returns. A RunError has the text of the worker's error for the message,
    or means that the worker ended after it had stored the client's state.

    Notes
    -----
    1. This process handles the message only if the worker stored no state of it. A second
       handling after that would train twice in one round, or draw a second set of secrets.
    2. A state in the context arrives with the reply or not at all. A state in ``state-dir``
       is replaced by one rename at the end of the handling. So unchanged files prove that
       the message left nothing but the data owner's model, which is written again.
    """
    kept = partial(kept_states, context.run_id, context.node_config, context.run_config)
    before = kept()
    try:
        parent = find_parent_process()
        with reach_worker(context.node_config, parent, idle) as connection:
            send_request(connection, message, context)
            answer = read_answer(connection, context)
    except (EOFError, OSError, subprocess.SubprocessError, UnreadableError) as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        if before != kept():
            raise RunError(
                f"The node's worker ended ({reason}) after it had stored the client's "
                "state and before its reply was read. The client continues with the next "
                "message."
            ) from error
        log.warning("The message is handled without a worker: %s", reason)
        return instead(message, context)
    if isinstance(answer, Exception):
        raise answer
    return answer


def reach_worker(
    node: Mapping[str, Scalar], parent: ParentProcess, idle: float
) -> Connection[bytes, bytes]:
    """Connect to the data owner's worker, started if necessary; it accepts a message.

    It raises OSError without Unix domain sockets, if Flower installs packages per
    message, or if no worker listens or it is busy; SubprocessError if none can be
    started; UnreadableError if the process that listens is not a worker of this version.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise OSError("this system has no Unix domain sockets: remove worker-idle")
    if INSTALLING in sys.argv:
        raise OSError(
            "Flower installs packages again for every message: set "
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 or remove worker-idle"
        )
    address = worker_socket(node, parent)
    has_started = False
    for trial in range(TRIES):
        try:
            connection = Client(str(address), family="AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            if trial:
                time.sleep(0.1)  # another process starts a worker, or a worker ends
            _start(address, parent, idle)
            has_started = True
            continue
        try:
            # a new worker imports torch before it accepts its first message
            if not connection.poll(START_SECONDS if has_started else BUSY_SECONDS):
                raise TimeoutError("the worker is busy with another message")
            if connection.recv_bytes() != TAKEN:
                raise UnreadableError("no worker of this version listens")
        except (EOFError, ConnectionResetError):  # the worker has just ended
            connection.close()
        except Exception:
            connection.close()
            raise
        else:
            return connection
    raise OSError(f"no worker listens at {address}")


def _start(address: Path, parent: ParentProcess, idle: float) -> None:
    """Start a worker; when this returns, that worker or another one listens."""
    found = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    command = [
        sys.executable, "-P", "-m", "flower_fgl.client_apps.worker.process", str(address),
        str(idle), str(parent.pid), repr(parent.started),
    ]  # fmt: skip
    subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": found},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        timeout=START_SECONDS,
        check=True,
    )
