"""Run a deployment on loopback with a fault every few rounds, and compare the result.

    python benchmarks/deployment_faults.py FOLDER            # Cora, 200 rounds, every 10
    python benchmarks/deployment_faults.py FOLDER            # goes on where it stopped
    python benchmarks/deployment_faults.py FOLDER --dataset synthetic --rounds 4 --every 1

In turn a SuperNode is killed in mid-round and started again, one says nothing until the
round is over, and one sends garbage. The final accuracy is set against that of the same run
without faults. Called again with the same folder, an interrupted run goes on from its
last checkpoint, on a new SuperLink and new SuperNodes, which find their memory on their
own disks.
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
    """The app's ClientApp, but for the fault that a file asks for, once."""

    def __call__(self, message, context):
        reply = super().__call__(message, context)
        order = Path(context.node_config["fault-file"])
        if message.metadata.message_type == "train" and order.exists():
            kind = order.read_text()
            order.unlink()
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
    """A SuperLink and three SuperNodes that go wrong when told to."""

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
        """Return the file in which an owner's node looks for its orders."""
        return self.folder / f"{owner}.fault"

    def start_owner(self, owner: str, graph: Path) -> None:
        """Start one owner's SuperNode with its memory on its own disk."""
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
        """Start the run."""
        pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
        self.command("flwr", "run", str(self.app), "federation", "--run-config", pairs)

    def kill(self, owner: str) -> None:
        """End an owner's newest SuperNode and all that it started, by process id."""
        log = f"{owner}-"
        number = max(
            int(path.stem.removeprefix(log)) for path in self.folder.glob(f"{log}*.log")
        )
        parent = psutil.Process(self.processes[number].pid)
        for member in [*parent.children(recursive=True), parent]:
            with contextlib.suppress(psutil.Error):
                member.kill()


def go_wrong(
    stage: FaultyStage, number: int, every: int, graphs: dict[str, Path], timeout: float
) -> None:
    """Bring about the fault of a round that is about to begin."""
    turn = number // every - 1
    kind, owner = FAULTS[turn % len(FAULTS)], OWNERS[turn % len(OWNERS)]
    print(f"round {number}: {kind} at {owner}", flush=True)
    if kind == "kill":
        time.sleep(1.0)
        stage.kill(owner)
        stage.start_owner(owner, graphs[owner])
    else:
        order = "garbage" if kind == "garbage" else str(timeout + 10)
        stage.fault_file(owner).write_text(order)


def rounds_of(folder: Path) -> int:
    """Count the rounds that are written down."""
    lines = folder / "rounds.jsonl"
    return lines.read_bytes().count(b"\n") if lines.exists() else 0


def watch(
    stage: FaultyStage,
    run: Path,
    given: argparse.Namespace,
    graphs: dict[str, Path],
) -> None:
    """Let a fault happen in every n-th round until the run is over."""
    faulty: set[int] = set()
    while status_of(run) not in ("completed", "failed"):
        number = rounds_of(run) + 1
        if number % given.every == 0 and number not in faulty and number > 1:
            faulty.add(number)
            go_wrong(stage, number, given.every, graphs, given.round_timeout)
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
    calm = simulate(
        "fedavg", given.dataset, clients=len(OWNERS), rounds=given.rounds,
        output_dir=str(home / "calm"),
    )  # fmt: skip
    done = Run.load(run)
    told = {
        "status": done.status,
        "rounds": len(done.rounds),
        "failures": sum(done.summary["failures"].values()),
        "test_accuracy": done.last and done.last["test"]["accuracy"],
        "without_faults": calm.last and calm.last["test"]["accuracy"],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
