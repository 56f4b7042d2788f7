"""How the process that Flower starts for a message has the owner's worker handle it.

Light: no torch here, and nothing that imports it.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
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
    """Return the node config's ``worker-idle``.

    Parameters
    ----------
    node : mapping of str to bool, int, float or str
        Node config.

    Returns
    -------
    float
        Seconds without a message after which the worker ends; 0: there is none.

    Raises
    ------
    RunError
        If it is no number or negative.
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
    """Have the owner's worker handle a message, and do it here where that fails.

    Parameters
    ----------
    message, context : Message, Context
        Flower's; the context's state is replaced by what the worker made of it.
    idle : float
        ``worker-idle``, in seconds.
    instead : callable
        Handles a message in this process.

    Returns
    -------
    Message
        The reply.

    Raises
    ------
    RunError
        If the worker died after it had kept the client's state of this message.
    Exception
        What handling the message raised, with class and text as they were.

    Notes
    -----
    1. A message is handled here only if nothing of it has been kept. The state that rides
       in the context comes back with the reply or not at all. A state in ``state-dir``
       is replaced by one rename at the end of the handling: as long as the files are
       those of before, the message has left no trace but the owner's model, which a
       second handling writes again, the same. Once they have changed, a second handling
       would train twice in one round, or draw a second set of secrets.
    """
    before = kept_states(context.run_id, context.node_config, context.run_config)
    try:
        master = find_parent_process()
        with reach_worker(context.node_config, master, idle) as connection:
            send_request(connection, message, context)
            answer = read_answer(connection, context)
    except (EOFError, OSError, subprocess.SubprocessError, UnreadableError) as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        if before != kept_states(
            context.run_id, context.node_config, context.run_config
        ):
            raise RunError(
                f"The node's worker ended ({reason}) after it had kept the client's "
                "state and before its reply was read. The client goes on with the next "
                "message."
            ) from error
        log.warning("The message is handled without a worker: %s", reason)
        return instead(message, context)
    if isinstance(answer, Exception):
        raise answer
    return answer


def reach_worker(
    node: Mapping[str, Scalar], master: ParentProcess, idle: float
) -> Connection[bytes, bytes]:
    """Connect to the owner's worker, which is started if there is none.

    Parameters
    ----------
    node : mapping of str to bool, int, float or str
        Node config.
    master : Master
        The owner's SuperNode.
    idle : float
        ``worker-idle``, in seconds.

    Returns
    -------
    Connection
        To a worker that has time now.

    Raises
    ------
    OSError, SubprocessError
        If none can be started, or it works on another message.
    UnreadableError
        If what listens is no worker.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise OSError("this system has no Unix domain sockets: leave worker-idle away")
    if INSTALLING in sys.argv:
        raise OSError(
            "Flower installs packages anew for every message: set "
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 or leave worker-idle away"
        )
    address = worker_socket(node, master)
    for trial in range(TRIES):
        try:
            connection = Client(str(address), family="AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            if trial:
                time.sleep(0.1)  # another process is about to start one, or one ends
            _start(address, master, idle)
            continue
        try:
            if not connection.poll(BUSY_SECONDS):
                raise TimeoutError("the worker is busy with another message")
            if connection.recv_bytes() != TAKEN:
                raise UnreadableError("no worker of this version listens")
        except (EOFError, ConnectionResetError):  # it ended just now
            connection.close()
        except Exception:
            connection.close()
            raise
        else:
            return connection
    raise OSError(f"no worker listens at {address}")


def _start(address: Path, master: ParentProcess, idle: float) -> None:
    """Start a worker; it, or another one, listens when this returns."""
    found = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    command = [
        sys.executable, "-P", "-m", "flower_fgl.client_apps.worker.process", str(address),
        str(idle), str(master.pid), repr(master.started),
    ]  # fmt: skip
    subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": found},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        timeout=START_SECONDS,
        check=True,
    )
