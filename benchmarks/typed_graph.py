"""Measure rounds on typed graphs: 100,000 nodes of five kinds with 20 relations.

    python benchmarks/typed_graph.py
    python benchmarks/typed_graph.py --models rgcn --nodes 10000 --owners 10

Writes one file for each owner, then runs FedAvg with each backbone in a process of its own,
with one thread. Prints the median processor seconds of a round after the first, the bytes
of a round, and the largest memory of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from round_time import PeakMemory
from torch_geometric.data import HeteroData

from flower_fgl import to_npz

MODELS = ("rgcn", "typed-graphsage", "typed-gine")
KINDS, CLASSES, FEATURES = 5, 10, 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000, help="of each owner")
    parser.add_argument("--degree", type=float, default=10.0, help="edges of a node")
    parser.add_argument("--relations", type=int, default=20)
    parser.add_argument("--owners", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def owner(options: argparse.Namespace, number: int) -> HeteroData:
    """Return a random typed graph; the classes of the first kind are in its features."""
    draw = torch.Generator().manual_seed(number)
    size = options.nodes // KINDS
    data = HeteroData()
    y = torch.randint(CLASSES, (size,), generator=draw)
    for kind in range(KINDS):
        data[f"kind{kind}"].x = torch.randn((size, FEATURES), generator=draw)
    data["kind0"].x[torch.arange(size), y] += 2.0
    data["kind0"].y = y
    edges = int(options.nodes * options.degree / options.relations)
    for relation in range(options.relations):
        ends = f"kind{relation % KINDS}", f"kind{relation // KINDS % KINDS}"
        index = torch.randint(size, (2, edges), generator=draw)
        data[ends[0], f"relation{relation}", ends[1]].edge_index = index
    return data


def train(options: argparse.Namespace, owners: str, model: str) -> dict[str, Any]:
    """Run FedAvg; measure its rounds after the first."""
    from flower_fgl import simulate

    torch.set_num_threads(1)
    memory, seconds, last = PeakMemory(), [], time.process_time()
    memory.start()

    def note(_: Any) -> None:
        nonlocal last
        seconds.append(time.process_time() - last)
        last = time.process_time()

    with tempfile.TemporaryDirectory() as folder:
        run = simulate(
            "fedavg", owners=owners, model=model, rounds=options.rounds,
            local_epochs=1, output_dir=folder, threads=1, on_round=note,
        )  # fmt: skip
    return {
        "seconds": statistics.median(seconds[1:]),
        "bytes": sum(sum(way.values()) for way in run.rounds[-1]["bytes"].values()),
        "peak": memory.stop(),
    }


def main() -> None:
    options = arguments()
    if options.measure:
        print(json.dumps(train(options, *options.measure)))
        return
    table = Table("backbone", "s/round", "MB/round", "peak GiB")
    with tempfile.TemporaryDirectory() as folder:
        owners = Path(folder) / "owners"
        owners.mkdir()
        for number in range(options.owners):
            to_npz(owner(options, number), owners / f"owner-{number}.npz")
        for model in options.models:
            done = subprocess.run(
                [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:],
                 "--measure", str(owners), model],
                env={**os.environ, "FLOWER_FGL_CACHE": folder},
                capture_output=True,
                text=True,
            )  # fmt: skip
            if done.returncode:
                sys.exit(done.stderr)
            found = json.loads(done.stdout.strip().splitlines()[-1])
            table.add_row(
                model,
                f"{found['seconds']:.2f}",
                f"{found['bytes'] / 1e6:.2f}",
                f"{found['peak']:.2f}",
            )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
