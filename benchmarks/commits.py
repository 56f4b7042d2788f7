"""Compare a round of methods in this checkout with one in another checkout, by turns.

    git worktree add ../before main~20
    python benchmarks/commits.py ../before
    python benchmarks/commits.py ../before --methods fedpg --clients 1000 --nodes 20
    python benchmarks/commits.py ../before --methods fedpg --clients 10 --dataset cora

Each run is a process of its own with the local engine and one thread. Seconds are processor
seconds of a whole round, messages, scores and server included: the least of all rounds
after the first, since other load on the machine only adds to them. The last column is the
ratio to FedAvg's round in this checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parents[1]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", nargs="?", type=Path, help="the other checkout")
    parser.add_argument(
        "--methods", nargs="+", default=["fedpg", "fedpano", "adpfedgnn"]
    )
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument(
        "--nodes", type=int, default=50, help="of a client, of synthetic"
    )
    parser.add_argument("--dataset", default="synthetic")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after the first")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="of all methods"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(values: dict[str, Any]) -> None:
    """Run a method, and print the processor seconds of its rounds as JSON."""
    from flower_fgl.simulation.run import run_one

    clocks: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run_one(
            {**values, "output-dir": folder, "checkpoint-every": 0},
            engine="local",
            workers=1,
            on_round=lambda row: clocks.append(time.process_time()),
        )
    print(json.dumps([after - before for before, after in pairwise(clocks)]))


def seconds(checkout: Path, values: dict[str, Any]) -> list[float]:
    """Measure in a process that imports the package of a checkout."""
    command = [sys.executable, __file__, "--measure", json.dumps(values)]
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    found: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    options = arguments()
    if options.measure:
        measure(json.loads(options.measure))
        return
    common: dict[str, Any] = {
        "dataset": options.dataset,
        "clients": options.clients,
        "rounds": options.rounds + 1,
        "threads": 1,
    }
    if options.dataset == "synthetic":
        common["synthetic.nodes"] = options.nodes * options.clients
    common |= dict(pair.split("=", 1) for pair in options.set)
    checkouts = [HERE] if options.other is None else [options.other, HERE]
    found: dict[tuple[Path, str], float] = {}
    methods = ["fedavg", *(m for m in options.methods if m != "fedavg")]
    for _ in range(options.turns):
        for method in methods:
            for checkout in checkouts:
                least = min(seconds(checkout, {**common, "method": method}))
                place = checkout, method
                found[place] = min(found.get(place, least), least)
    table = Table("method", "other, s", "this, s", "ratio", "x FedAvg")
    for method in methods:
        this = found[HERE, method]
        before = found.get((checkouts[0], method), this)
        table.add_row(
            method,
            f"{before:.3f}" if len(checkouts) == 2 else "",
            f"{this:.3f}",
            f"{before / this:.1f}",
            f"{this / found[HERE, 'fedavg']:.1f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
