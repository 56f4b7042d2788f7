"""Compare start and rounds of methods in this checkout with another checkout, by turns.

    git worktree add ../before main~20
    python benchmarks/commits.py ../before
    python benchmarks/commits.py ../before --methods fedpg --clients 1000 --nodes 20
    python benchmarks/commits.py ../before --methods fedpg --clients 10 --dataset cora

Each run is a process of its own with the local engine and one thread. Seconds are processor
seconds of the start, all that is before round 1, and of a whole round, messages, scores and
server included: the least of all rounds after the first, since other load on the machine
only adds to them. A one-shot method has one round. The last column is the ratio to FedAvg's
in this checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
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
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(values: dict[str, Any]) -> None:
    """Run a method; print the processor seconds of start and rounds as JSON."""
    from flower_fgl.methods import METHODS
    from flower_fgl.simulation.run import run_one
    from flower_fgl.strategies.base import FglStrategy

    clocks = [time.process_time()]
    run_round = FglStrategy.run_round

    def timed(*arguments: Any, **options: Any) -> Any:
        clocks.append(time.process_time())
        return run_round(*arguments, **options)

    FglStrategy.run_round = timed  # type: ignore[method-assign]
    if METHODS[values["method"]].is_one_shot:
        values["rounds"] = 1
    with tempfile.TemporaryDirectory() as folder:
        own = {"output-dir": folder, "checkpoint-every": 0}
        run_one({**values, **own}, engine="local", workers=1)
    clocks.append(time.process_time())
    print(json.dumps([after - before for before, after in pairwise(clocks)]))


def seconds(checkout: Path, values: dict[str, Any]) -> tuple[float, float]:
    """Measure start and round in a process that imports the package of a checkout."""
    command = [sys.executable, __file__, "--measure", json.dumps(values)]
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    start, *rounds = json.loads(done.stdout.strip().splitlines()[-1])
    # the last one includes the end of the run
    return start, min(rounds[1:-1] or rounds)


def setting(pair: str) -> tuple[str, Any]:
    """Read a setting: a TOML value, or a text without quotes."""
    key, _, text = pair.partition("=")
    try:
        return key, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key, text


def main() -> None:
    options = arguments()
    if options.measure:
        measure(json.loads(options.measure))
        return
    common: dict[str, Any] = {
        "dataset": options.dataset,
        "clients": options.clients,
        "rounds": options.rounds + 2,
        "threads": 1,
    }
    if options.dataset == "synthetic":
        common["synthetic.nodes"] = options.nodes * options.clients
    settings = dict(map(setting, options.set))
    checkouts = [HERE] if options.other is None else [options.other, HERE]
    found: dict[tuple[Path, str], list[tuple[float, float]]] = {}
    methods = ["fedavg", *(m for m in options.methods if m != "fedavg")]
    for _ in range(options.turns):
        for method in methods:
            own = {k: v for k, v in settings.items() if k.partition(".")[0] == method}
            own |= {k: v for k, v in settings.items() if "." not in k}
            for checkout in checkouts:
                taken = seconds(checkout, {**common, **own, "method": method})
                found.setdefault((checkout, method), []).append(taken)
    table = Table("method", "part", "other, s", "this, s", "ratio", "x FedAvg")
    for method in methods:
        for place, part in enumerate(("start", "round")):
            least = [
                [
                    min(one[place] for one in found[checkout, name])
                    for name in (method, "fedavg")
                ]
                for checkout in checkouts
            ]
            before, (this, fedavg) = least[0][0], least[-1]
            table.add_row(
                method,
                part,
                f"{before:.3f}" if len(checkouts) == 2 else "",
                f"{this:.3f}",
                f"{before / this:.1f}",
                f"{this / fedavg:.1f}",
            )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
