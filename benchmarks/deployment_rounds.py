"""Measure a deployment on loopback: seconds per round, plain and with TLS.

    python benchmarks/deployment_rounds.py FOLDER                 # Cora, METIS, 3 owners
    python benchmarks/deployment_rounds.py FOLDER --rounds 3 --rows plain
    python benchmarks/deployment_rounds.py FOLDER --worker-idle 0 # a process a message

Three SuperNodes on a SuperLink train with FedAvg, each on its owner's graph file; one
exchange a round, with evaluation. The scores must be those of the same clients in one
process. Medians leave the first round out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from flower_fgl import Run, simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "deployment"))
from rehearse import OWNERS, Rehearsal, export

PHASES = ("total", "send", "clients", "wait", "receive", "aggregate", "evaluate")


def deploy(
    folder: Path, *, tls: bool, dataset: str, rounds: int, worker_idle: int
) -> Run:
    """Run a deployment to its end and return the run."""
    stage = Rehearsal(folder, tls=tls, worker_idle=worker_idle)
    try:
        graphs = export(stage, dataset)
        stage.start_superlink()
        for owner, graph in graphs.items():
            stage.start_owner(owner, graph)
        stage.run(['method="fedavg"', f"rounds={rounds}"], timeout=120 * rounds)
    finally:
        stage.stop()
    return Run.load(folder / "server" / "run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="must not hold the rows' folders")
    parser.add_argument("--dataset", default="cora")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rows", nargs="+", default=["plain", "tls"])
    parser.add_argument(
        "--worker-idle", type=int, default=600, help="seconds, 0 for no workers"
    )
    given = parser.parse_args()
    folder = given.folder.resolve()
    expected = simulate(
        "fedavg",
        given.dataset,
        clients=len(OWNERS),
        rounds=given.rounds,
        output_dir=str(folder / "simulation"),
    )
    for row in given.rows:
        run = deploy(
            folder / row,
            tls=row == "tls",
            dataset=given.dataset,
            rounds=given.rounds,
            worker_idle=given.worker_idle,
        )
        same = [r["metrics"] for r in run.rounds] == [
            r["metrics"] for r in expected.rounds
        ]
        later = run.rounds[1:] or run.rounds
        median = {
            phase: statistics.median(r["seconds"].get(phase, 0.0) for r in later)
            for phase in PHASES
        }
        told = {"row": row, "rounds": len(run.rounds), "same_scores": same, **median}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
