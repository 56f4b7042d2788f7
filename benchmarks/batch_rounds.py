"""Measure a round with mini-batches: whole graph versus receptive field of a batch.

    python benchmarks/batch_rounds.py
    python benchmarks/batch_rounds.py --dataset computers --methods fedavg

Setup: closed set, 3 clients, one local epoch with batches of 64 nodes, local engine, one
thread. Runs with both variants alternate. The table shows medians over the rounds after
the second, when FedLoG has its first synthetic nodes, without evaluation.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

from rich.console import Console
from rich.table import Table

from flower_fgl.client_apps.runtime import training
from flower_fgl.simulation.run import run_one

WARM_UP = 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="pubmed")
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedlog"])
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds per run")
    parser.add_argument("--turns", type=int, default=2)
    return parser.parse_args()


def measure(options: argparse.Namespace, method: str, few: float) -> list[float]:
    """Return seconds per round; ``few`` is the largest share of nodes to extract."""
    values = {
        "method": method,
        "dataset": options.dataset,
        "setting": "closed-set",
        "clients": 3,
        "rounds": WARM_UP + options.rounds + 1,  # the last is evaluated, and omitted
        "local-epochs": 1,
        "batch-size": 64,
        "evaluate-every": 1000,
        "threads": 1,
    }
    if method == "fedlog":
        values |= {"fedlog.prompt-epochs": 1, "fedlog.prompt-networks": 1}
    default, training.BATCH_FIELD_SHARE = training.BATCH_FIELD_SHARE, few
    try:
        with tempfile.TemporaryDirectory() as folder:
            values["output-dir"] = folder
            run = run_one(values, engine="local", workers=None)
    finally:
        training.BATCH_FIELD_SHARE = default
    rounds = [row for row in run.rounds if row["round"] > WARM_UP]
    return [row["seconds"]["total"] for row in rounds[:-1]]


def main() -> None:
    options = arguments()
    table = Table(
        "method", "whole graph", "part", "ratio",
        title=f"seconds per round, {options.dataset}, batches of 64 nodes",
    )  # fmt: skip
    for method in options.methods:
        whole: list[float] = []
        part: list[float] = []
        for _ in range(options.turns):
            whole += measure(options, method, 0.0)
            part += measure(options, method, training.BATCH_FIELD_SHARE)
        slow, fast = statistics.median(whole), statistics.median(part)
        table.add_row(method, f"{slow:.3f}", f"{fast:.3f}", f"{fast / slow:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
