"""Rehearse a deployment on one machine: a SuperLink and three data owners.

python rehearse.py FOLDER [--tls] [--dataset cora] [--rounds 20] [--method fedavg]

Exports a partitioned graph as three graph files, checks them, starts a SuperLink and three
SuperNodes on free loopback ports, runs a method, predicts with each owner's model, and ends
all processes. With ``--tls`` the connections are encrypted, and the SuperLink only accepts
registered keys. docs/deployment.md explains the commands one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from certificates import make_certificates

APP = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent
OWNERS = ("hospital-a", "hospital-b", "hospital-c")
ENVIRONMENT = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds; 1 by default
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ADDRESS": "local",
    "OMP_NUM_THREADS": "1",
}


class Rehearsal:
    """Processes of one rehearsal, and the folder for all their files.

    Parameters
    ----------
    folder : Path
        Folder for configuration, keys, logs and results.
    tls : bool
        Whether connections are encrypted and SuperNodes authenticated.
    worker_idle : int
        Seconds without a message after which an owner's worker process ends; 0 starts a
        new process for each message.
    """

    def __init__(self, folder: Path, *, tls: bool, worker_idle: int = 600) -> None:
        self.folder = folder
        self.tls = tls
        self.worker_idle = worker_idle
        self.address = f"127.0.0.1:{free_port()}"
        self.keys = folder / "keys"
        home = folder / "flwr"
        path = os.pathsep.join([str(PROGRAMS), os.environ.get("PATH", "")])
        self.environment = {
            **os.environ, **ENVIRONMENT, "FLWR_HOME": str(home), "PATH": path
        }  # fmt: skip
        self.processes: list[subprocess.Popen[bytes]] = []
        home.mkdir(parents=True)
        lines = ["[superlink.federation]", f'address = "{self.address}"']
        lines.append(
            f'root-certificates = "{self.keys / "ca.crt"}"'
            if tls
            else "insecure = true"
        )
        (home / "config.toml").write_text("\n".join(lines) + "\n")

    def command(self, *arguments: str, timeout: float = 120) -> str:
        """Run a program and return its output; exit if it fails."""
        done = subprocess.run(
            [str(PROGRAMS / arguments[0]), *arguments[1:]],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode:
            sys.exit(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def start(self, log: str, cwd: Path, *arguments: str) -> None:
        """Start a background program whose output goes to a log file."""
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
                )
            )

    def start_superlink(self) -> None:
        """Start the SuperLink and wait until it listens; register the owners' keys."""
        host, port = self.address.split(":")
        security = ["--insecure"]
        if self.tls:
            make_certificates(self.keys, OWNERS)
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
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, int(port)), timeout=1),
            ):
                break
            time.sleep(0.2)
        else:
            sys.exit(f"The SuperLink does not listen, see {self.folder}/superlink.log")
        for owner in OWNERS if self.tls else ():
            public = str(self.keys / f"{owner}.pub")
            self.command("flwr", "supernode", "register", public, "federation")

    def start_owner(self, owner: str, graph: Path) -> None:
        """Start one owner's SuperNode in its own folder."""
        security = ["--insecure"]
        if self.tls:
            security = [
                "--root-certificates", str(self.keys / "ca.crt"),
                "--auth-supernode-private-key", str(self.keys / f"{owner}.key"),
            ]  # fmt: skip
        self.start(
            owner, self.folder / "owners" / owner,
            "flower-supernode", *security, "--superlink", self.address,
            "--host", "127.0.0.1", "--port", str(free_port()),
            "--node-config", f'graph="{graph}" worker-idle={self.worker_idle}',
        )  # fmt: skip

    def run(self, settings: Sequence[str], timeout: float) -> None:
        """Submit a run and wait until it ends; exit if it does not complete."""
        folder = self.folder / "server" / "run"
        pairs = " ".join([f"clients={len(OWNERS)}", f'run-dir="{folder}"', *settings])
        answer = self.command(
            "flwr", "run", str(APP), "federation", "--run-config", pairs,
            "--format", "json",
        )  # fmt: skip
        run_id = str(json.loads(answer)["run-id"])
        print(f"run {run_id}: {folder}", flush=True)
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if any(p.poll() is not None for p in self.processes):
                sys.exit(f"A SuperLink or SuperNode ended, see {self.folder}/*.log")
            if status_of(folder) in ("completed", "failed"):
                break
            time.sleep(0.5)
        log = self.command("flwr", "log", run_id, "federation", "--show")
        (self.folder / "run.log").write_text(log)
        if status_of(folder) != "completed":
            sys.exit(f"The run did not complete: {log[-3000:]}")

    def stop(self) -> None:
        """End all started processes, by process ID."""
        family = []
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                parent = psutil.Process(process.pid)
                family += [*parent.children(recursive=True), parent]
        for process in self.processes:
            process.terminate()  # lets a SuperNode disconnect properly
        _, living = psutil.wait_procs(family, timeout=10)
        for member in living:
            with contextlib.suppress(psutil.Error):
                member.kill()
        for process in self.processes:
            process.wait(timeout=20)


def free_port() -> int:
    """Return a loopback port that is free at this moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def status_of(run: Path) -> str:
    """Return the status of a run folder, empty if there is none yet."""
    with contextlib.suppress(OSError, ValueError):
        return str(json.loads((run / "summary.json").read_text())["status"])
    return ""


def export(stage: Rehearsal, dataset: str) -> dict[str, Path]:
    """Partition a dataset into one graph file per owner and check each file."""
    folder = stage.folder / "graphs"
    stage.command(
        "flower-fgl", "export", str(folder), "--dataset", dataset,
        "--clients", str(len(OWNERS)),
    )  # fmt: skip
    graphs = {}
    for owner, exported in zip(OWNERS, sorted(folder.glob("*.npz")), strict=True):
        graphs[owner] = exported.rename(folder / f"{owner}.npz")
        print(stage.command("flower-fgl", "check-graph", str(graphs[owner])))
    return graphs


def report(folder: Path) -> None:
    """Print accuracy and seconds of the run."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"]["total"] for line in lines]
    print(
        f"best round {summary['best']['round']}: test accuracy "
        f"{summary['best']['test']['accuracy']:.4f}; {len(seconds)} rounds, median "
        f"{statistics.median(seconds):.2f} s, minimum {min(seconds):.2f} s"
    )


def main() -> None:
    """Run the rehearsal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="must not exist")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--dataset", default="synthetic")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600, help="seconds")
    given = parser.parse_args()
    stage = Rehearsal(given.folder.resolve(), tls=given.tls)
    try:
        graphs = export(stage, given.dataset)
        stage.start_superlink()
        for owner, graph in graphs.items():
            stage.start_owner(owner, graph)
        settings = [f'method="{given.method}"', f"rounds={given.rounds}"]
        stage.run(settings, given.timeout)
        report(stage.folder / "server" / "run")
        for owner, graph in graphs.items():
            home = stage.folder / "owners" / owner
            (model,) = (home / "models").iterdir()
            table = str(home / "probabilities.csv")
            print(
                stage.command(
                    "flower-fgl", "predict", "--model", str(model),
                    "--graph", str(graph), "--output", table,
                )
            )  # fmt: skip
        print(stage.command("flwr", "list", "federation"))
    finally:
        stage.stop()


if __name__ == "__main__":
    main()
