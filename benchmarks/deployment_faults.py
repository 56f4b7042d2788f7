"""Run a deployment on loopback with regular faults, and compare the final accuracy.

    python benchmarks/deployment_faults.py FOLDER            # Cora, 200 rounds, every 10
    python benchmarks/deployment_faults.py FOLDER            # resumes an interrupted run
    python benchmarks/deployment_faults.py FOLDER --dataset synthetic --rounds 4 --every 1

The faults take turns: a SuperNode is killed during a round and started again, one does not
reply until the round is over, and one sends invalid bytes. The final accuracy is compared
with that of the same run without faults. With the same folder, an interrupted run resumes
from its last checkpoint with a new SuperLink and new SuperNodes, which find their client
states on disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path

import psutil

from flower_fgl import METHODS, Run, simulate
from flower_fgl.core.config import pyproject_table
from flower_fgl.simulation.flower_simulation import write_app_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "deployment"))
from rehearse import OWNERS, Rehearsal, export, free_port, status_of

FAULTS = ("kill", "silent", "garbage")
CLIENT = '''
import time
from pathlib import Path

from flower_fgl.client_app import DispatchingClientApp
from flwr.app import Array


class Faulty(DispatchingClientApp):
    """ClientApp that produces the fault named in a file, once."""

    def __call__(self, message, context):
        reply = super().__call__(message, context)
        file = Path(context.node_config["fault-file"])
        if message.metadata.message_type == "train" and file.exists():
            kind = file.read_text()
            file.unlink()
            if kind == "garbage":
                weights = reply.content["weights"]
                name = next(iter(weights))
                weights[name] = Array("float32", (1,), "numpy.ndarray", b"garbage")
            else:
                time.sleep(float(kind))
        return reply


app = Faulty()
'''


class FaultyStage(Rehearsal):
    """A SuperLink and three SuperNodes that produce faults on request."""

    def __init__(self, folder: Path, home: Path) -> None:
        super().__init__(folder, tls=False)
        self.home = home
        (folder / "faulty_client.py").write_text(CLIENT)
        places = [str(folder), os.environ.get("PYTHONPATH", "")]
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
        self.app = write_app_folder(
            folder / "flower-fgl",
            config=pyproject_table(METHODS),
            client_app="faulty_client:app",
        )

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
        self.start(
            f"{owner}-{len(self.processes)}", kept,
            "flower-supernode", "--insecure", "--superlink", self.address,
            "--host", "127.0.0.1", "--port", str(free_port()), "--node-config", node,
        )  # fmt: skip

    def submit(self, values: dict[str, object]) -> None:
        """Submit the run."""
        pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
        self.command("flwr", "run", str(self.app), "federation", "--run-config", pairs)

    def kill(self, owner: str) -> None:
        """Kill an owner's newest SuperNode and its descendants, by process ID."""
        log = f"{owner}-"
        number = max(
            int(path.stem.removeprefix(log)) for path in self.folder.glob(f"{log}*.log")
        )
        parent = psutil.Process(self.processes[number].pid)
        for member in [*parent.children(recursive=True), parent]:
            with contextlib.suppress(psutil.Error):
                member.kill()


def cause_fault(
    stage: FaultyStage, number: int, every: int, graphs: dict[str, Path], timeout: float
) -> None:
    """Cause the fault that is planned for a round, just before the round begins."""
    turn = number // every - 1
    kind, owner = FAULTS[turn % len(FAULTS)], OWNERS[turn % len(OWNERS)]
    print(f"round {number}: {kind} at {owner}", flush=True)
    if kind == "kill":
        time.sleep(1.0)
        stage.kill(owner)
        stage.start_owner(owner, graphs[owner])
    else:
        request = "garbage" if kind == "garbage" else str(timeout + 10)
        stage.fault_file(owner).write_text(request)


def rounds_of(folder: Path) -> int:
    """Count the rounds in the run folder."""
    lines = folder / "rounds.jsonl"
    return lines.read_bytes().count(b"\n") if lines.exists() else 0


def watch(
    stage: FaultyStage,
    run: Path,
    given: argparse.Namespace,
    graphs: dict[str, Path],
) -> None:
    """Cause a fault in every n-th round until the run is over."""
    faulty: set[int] = set()
    while status_of(run) not in ("completed", "failed"):
        number = rounds_of(run) + 1
        if number % given.every == 0 and number not in faulty and number > 1:
            faulty.add(number)
            cause_fault(stage, number, given.every, graphs, given.round_timeout)
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dataset", default="cora")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--round-timeout", type=float, default=60.0, help="seconds")
    given = parser.parse_args()
    home = given.folder.resolve()
    run = home / "run"
    leg = len(list(home.glob("leg-*")))
    stage = FaultyStage(home / f"leg-{leg}", home)
    values: dict[str, object] = {
        "method": "fedavg", "clients": len(OWNERS), "rounds": given.rounds,
        "run-dir": str(run), "round-timeout": given.round_timeout,
        "checkpoint-every": max(1, given.every // 2),
        "resume": (run / "checkpoint").exists(),
    }  # fmt: skip
    try:
        graphs = export(stage, given.dataset)
        stage.start_superlink()
        for owner, graph in graphs.items():
            stage.start_owner(owner, graph)
        stage.submit(values)
        end = time.monotonic() + 180
        while status_of(run) in ("", "failed") and time.monotonic() < end:
            time.sleep(0.2)
        watch(stage, run, given, graphs)
    finally:
        stage.stop()
    reference = simulate(
        "fedavg", given.dataset, clients=len(OWNERS), rounds=given.rounds,
        output_dir=str(home / "calm"),
    )  # fmt: skip
    done = Run.load(run)
    result = {
        "status": done.status,
        "rounds": len(done.rounds),
        "failures": sum(done.summary["failures"].values()),
        "test_accuracy": done.last and done.last["test"]["accuracy"],
        "without_faults": reference.last and reference.last["test"]["accuracy"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
