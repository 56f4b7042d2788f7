"""Measure a synthetic graph of ogbn-arxiv's size: partitioning, and a run with Ray.

    python benchmarks/large_graph.py   # 169,343 nodes, 1.17 M edges, 10 clients, SGC

Prints the seconds of each step, and the peak memory of this process and its descendants
(shared pages counted once). The cache is a new folder, so nothing is reused.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

from rich.console import Console
from rich.table import Table
from round_time import PeakMemory

from flower_fgl.methods import parse_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=169_343)
    parser.add_argument("--degree", type=float, default=13.77)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", default="ray")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FLOWER_FGL_CACHE"] = f"{folder}/cache"
        measure(options, folder)


def measure(options: argparse.Namespace, folder: str) -> None:
    from flower_fgl.datasets.build import load_dataset
    from flower_fgl.datasets.partition.partition import partition_nodes
    from flower_fgl.datasets.store import open_store
    from flower_fgl.datasets.transforms.subgraph import cut_clients
    from flower_fgl.simulation.run import run_one

    values = {
        "method": "fedavg",
        "model": "sgc",
        "clients": options.clients,
        "rounds": options.rounds,
        "synthetic.nodes": options.nodes,
        "synthetic.degree": options.degree,
        "synthetic.classes": 40,
        "synthetic.features": 128,
        "synthetic.blocks": 200,
        "output-dir": f"{folder}/runs",
    }
    config = parse_config(values)
    table = Table("step", "seconds")
    memory = PeakMemory()
    memory.start()
    clock = time.perf_counter()

    def step(name: str) -> None:
        nonlocal clock
        table.add_row(name, f"{time.perf_counter() - clock:.2f}")
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
    open_store(config, options.clients)
    step("all of the above, split, and write one file per client")
    run = run_one(values, engine=options.engine, workers=options.workers)
    step(f"{options.rounds} rounds of FedAvg with {options.engine}, including start-up")
    peak = memory.stop()
    console = Console(width=120)
    console.print(table)
    seconds = [row["seconds"]["total"] for row in run.rounds]
    console.print("seconds per round:", ", ".join(f"{s:.2f}" for s in seconds))
    console.print(f"peak memory of all processes: {peak:.2f} GiB")
    console.print(f"partition {run.summary['partition_sha256']}", soft_wrap=True)


if __name__ == "__main__":
    main()
