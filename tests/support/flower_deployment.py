"""A SuperLink and SuperNodes on free loopback ports, which are always stopped."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from flower_fgl.core.config import pyproject_table
from flower_fgl.methods import METHODS
from flower_fgl.simulation.flower.flower_simulation import write_app_folder

PROGRAMS = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Deployment:
    """One SuperLink, and one SuperNode per node config.

    ``client_module`` is the source of a module whose ClientApp ``app`` the SuperNodes run
    instead of the package's. With ``keeps_state`` the SuperLink has a database.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[str],
        *,
        client_module: str = "",
        keeps_state: bool = False,
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([str(PROGRAMS), os.environ.get("PATH", "")]),
        }
        home = folder / "flwr"
        home.mkdir(parents=True)
        connection = {"address": f"127.0.0.1:{self.port}", "insecure": True}
        (home / "config.toml").write_text(
            tomli_w.dumps({"superlink": {"default": "dep", "dep": connection}})
        )
        chosen = {}
        if client_module:
            (folder / "other_client.py").write_text(client_module)
            places = [str(folder), os.environ.get("PYTHONPATH", "")]
            self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
            chosen = {"client_app": "other_client:app"}
        self.app = write_app_folder(
            folder / "flower-fgl", config=pyproject_table(METHODS), **chosen
        )
        self.keeps_state = keeps_state
        self.superlink = self.start_superlink()
        self.nodes = [self.start_node(config) for config in nodes]

    def start_superlink(self) -> subprocess.Popen[bytes]:
        """Start a SuperLink on the port of this deployment."""
        kept = ["--database", str(self.folder / "superlink.db")]
        process = self.start(
            "flower-superlink", "--insecure", "--host", "127.0.0.1",
            "--port", str(self.port), *(kept if self.keeps_state else []),
        )  # fmt: skip
        self._wait_for_port()
        return process

    def start_node(self, config: str) -> subprocess.Popen[bytes]:
        """Start a SuperNode."""
        return self.start(
            "flower-supernode", "--insecure",
            "--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1",
            "--port", str(free_port()), "--node-config", config,
        )  # fmt: skip

    def start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{program}-{len(self.processes)}.log").open("wb")
        self.processes.append(
            subprocess.Popen(
                [str(PROGRAMS / program), *arguments],
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
        log.close()
        return self.processes[-1]

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a program and its descendants without warning, as a power failure would."""
        for member in family_of(process):
            with contextlib.suppress(psutil.Error):
                member.kill()
        process.wait(timeout=20)

    def wait_for_round(self, folder: Path, number: int, seconds: float = 200) -> None:
        """Wait until the run folder contains a round."""
        end = time.monotonic() + seconds
        lines = folder / "rounds.jsonl"
        while not lines.exists() or lines.read_bytes().count(b"\n") < number:
            if time.monotonic() > end:
                raise TimeoutError(self.logs())
            time.sleep(0.1)

    def wait_for_end(self, run_id: str, seconds: float = 400) -> str:
        """Wait for the end of a run, return Flower's status."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            status = self.status(run_id)
            if status.startswith("finished"):
                return status
            time.sleep(1)
        raise TimeoutError(self.logs())

    def _wait_for_port(self, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), timeout=1),
            ):
                return
            time.sleep(0.2)
        raise TimeoutError(self.logs())

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def flwr(self, *arguments: str) -> Any:
        done = subprocess.run(
            [str(PROGRAMS / "flwr"), *arguments, "--format", "json"],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def submit(self, values: Mapping[str, Any]) -> str:
        """Start a run, return its number."""
        pairs = " ".join(f"{quoted(k)}={json.dumps(v)}" for k, v in values.items())
        answer = self.flwr("run", str(self.app), "dep", "--run-config", pairs)
        return str(answer["run-id"])

    def run(self, values: Mapping[str, Any], seconds: float = 400) -> str:
        """Submit a run, wait for its end, return Flower's status."""
        return self.wait_for_end(self.submit(values), seconds)

    def status(self, run_id: str) -> str:
        listed = self.flwr("list", "dep", "--run-id", run_id)
        return str(listed["runs"][0]["status"])

    def log(self, run_id: str) -> str:
        """Return the log of a run, as ``flwr run --stream`` shows it."""
        done = subprocess.run(
            [str(PROGRAMS / "flwr"), "log", run_id, "dep", "--show"],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def stop_run_in_round(self, values: Mapping[str, Any], seconds: float = 400) -> str:
        """Submit a run, stop it once a round is over, return Flower's status."""
        run_id = self.submit(values)
        self.wait_for_round(Path(values["run-dir"]), 1, seconds)
        self.flwr("stop", run_id, "dep")
        return self.status(run_id)

    def stop(self) -> None:
        """Kill every process by its pid, after collecting all descendants."""
        family: list[psutil.Process] = []
        for process in self.processes:
            family += family_of(process)
        for member in family:
            with contextlib.suppress(psutil.Error):
                member.kill()
        for process in self.processes:
            process.wait(timeout=20)


def quoted(key: str) -> str:
    """Quote the method in a key: Flower reads no "+" outside quotes."""
    method, _, setting = key.rpartition(".")
    return f'"{method}".{setting}' if "+" in method else key


def family_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return a program's descendants and itself, none if it has ended."""
    try:
        parent = psutil.Process(process.pid)
        return [*parent.children(recursive=True), parent]
    except psutil.Error:
        return []


def workers_of(supernode: int) -> list[psutil.Process]:
    """Return the running workers of the SuperNode with this process id."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "flower_fgl.client_apps.worker.process"
        in (line := process.info["cmdline"] or [])
        and str(supernode) in line
    ]


def wait_until(is_so: Callable[[], object], seconds: float = 30) -> None:
    """Wait until a condition is true; fail after the given time."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextlib.contextmanager
def deployment(
    folder: Path, nodes: Sequence[str], **options: Any
) -> Iterator[Deployment]:
    """Start a deployment and stop it at the end of the block."""
    made = Deployment.__new__(Deployment)  # exists before the start, which may fail
    try:
        made.__init__(folder, nodes, **options)  # type: ignore[misc]
        yield made
    finally:
        made.stop()
