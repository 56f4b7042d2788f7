"""Measure what few-shot rounds save by computing only what the training nodes need.

    python benchmarks/few_shot_rounds.py                        # Coauthor CS, 3 shots
    python benchmarks/few_shot_rounds.py --dataset computers --shots 10

Methods take turns over the whole graph and over its part (``nn/receptive.py``), in the
local engine with one thread, 10 METIS clients of which half train; shown are medians over
the rounds after the warm-up, none of which is scored.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

from rich.console import Console
from rich.table import Table

from flower_fgl.nn import receptive
from flower_fgl.running import run_one

METHODS = ("local", "fedavg", "fedper", "fedpano")
WARM_UP = 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="cs")
    parser.add_argument("--shots", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20, help="measured, in each turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    return parser.parse_args()


def measure(options: argparse.Namespace, method: str, share: float) -> list[float]:
    """Return seconds per round; ``share`` is the largest part that is cut out."""
    usual, receptive.SHARE = receptive.SHARE, share
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = run_one(
                {
                    "method": method,
                    "dataset": options.dataset,
                    "setting": "few-shot",
                    "shots": options.shots,
                    "model": "graphsage:linear",
                    "hidden-channels": 128,
                    "dropout": 0.0,
                    "clients": 10,
                    "participation": 0.5,
                    "rounds": WARM_UP + options.rounds,
                    "local-epochs": 5,
                    "optimizer": "sgd",
                    "lr": 0.1,
                    "optimizer-state": "reset",
                    "evaluate-every": 1000,
                    "output-dir": folder,
                },
                engine="local",
                workers=None,
            )
    finally:
        receptive.SHARE = usual
    # the last round is scored
    return [row["seconds"]["total"] for row in run.rounds[WARM_UP:-1]]


def main() -> None:
    options = arguments()
    table = Table(
        "method", "whole graph", "part", "ratio",
        title=f"seconds a round, {options.dataset}, {options.shots} shots",
    )  # fmt: skip
    for method in options.methods:
        whole: list[float] = []
        part: list[float] = []
        for _ in range(options.turns):
            whole += measure(options, method, -1.0)
            part += measure(options, method, receptive.SHARE)
        slow, fast = statistics.median(whole), statistics.median(part)
        table.add_row(method, f"{slow:.3f}", f"{fast:.3f}", f"{fast / slow:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
