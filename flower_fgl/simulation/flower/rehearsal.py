"""A SuperLink and the SuperNodes of several data owners on this machine.

All programs listen on free ports of 127.0.0.1, and all their files are in one folder. The
deployment guide describes the same commands for several machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import tomli_w

from flower_fgl.core.config import pyproject_table
from flower_fgl.core.errors import RunError
from flower_fgl.core.node_settings import node_config_text
from flower_fgl.core.options import Scalar
from flower_fgl.methods import METHODS
from flower_fgl.runs.files import ENDED, ROUNDS, OnRound, read_lines, status_of
from flower_fgl.simulation.flower.certificates import make_certificates
from flower_fgl.simulation.flower.flower_simulation import write_app_folder
from flower_fgl.simulation.flower.superlink import (
    FLOWER_SETTINGS,
    PROGRAMS,
    find_program,
    free_port,
    tail,
)
from flower_fgl.simulation.flower.supervisor import die_with_parent

__all__ = ["Rehearsal"]

CONNECTION = "federation"
"""Name of the SuperLink connection in the home's ``config.toml``."""
START_SECONDS = 60.0
LAST_SECONDS = 10.0
"""Seconds for which the processes may end by themselves."""
ASK_SECONDS = 10.0
"""Seconds between two questions to Flower for the status of a run without a folder."""
WARNING = re.compile(r"^WARNING *: *(.+)$", re.MULTILINE)
ENVIRONMENT = {
    **FLOWER_SETTINGS,
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds; 1 by default
    "RAY_ADDRESS": "local",
    "OMP_NUM_THREADS": "1",
}


class Rehearsal:
    """Processes of one rehearsal, and the new or empty folder for all their files.

    A context manager: at the end of the block all processes end. With ``tls`` connections
    are encrypted and SuperNodes authenticated. An owner's worker process ends after
    ``worker_idle`` seconds without a message; 0 starts a new process for each message. A
    RunError is raised if Flower's programs are not beside this Python.
    """

    def __init__(
        self, folder: Path, owners: Sequence[str], *, tls: bool, worker_idle: int = 600
    ) -> None:
        find_program("flower-superlink")
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise RunError(f"{folder} is not empty: choose a new folder.")
        self.folder = folder
        self.owners = tuple(owners)
        self.tls = tls
        self.worker_idle = worker_idle
        self.address = f"127.0.0.1:{free_port()}"
        self.keys = folder / "keys"
        self.run_folder = folder / "server" / "run"
        home = folder / "flwr"
        path = os.pathsep.join([str(PROGRAMS), os.environ.get("PATH", "")])
        self.environment = {
            **os.environ, **ENVIRONMENT, "FLWR_HOME": str(home), "PATH": path
        }  # fmt: skip
        self.processes: list[subprocess.Popen[bytes]] = []
        home.mkdir(parents=True)
        connection: dict[str, object] = {"address": self.address}
        if tls:
            connection["root-certificates"] = str(self.keys / "ca.crt")
        else:
            connection["insecure"] = True
        settings = {"superlink": {CONNECTION: connection}}
        (home / "config.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
        self.app = write_app_folder(
            folder / "flower-fgl", config=pyproject_table(METHODS)
        )

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def command(self, *arguments: str, timeout: float = 120) -> str:
        """Run a program and return its output, or raise a RunError."""
        try:
            done = subprocess.run(
                [str(PROGRAMS / arguments[0]), *arguments[1:]],
                env=self.environment,
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired as error:
            raise RunError(
                f"`{' '.join(arguments)}` did not end within {timeout:g} s."
            ) from error
        if done.returncode:
            raise RunError(
                f"`{' '.join(arguments)}` failed:\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def start(self, log: str, cwd: Path, *arguments: str) -> None:
        """Start a program with a log file; on Linux it ends with this process."""
        cwd.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{log}.log").open("wb") as output:
            self.processes.append(
                subprocess.Popen(
                    [str(PROGRAMS / arguments[0]), *arguments[1:]],
                    env=self.environment,
                    cwd=cwd,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            )

    def start_superlink(self) -> None:
        """Start the SuperLink, wait until it listens, and register the owners' keys."""
        host, port = self.address.split(":")
        security = ["--insecure"]
        if self.tls:
            make_certificates(self.keys, self.owners)
            security = [
                "--ssl-ca-certfile", str(self.keys / "ca.crt"),
                "--ssl-certfile", str(self.keys / "server.pem"),
                "--ssl-keyfile", str(self.keys / "server.key"),
                "--enable-supernode-auth",
            ]  # fmt: skip
        self.start(
            "superlink", self.folder / "server",
            "flower-superlink", *security, "--host", host, "--port", port,
        )  # fmt: skip
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.processes[-1].poll() is None:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, int(port)), timeout=1),
            ):
                break
            time.sleep(0.2)
        else:
            log = self.folder / "superlink.log"
            raise RunError(f"The SuperLink does not listen, see {log}:\n{tail(log)}")
        for owner in self.owners if self.tls else ():
            public = str(self.keys / f"{owner}.pub")
            self.command("flwr", "supernode", "register", public, CONNECTION)

    def start_owner(self, owner: str, graph: Path) -> None:
        """Start one owner's SuperNode with a graph file or a CSV folder."""
        security = ["--insecure"]
        if self.tls:
            security = [
                "--root-certificates", str(self.keys / "ca.crt"),
                "--auth-supernode-private-key", str(self.keys / f"{owner}.key"),
            ]  # fmt: skip
        node = node_config_text(
            {"graph": str(graph), "name": owner, "worker-idle": self.worker_idle}
        )
        self.start(
            owner, self.folder / "owners" / owner,
            "flower-supernode", *security, "--superlink", self.address,
            "--host", "127.0.0.1", "--port", str(free_port()), "--node-config", node,
        )  # fmt: skip

    def submit(self, values: Mapping[str, Scalar]) -> str:
        """Submit a run in the folder ``server/run`` and return its ID."""
        file = self.folder / "run-config.toml"
        chosen = {"clients": len(self.owners), "run-dir": str(self.run_folder)}
        file.write_text(tomli_w.dumps({**chosen, **values}), encoding="utf-8")
        words = ["run", str(self.app), CONNECTION, "--run-config", str(file)]
        answer = self.command("flwr", *words, "--format", "json")
        return str(json.loads(answer[answer.index("{") :])["run-id"])

    def run(
        self,
        values: Mapping[str, Scalar],
        timeout: float,
        on_round: OnRound | None = None,
    ) -> Path:
        """Submit a run and wait until it completes; return its folder with ``run.log``."""
        run_id = self.submit(values)
        begin = time.monotonic()
        end, asked = begin + timeout, begin
        seen, reason = 0, f"it did not end within {timeout:g} s"
        while time.monotonic() < end:
            rows = read_lines(self.run_folder / ROUNDS)
            if on_round is not None:
                for row in rows[seen:]:
                    on_round(row)
            seen = len(rows)
            if status_of(self.run_folder) in ENDED:
                reason = f"it {status_of(self.run_folder)}"
                break
            if any(process.poll() is not None for process in self.processes):
                reason = "the SuperLink or a SuperNode ended"
                break
            if not self.run_folder.exists() and time.monotonic() > asked + ASK_SECONDS:
                words = ["list", CONNECTION, "--run-id", run_id, "--format", "json"]
                answer = self.command("flwr", *words)
                (listed,) = json.loads(answer[answer.index("{") :])["runs"]
                if str(listed["status"]).startswith("finished"):
                    reason = "it ended before its first round"
                    break
                asked = time.monotonic()
            time.sleep(0.5)
        log = self.folder / "run.log"
        with contextlib.suppress(RunError):  # the SuperLink may have ended
            log.write_text(self.command("flwr", "log", run_id, CONNECTION, "--show"))
        if status_of(self.run_folder) != "completed":
            raise RunError(
                f"The run did not complete: {reason}. See the logs in {self.folder}. End "
                f"of the run's log:\n{tail(log)}"
            )
        return self.run_folder

    def warnings(self) -> list[str]:
        """Return the warnings of the run, e.g. of an owner in another unit."""
        text = tail(self.folder / "run.log", lines=10_000)
        return list(dict.fromkeys(WARNING.findall(text)))

    def stop(self) -> None:
        """End all started processes and their descendants, by process ID."""
        family = []
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                parent = psutil.Process(process.pid)
                family += [*parent.children(recursive=True), parent]
        for process in self.processes:
            process.terminate()  # lets a SuperNode disconnect properly
        _, living = psutil.wait_procs(family, timeout=LAST_SECONDS)
        for member in living:
            with contextlib.suppress(psutil.Error):
                member.kill()
        for process in self.processes:
            process.wait(timeout=20)
