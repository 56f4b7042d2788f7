"""Measure a synthetic graph of ogbn-arxiv's size: partitioning, and runs of methods.

    python benchmarks/large_graph.py                   # 169,343 nodes, 1.17 M edges, FedAvg
    python benchmarks/large_graph.py --method fedavg fedpg opfgl fedlog
    python benchmarks/large_graph.py --model sgc --engine ray --workers 2 --rounds 5
    python benchmarks/large_graph.py --set batch-size=1024

The partition is computed in one process, and each method runs in another one, so that its
peak memory is measured alone: that of the process and its descendants, shared pages counted
once. The cache is a new folder, so nothing is reused. Seconds of a step include messages
and evaluation; "start and end" is the rest of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from round_time import PeakMemory

from flower_fgl.methods import METHODS, parse_config


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=169_343)
    parser.add_argument("--degree", type=float, default=13.77)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--method", nargs="+", default=["fedavg"], choices=METHODS)
    parser.add_argument("--model", default="", help="by default the method's own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, help="by default one process")
    parser.add_argument("--engine", default="auto")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="other settings"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that all methods share."""
    values: dict[str, Any] = {
        "clients": options.clients,
        "synthetic.nodes": options.nodes,
        "synthetic.degree": options.degree,
        "synthetic.classes": 40,
        "synthetic.features": 128,
        "synthetic.blocks": 200,
    }
    for pair in options.set:
        key, _, text = pair.partition("=")
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    return values


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the steps from the graph to the clients' files."""
    from flower_fgl.datasets.build import load_dataset
    from flower_fgl.datasets.partition.partition import partition_nodes
    from flower_fgl.datasets.store import open_store
    from flower_fgl.datasets.transforms.subgraph import cut_clients

    config = parse_config(settings(options))
    steps: list[tuple[str, float]] = []
    clock = time.perf_counter()

    def step(name: str) -> None:
        nonlocal clock
        steps.append((name, time.perf_counter() - clock))
        clock = time.perf_counter()

    dataset = load_dataset(config)
    edges = dataset.edge_index.shape[1] // 2
    step(f"generate {dataset.num_nodes:,} nodes, {edges:,} edges")
    parts = partition_nodes(
        dataset, "metis", options.clients, seed=config.partition_seed
    )
    step(f"METIS into {options.clients}")
    cut_clients(dataset.edge_index, dataset.num_nodes, parts)
    step("extract the clients' subgraphs")
    del dataset, parts
    store = open_store(config, options.clients)
    step("all of the above, split, and write one file per client")
    return {"steps": steps, "partition": store.index.partition_sha256}


def train(options: argparse.Namespace, method: str) -> dict[str, Any]:
    """Run a method; measure its rounds and phases."""
    from flower_fgl.simulation.run import run_one

    values = {**settings(options), "method": method}
    config = parse_config(values)
    if config.rounds != 1:  # one-shot methods have one
        values["rounds"] = options.rounds
    if options.model:
        values["model"] = options.model
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = run_one(
            {**values, "output-dir": folder},
            engine=options.engine,
            workers=options.workers,
        )
    whole = time.perf_counter() - start
    steps, inside = [], 0.0
    for row in run.rounds:
        seconds = row["seconds"]["total"]
        name = f"{row['phase']}, round {row['round']}"
        steps.append((f"{method}: {name}", seconds))
        inside += seconds
    steps.append((f"{method}: start and end", whole - inside))
    test = run.summary["last"]["test"]["accuracy"]
    return {"steps": steps, "test": test}


def main() -> None:
    options = arguments()
    if options.measure:
        memory = PeakMemory()
        memory.start()
        is_data = options.measure == "data"
        found = prepare(options) if is_data else train(options, options.measure)
        print(json.dumps({**found, "peak": memory.stop()}))
        return
    table = Table("step", "seconds", "peak GiB")
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ["data", *options.method]:
            done = subprocess.run(
                [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:],
                 "--measure", name],
                env={**os.environ, "FLOWER_FGL_CACHE": folder},
                capture_output=True,
                text=True,
            )  # fmt: skip
            if done.returncode:
                sys.exit(done.stderr)
            result = json.loads(done.stdout.strip().splitlines()[-1])
            for number, (step, seconds) in enumerate(result["steps"]):
                peak = "" if number else f"{result['peak']:.2f}"
                table.add_row(step, f"{seconds:.2f}", peak)
            if "test" in result:
                lines.append(f"{name}: test accuracy {100 * result['test']:.2f}")
            else:
                lines.append(f"partition {result['partition']}")
    console = Console(width=120)
    console.print(table)
    for line in lines:
        console.print(line, soft_wrap=True)


if __name__ == "__main__":
    main()
