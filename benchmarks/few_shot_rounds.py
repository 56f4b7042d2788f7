"""Measure few-shot rounds: whole graph versus the receptive field of training nodes.

    python benchmarks/few_shot_rounds.py                        # Coauthor CS, 3 shots
    python benchmarks/few_shot_rounds.py --dataset computers --shots 10
    python benchmarks/few_shot_rounds.py --whole-run local ray --rounds 500

Setup: local engine, one thread, 10 METIS clients, half of which train in each round. Runs
on the whole graph and on the needed part (``nn/computation_graph.py``) alternate. The
table shows medians over the rounds after the warm-up, without evaluation. ``--whole-run``
instead measures one complete run of the last method per engine, evaluated every 50 rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from flower_fgl.lab.results import Run
from flower_fgl.nn import computation_graph
from flower_fgl.simulation.run import run_one

METHODS = ("local", "fedavg", "fedper", "fedpano")
WARM_UP = 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="cs")
    parser.add_argument("--shots", type=int, default=3)
    parser.add_argument(
        "--rounds", type=int, default=20, help="measured rounds per run"
    )
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--whole-run", nargs="+", choices=["local", "ray"])
    return parser.parse_args()


def settings(options: argparse.Namespace, method: str) -> dict[str, Any]:
    return {
        "method": method,
        "dataset": options.dataset,
        "setting": "few-shot",
        "shots": options.shots,
        "model": "graphsage:linear",
        "hidden-channels": 128,
        "dropout": 0.0,
        "clients": 10,
        "participation": 0.5,
        "rounds": options.rounds,
        "local-epochs": 5,
        "optimizer": "sgd",
        "lr": 0.1,
        "optimizer-state": "reset",
        "evaluate-every": 50,
    }


def time_run(options: argparse.Namespace, engine: str) -> tuple[float, Run]:
    """Return the seconds of a complete run, and the run."""
    with tempfile.TemporaryDirectory() as folder:
        values = {**settings(options, options.methods[-1]), "output-dir": folder}
        start = time.perf_counter()
        run = run_one(values, engine=engine, workers=None)
        return time.perf_counter() - start, run


def bytes_of(run: Run) -> str:
    """Return bytes per round, with FedPANO's formula: 4(P_g + P_s + P_φ) per client."""
    up, down = (sum(run.rounds[0]["bytes"][way].values()) for way in ("up", "down"))
    if run.config["method"] != "fedpano":
        return f"bytes per round: {up:,} up, {down:,} down"
    client = run.clients[0]
    h, d, c = 128, client["num_features"], len(client["class_names"])
    parameters = (2 * d * h + h) + (2 * h * h + h) + (h * c + c) + (3 * h * h + 2 * h)
    stated = 4 * parameters * run.rounds[0]["replies"]
    return f"bytes per round: {up:,} up, {down:,} down, formula {stated:,}"


def measure(options: argparse.Namespace, method: str, share: float) -> list[float]:
    """Return seconds per round; ``share`` is the largest share of nodes to extract."""
    default, computation_graph.SHARE = computation_graph.SHARE, share
    # the last round is evaluated, and omitted
    changes = {"rounds": WARM_UP + options.rounds + 1, "evaluate-every": 1000}
    try:
        with tempfile.TemporaryDirectory() as folder:
            values = {**settings(options, method), **changes, "output-dir": folder}
            run = run_one(values, engine="local", workers=None)
    finally:
        computation_graph.SHARE = default
    return [row["seconds"]["total"] for row in run.rounds[WARM_UP:-1]]


def main() -> None:
    options = arguments()
    for engine in options.whole_run or ():
        seconds, run = time_run(options, engine)
        row = f"{options.methods[-1]}, {engine} engine, {options.rounds} rounds"
        print(f"{row}: {seconds:.0f} s, {bytes_of(run)}")
    if options.whole_run:
        return
    table = Table(
        "method", "whole graph", "part", "ratio",
        title=f"seconds per round, {options.dataset}, {options.shots} shots",
    )  # fmt: skip
    for method in options.methods:
        whole: list[float] = []
        part: list[float] = []
        for _ in range(options.turns):
            whole += measure(options, method, -1.0)
            part += measure(options, method, computation_graph.SHARE)
        slow, fast = statistics.median(whole), statistics.median(part)
        table.add_row(method, f"{slow:.3f}", f"{fast:.3f}", f"{fast / slow:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
