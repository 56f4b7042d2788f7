"""A private Flower home: starts and stops SuperLink, SuperExec and ``flwr``.

``flwr run`` submits a run to any SuperLink that listens on its port, and leaves a daemon
running. Here each launch starts one with its own folder, a free port on 127.0.0.1 and no
database; a keeper process (:mod:`flower_fgl.simulation.flower.supervisor`) ends all
processes, including those of Ray.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from flower_fgl.core.errors import RunError
from flower_fgl.simulation.flower.supervisor import die_with_parent
from flower_fgl.simulation.resources import on_cluster

__all__ = ["FLOWER_SETTINGS", "PROGRAMS", "FlowerHome", "find_program", "free_port"]
__all__ += ["tail"]

PROGRAMS = Path(sys.executable).parent

CONNECTION = "launch"
"""Name of the SuperLink connection in the home's ``config.toml``."""
_KEEPER = Path(__file__).with_name("supervisor.py")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

FLOWER_SETTINGS = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # no `uv sync` in each run
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
}
_DEFAULTS = {
    # By default ray.init() joins any Ray cluster that runs on this machine.
    "RAY_ADDRESS": "local",
    # Ray 2.60 shows all GPUs to workers that asked for none; before, this was the default.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    # Payloads up to 2 MB are sent inline: 60 ms less per message than Ray's store.
    "RAY_max_direct_call_object_size": "2000000",
    # Flower's default is 1 s until a run starts; 0.25 s costs 2 % of a core.
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
}


class FlowerHome:
    """Context manager for a SuperLink in a private folder below ``parent``.

    On exit all its processes end, and the folder is removed. The environment of this
    process is not changed: Ray variables of the user override the defaults of this
    module, and ``environment`` overrides all. Raises a RunError if Flower's programs are
    not installed beside this Python.
    """

    def __init__(self, parent: Path, environment: Mapping[str, str]) -> None:
        self._superlink = find_program("flower-superlink")
        self.folder = Path(tempfile.mkdtemp(prefix="flwr-", dir=parent.resolve()))
        self.ray_folder = Path(tempfile.mkdtemp(prefix="fgl-", dir=short_folder()))
        self.port = free_port()
        self.superlink_log = self.folder / "superlink.log"
        self._environment = flower_environment(
            self.folder, self.ray_folder, environment
        )
        self._keeper: subprocess.Popen[bytes] | None = None
        self._commands: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> FlowerHome:
        """Start the SuperLink's keeper in its own session, which Ctrl-C does not reach."""
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes; after a second Ctrl-C the keeper completes this."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None and keeper.stdin is not None:
            keeper.stdin.close()
        for command in self._commands:
            command.kill()
            command.wait()
        if keeper is not None:
            keeper.wait()
        shutil.rmtree(self.ray_folder, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        """Write the configuration, and start the keeper."""
        (self.folder / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        superlink = [self._superlink, "--insecure", "--simulation"]
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        keep = [sys.executable, "-P", str(_KEEPER), str(self.ray_folder)]
        with self.superlink_log.open("ab") as log:
            self._keeper = subprocess.Popen(
                [*keep, *superlink, *address],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        """Whether the SuperLink runs."""
        return self._keeper is not None and self._keeper.poll() is None

    @property
    def is_ready(self) -> bool:
        """Whether this SuperLink, and no other process, answers on the port."""
        superlink = self.find("flower-superlink")
        return superlink is not None and (
            _listens(superlink, self.port) and _is_healthy(self.port)
        )

    def find(self, name: str) -> psutil.Process | None:
        """Return the home's process of a program, running or ended, None without one.

        That is ``flower-superlink``; ``flower-superexec``, which starts runs; or
        ``flwr-simulation``, a started run.
        """
        if not self.is_alive or self._keeper is None:
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._keeper.pid).children(recursive=True):
                try:
                    words = process.cmdline()[:2]  # interpreter and script
                except psutil.ZombieProcess:  # its command line is gone
                    words = [process.name()]
                except psutil.Error:
                    continue
                if any(Path(word).name[:15] == name[:15] for word in words):
                    return process  # Linux truncates a zombie's name to 15 characters
        return None

    def flwr(self, arguments: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        """Start a ``flwr`` command that writes to a file; it ends with this home."""
        with output.open("wb") as file:
            command = subprocess.Popen(
                [find_program("flwr"), *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C does not reach it
                preexec_fn=die_with_parent,
            )
        self._commands.append(command)
        return command

    def crash_reports(self) -> str:
        """Return the last lines that the SuperLink and Ray's workers logged."""
        files = sorted(self.ray_folder.glob("ray/session_2*/logs/worker-*.err"))
        texts = [(f.name, tail(f, 20)) for f in [self.superlink_log, *files]]
        return "".join(f"\n--- {name}\n{text}\n" for name, text in texts if text)


def flower_environment(
    folder: Path, ray_folder: Path, extra: Mapping[str, str]
) -> dict[str, str]:
    """Build the environment of Flower's processes; ``extra`` overrides this process's."""
    env = _DEFAULTS | {k: v for k, v in os.environ.items() if v or k not in _DEFAULTS}
    env |= {**FLOWER_SETTINGS, **extra}
    env["FLWR_HOME"] = str(folder)
    env["PATH"] = os.pathsep.join([str(PROGRAMS), env.get("PATH", os.defpath)])
    if not on_cluster(env):
        env["RAY_TMPDIR"] = str(ray_folder)
    for key in ("NO_PROXY", "no_proxy"):  # a proxy cannot reach our 127.0.0.1
        env[key] = ",".join(filter(None, [env.get(key), "127.0.0.1", "localhost"]))
    return env


def tail(path: Path, lines: int = 40) -> str:
    """Return the last lines of a log without colours, "" if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 400 * lines))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(_COLOUR.sub("", text).rstrip().splitlines()[-lines:])


def short_folder() -> str | None:
    """Return a short parent folder for Ray's sockets: paths are limited to 103 bytes."""
    wanted = os.environ.get("RAY_TMPDIR") or "/tmp"
    return wanted if os.access(wanted, os.W_OK | os.X_OK) else None


def find_program(name: str) -> str:
    """Return the path of a program beside this Python; raise RunError if it is missing."""
    found = shutil.which(name, path=str(PROGRAMS))
    if found is None:
        raise RunError(
            f"{name} was not found in {PROGRAMS}, the folder of this Python. Install "
            "flower-fgl for it (pip install flower-fgl)."
        )
    return found


def free_port() -> int:
    """Return a TCP port on 127.0.0.1 that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(process: psutil.Process, port: int) -> bool:
    """Return whether ``process`` itself listens on ``port``."""
    with contextlib.suppress(psutil.Error):
        return any(
            c.status == psutil.CONN_LISTEN and c.laddr.port == port
            for c in process.net_connections(kind="tcp")
        )
    return False


def _is_healthy(port: int) -> bool:
    """Return whether a SuperLink answers on ``port``."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
