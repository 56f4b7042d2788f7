"""Measure a round of clients that train together against the same clients one by one.

    python benchmarks/stacked.py                       # 10, 100, 1,000 clients; Cora
    python benchmarks/stacked.py --clients 10000 --rounds 2 --repeats 1

Every client has 20 nodes of the synthetic graph. Both forms run in the local engine with
one thread, alternately and each in its own process. Seconds are processor seconds of a
whole round, messages and server included, the median over the rounds after the first; wall
seconds are the smallest of a round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

NODES = 20
"""Nodes of each client of the synthetic graph."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--cora", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--model", default="gcn")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after the first")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(values: dict[str, Any]) -> None:
    """Run one form, and print seconds and memory as JSON."""
    from flower_fgl import simulate

    clocks = []

    def on_round(row: Any) -> None:
        clocks.append((time.process_time(), row["seconds"]["total"]))

    with tempfile.TemporaryDirectory() as folder:
        simulate(**values, output_dir=folder, checkpoint_every=0, on_round=on_round)
    seconds = [b[0] - a[0] for a, b in itertools.pairwise(clocks)]
    walls = [wall for _, wall in clocks[1:]]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"seconds": seconds, "walls": walls, "peak": peak}))


def main() -> None:
    options = arguments()
    if options.measure:
        measure(json.loads(options.measure))
        return
    common = {
        "method": options.method,
        "model": options.model,
        "rounds": options.rounds + 1,
    }
    cases: list[tuple[str, dict[str, Any]]] = [
        (
            f"{clients:,} clients x {NODES} nodes",
            {"clients": clients, "synthetic": {"nodes": NODES * clients}},
        )
        for clients in options.clients
    ]
    if options.cora:
        cases.append(("Cora, 10 clients", {"clients": 10, "dataset": "cora"}))
    table = Table(
        "case", "one by one, s", "stacked, s", "ratio", "ms per client", "wall, s",
        "peak GiB", title=f"{options.method}, {options.model}",
    )  # fmt: skip
    for name, case in cases:
        found: dict[str, list[dict[str, Any]]] = {"false": [], "true": []}
        for _ in range(options.repeats):
            for stacked, results in found.items():
                values = {**common, **case, "stacked": stacked}
                done = subprocess.run(
                    [sys.executable, str(Path(__file__).resolve()),
                     "--measure", json.dumps(values)],
                    capture_output=True,
                    text=True,
                )  # fmt: skip
                if done.returncode:
                    sys.exit(done.stderr)
                results.append(json.loads(done.stdout.strip().splitlines()[-1]))
        alone, together = (
            statistics.median(s for result in found[key] for s in result["seconds"])
            for key in ("false", "true")
        )
        wall = min(w for result in found["true"] for w in result["walls"])
        peak = max(result["peak"] for result in found["true"])
        table.add_row(
            name, f"{alone:.3f}", f"{together:.3f}", f"{alone / together:.1f}",
            f"{1000 * together / case['clients']:.2f}", f"{wall:.3f}", f"{peak:.2f}",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
