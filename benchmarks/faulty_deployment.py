"""Run a TLS deployment on loopback with regular faults, and compare the final accuracy.

    python benchmarks/faulty_deployment.py FOLDER --rounds 200      # Cora, every 10 rounds
    python benchmarks/faulty_deployment.py FOLDER --rounds 200      # resumes a killed run
    python benchmarks/faulty_deployment.py FOLDER --dataset synthetic --rounds 12 --every 2

One SuperLink and three SuperNodes with keys run on 127.0.0.1. The faults take turns:

    kill      kill -9 of a SuperNode and all below it; started again until it is let in
    garbage   the weights of one upload are replaced by invalid bytes
    silent    a client does not reply until the round is over
    nan       one upload contains NaN
    pause     a SuperNode is stopped (SIGSTOP) for a while, then continues
    worker    kill -9 of the process that keeps a client's graph and model
    error     the ClientApp raises an exception

The final accuracy is compared with that of the same run without faults. With the same
folder, an interrupted run resumes from its last checkpoint with a new SuperLink and new
SuperNodes, which find their client states on disk. Each fault is a JSON line of
``FOLDER/faults.jsonl`` at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections import Counter
from pathlib import Path

import psutil
from deployment_rounds import OWNERS, export

from flower_fgl import METHODS, Run, simulate
from flower_fgl.core.config import pyproject_table
from flower_fgl.runs.files import status_of
from flower_fgl.simulation.flower.flower_simulation import write_app_folder
from flower_fgl.simulation.flower.rehearsal import Rehearsal
from flower_fgl.simulation.flower.superlink import free_port

FAULTS = ("kill", "garbage", "silent", "nan", "pause", "worker", "error")
RETRY_SECONDS = 5.0
"""Flower lets a killed SuperNode with a key in again after about a minute."""
CLIENT = '''
import time
from pathlib import Path

from flower_fgl.client_app import DispatchingClientApp
from flower_fgl.protocols.base import read_tensors, write_tensors
from flwr.app import Array


class Faulty(DispatchingClientApp):
    """ClientApp that produces the fault named in a file, once."""

    def __call__(self, message, context):
        name = context.node_config.pop("fault-file")
        try:
            reply = super().__call__(message, context)
        finally:
            context.node_config["fault-file"] = name  # the SuperNode keeps the context
        file = Path(name)
        if message.metadata.message_type == "train" and file.exists():
            kind = file.read_text()
            file.unlink()
            weights = reply.content["weights"]
            if kind == "error":
                raise RuntimeError("a fault on purpose")
            if kind == "garbage":
                name = next(iter(weights))
                weights[name] = Array("float32", (1,), "numpy.ndarray", b"garbage")
            elif kind == "nan":
                tensors = read_tensors(reply.content, "weights")
                broken = {name: tensor + float("nan") for name, tensor in tensors.items()}
                reply.content["weights"] = write_tensors(broken)
            else:
                time.sleep(float(kind))
        return reply


app = Faulty()
'''


class FaultyStage(Rehearsal):
    """A SuperLink and three SuperNodes with keys that produce faults on request."""

    def __init__(self, folder: Path, home: Path) -> None:
        super().__init__(folder, OWNERS, tls=True)
        self.home = home
        self.nodes: dict[str, int] = {}
        self.graphs: dict[str, Path] = {}
        self.starts: Counter[str] = Counter()
        self.tried: dict[str, float] = {}
        self.paused: dict[str, float] = {}
        (folder / "faulty_client.py").write_text(CLIENT)
        places = [str(folder), os.environ.get("PYTHONPATH", "")]
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
        self.app = write_app_folder(
            folder / "flower-fgl",
            config=pyproject_table(METHODS),
            client_app="faulty_client:app",
        )

    def command(self, *arguments: str, timeout: float = 600) -> str:
        """Run a program; a busy machine may need minutes to import torch."""
        return super().command(*arguments, timeout=timeout)

    def fault_file(self, owner: str) -> Path:
        """Return the file that requests a fault from an owner's SuperNode."""
        return self.folder / f"{owner}.fault"

    def start_owner(self, owner: str, graph: Path) -> None:
        """Start one owner's SuperNode with its own folders for states and models."""
        kept = self.home / "owners" / owner
        node = (
            f'graph="{graph}" state-dir="{kept / "state"}" '
            f'model-dir="{kept / "models"}" fault-file="{self.fault_file(owner)}" '
            f"worker-idle={self.worker_idle}"
        )
        self.graphs[owner] = graph
        self.starts[owner] += 1
        self.tried[owner] = time.monotonic()
        self.start(
            f"{owner}-{self.starts[owner]}", kept,
            "flower-supernode", "--root-certificates", str(self.keys / "ca.crt"),
            "--auth-supernode-private-key", str(self.keys / f"{owner}.key"),
            "--superlink", self.address, "--host", "127.0.0.1",
            "--port", str(free_port()), "--node-config", node,
        )  # fmt: skip
        self.nodes[owner] = len(self.processes) - 1

    def family(self, owner: str) -> list[psutil.Process]:
        """Return an owner's SuperNode and its descendants."""
        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(self.processes[self.nodes[owner]].pid)
            return [*parent.children(recursive=True), parent]
        return []

    def workers(self, owner: str) -> list[psutil.Process]:
        """Return the worker processes of an owner's SuperNode."""
        pid = str(self.processes[self.nodes[owner]].pid)
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if "flower_fgl.client_apps.worker.process"
            in (words := process.info["cmdline"] or [])
            and pid in words
        ]

    def cause(self, kind: str, owner: str, timeout: float) -> None:
        """Cause a fault."""
        if kind in ("garbage", "nan", "error"):
            self.fault_file(owner).write_text(kind)
        elif kind == "silent":
            self.fault_file(owner).write_text(str(timeout + 5))
        else:
            time.sleep(0.5)  # into the round
            targets = self.workers(owner) if kind == "worker" else self.family(owner)
            for process in targets:
                with contextlib.suppress(psutil.Error):
                    if kind == "pause":
                        process.suspend()
                    else:
                        process.kill()
            if kind == "pause":
                self.paused[owner] = time.monotonic() + timeout + 5

    def tend(self) -> None:
        """Start SuperNodes that ended; continue those whose pause is over."""
        now = time.monotonic()
        for owner, end in list(self.paused.items()):
            if now > end:
                del self.paused[owner]
                for process in self.family(owner):
                    with contextlib.suppress(psutil.Error):
                        process.resume()
        for owner, index in list(self.nodes.items()):
            is_over = self.processes[index].poll() is not None
            if is_over and now - self.tried[owner] > RETRY_SECONDS:
                self.start_owner(owner, self.graphs[owner])

    def stop(self) -> None:
        """Continue paused processes, then end all."""
        for owner in self.paused:
            for process in self.family(owner):
                with contextlib.suppress(psutil.Error):
                    process.resume()
        workers = [worker for owner in self.nodes for worker in self.workers(owner)]
        super().stop()
        for worker in workers:
            with contextlib.suppress(psutil.Error):
                worker.kill()


def rounds_of(folder: Path) -> int:
    """Count the rounds in the run folder."""
    lines = folder / "rounds.jsonl"
    return lines.read_bytes().count(b"\n") if lines.exists() else 0


def watch(stage: FaultyStage, run: Path, given: argparse.Namespace) -> None:
    """Cause a fault in every n-th round until the run is over."""
    faulty: set[int] = set()
    while status_of(run) not in ("completed", "failed", "interrupted"):
        number = rounds_of(run) + 1
        if number % given.every == 0 and number not in faulty and number > 1:
            faulty.add(number)
            turn = number // given.every - 1
            kind, owner = FAULTS[turn % len(FAULTS)], OWNERS[turn % len(OWNERS)]
            print(f"round {number}: {kind} at {owner}", flush=True)
            with (stage.home / "faults.jsonl").open("a") as file:
                row = {"round": number, "fault": kind, "owner": owner}
                file.write(json.dumps(row) + "\n")
            stage.cause(kind, owner, given.round_timeout)
        stage.tend()
        time.sleep(0.1)


def report(home: Path, every: int) -> None:
    """Print what each fault did, as a table, and the totals of the run so far."""
    run = Run.load(home / "run")
    rows = {row["round"]: row for row in run.rounds}
    faults = [
        json.loads(line) for line in (home / "faults.jsonl").read_text().splitlines()
    ]
    print("| fault | times | replies in that round | rounds until all replied again |")
    print("|---|---|---|---|")
    for kind in FAULTS:
        numbers = sorted(
            {one["round"] for one in faults if one["fault"] == kind} & rows.keys()
        )
        if not numbers:
            continue
        replies = [rows[number]["replies"] for number in numbers]
        waits = []
        for number in numbers:
            later = (n for n in range(number, number + every) if n in rows)
            full = [n for n in later if rows[n]["replies"] == len(OWNERS)]
            waits.append(str(full[0] - number) if full else f"{every} or more")
        print(
            f"| {kind} | {len(numbers)} | {', '.join(map(str, replies))} | "
            f"{', '.join(waits)} |"
        )
    reasons = Counter(
        failure["reason"][:60] for row in run.rounds for failure in row["failures"]
    )
    totals = {
        "status": run.status,
        "rounds": len(rows),
        "failed_rounds": sum(row["status"] != "ok" for row in run.rounds),
        "faults": len(faults),
        "replies": sum(row["replies"] for row in run.rounds),
        "missed_replies": dict(reasons),
    }
    if run.rounds and "metrics" in run.rounds[-1]:
        last = run.rounds[-1]["metrics"]["local"]["test"]
        totals["test_accuracy"] = round(last["accuracy"], 4)
    print(json.dumps(totals, indent=1))


def main() -> None:
    """Run the deployment and print what became of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dataset", default="cora")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--round-timeout", type=float, default=60.0, help="seconds")
    parser.add_argument("--report", action="store_true", help="only print the table")
    given = parser.parse_args()
    home = given.folder.resolve()
    if given.report:
        report(home, given.every)
        return
    run = home / "run"
    leg = len(list(home.glob("leg-*")))
    stage = FaultyStage(home / f"leg-{leg}", home)
    values: dict[str, bool | int | float | str] = {
        "method": "fedavg", "clients": len(OWNERS), "rounds": given.rounds,
        "run-dir": str(run), "round-timeout": given.round_timeout,
        "checkpoint-every": max(1, given.every // 2),
        "resume": (run / "checkpoint").exists(),
    }  # fmt: skip
    start = time.monotonic()
    try:
        graphs = export(stage.folder / "graphs", given.dataset)
        stage.start_superlink()
        for owner, graph in graphs.items():
            stage.start_owner(owner, graph)
        before = status_of(run)
        stage.submit(values)
        end = time.monotonic() + 180
        while status_of(run) in ("", before) and time.monotonic() < end:
            if status_of(run) == "running" and before == "running":
                break  # the run was killed, and resumes
            time.sleep(0.2)
        watch(stage, run, given)
    finally:
        stage.stop()
    reference = simulate(
        "fedavg", given.dataset, clients=len(OWNERS), rounds=given.rounds,
        output_dir=str(home / "calm"),
    )  # fmt: skip
    report(home, given.every)
    minutes = round((time.monotonic() - start) / 60, 1)
    accuracy = reference.last and reference.last["test"]["accuracy"]
    print(json.dumps({"minutes": minutes, "accuracy_without_faults": accuracy}))


if __name__ == "__main__":
    main()
