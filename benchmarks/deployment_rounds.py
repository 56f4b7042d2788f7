"""Measure seconds per round of a deployment on loopback, without and with TLS.

    python benchmarks/deployment_rounds.py FOLDER                 # Cora, METIS, 3 owners
    python benchmarks/deployment_rounds.py FOLDER --rounds 3 --rows plain
    python benchmarks/deployment_rounds.py FOLDER --worker-idle 0 # a process per message

Three SuperNodes train with FedAvg on their owners' graph files, with one message exchange
per round that includes evaluation. ``same_scores`` states whether the scores equal those of
a run in one process. Medians omit the first round.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from flower_fgl import Run, simulate
from flower_fgl.cli.partition import export_clients
from flower_fgl.methods import parse_config
from flower_fgl.simulation.flower.rehearsal import Rehearsal

OWNERS = ("hospital-a", "hospital-b", "hospital-c")
PHASES = ("total", "send", "clients", "wait", "receive", "aggregate", "evaluate")


def deploy(
    folder: Path, *, tls: bool, dataset: str, rounds: int, worker_idle: int
) -> Run:
    """Run a deployment until it completes; return the run."""
    with Rehearsal(folder, OWNERS, tls=tls, worker_idle=worker_idle) as stage:
        graphs = export(folder / "graphs", dataset)
        stage.start_superlink()
        for owner, graph in graphs.items():
            stage.start_owner(owner, graph)
        made = stage.run({"method": "fedavg", "rounds": rounds}, timeout=120 * rounds)
    return Run.load(made)


def export(folder: Path, dataset: str) -> dict[str, Path]:
    """Partition a dataset into one graph file per owner."""
    config = parse_config({"dataset": dataset, "clients": len(OWNERS)})
    files = export_clients(config, folder)
    return dict(zip(OWNERS, files, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=Path, help="must not contain folders named after the rows"
    )
    parser.add_argument("--dataset", default="cora")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rows", nargs="+", default=["plain", "tls"])
    parser.add_argument(
        "--worker-idle",
        type=int,
        default=600,
        help="seconds; 0 starts no persistent workers",
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
        result = {"row": row, "rounds": len(run.rounds), "same_scores": same, **median}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
