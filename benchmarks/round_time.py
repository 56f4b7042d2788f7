"""Measure seconds per round: engines compared with the same computation in a loop.

    python benchmarks/round_time.py                      # Cora, 10 clients, FedAvg
    python benchmarks/round_time.py --dataset synthetic --clients 1000 --nodes 20000

Each row is measured in a separate process, so that its peak memory is measured alone. The
median is over the rounds after the warm-up, with evaluation in every round and one thread
per client. "floor" is a plain loop with the same models, graphs, steps and scores,
without messages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from flower_fgl.methods import parse_config

PHASES = ("send", "clients", "wait", "receive", "aggregate", "evaluate")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="cora")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--model", default="gcn")
    parser.add_argument("--partition", default="metis")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument(
        "--nodes", type=int, default=0, help="nodes of the synthetic graph"
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=["floor", "local", "workers", "ray"],
        default=["floor", "local", "workers", "ray"],
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


def settings(options: argparse.Namespace) -> dict[str, Any]:
    values: dict[str, Any] = {
        "method": options.method,
        "dataset": options.dataset,
        "model": options.model,
        "partition": options.partition,
        "clients": options.clients,
        "rounds": options.warm_up + options.rounds,
        "threads": 1,
        "seed": 0,
    }
    if options.nodes:
        values["synthetic.nodes"] = options.nodes
    return values


def floor(options: argparse.Namespace) -> list[dict[str, float]]:
    """Run FedAvg in a plain loop without messages; return the seconds of each round."""
    import torch

    from flower_fgl.client_apps.runtime.client import Client
    from flower_fgl.client_apps.runtime.data import ClientData
    from flower_fgl.client_apps.runtime.state import ClientState
    from flower_fgl.client_apps.runtime.training import (
        load_state,
        make_optimizer,
        train_epochs,
    )
    from flower_fgl.datasets.store import open_store
    from flower_fgl.strategies.aggregation import weighted_mean

    torch.set_num_threads(1)
    config = parse_config(settings(options))
    store = open_store(config, options.clients)
    device = torch.device("cpu")
    clients = [
        Client(
            config,
            pid,
            options.clients,
            ClientData.build(store.load(pid), device),
            ClientState(),
            device,
        )
        for pid in range(options.clients)
    ]
    clients = [c for c in clients if c.data.training.index.numel()]
    models = [client.build_model(initialise=True) for client in clients]
    optimizers = [make_optimizer(model, config) for model in models]
    weights = [float(client.data.training.index.numel()) for client in clients]
    state = {k: v.clone() for k, v in models[0].state_dict().items()}
    rows = []
    for _ in range(config.rounds):
        clock = time.perf_counter()
        for client, model, optimizer in zip(clients, models, optimizers, strict=True):
            load_state(model, state)
            train_epochs(
                model, client.data.training, optimizer, epochs=config.local_epochs
            )
            client.evaluate(model)
        state = weighted_mean([model.state_dict() for model in models], weights)
        rows.append({"total": time.perf_counter() - clock})
    return rows


def engine(options: argparse.Namespace, name: str) -> list[dict[str, float]]:
    """Run an engine; return the seconds of each round."""
    from flower_fgl.simulation.run import run_one

    with tempfile.TemporaryDirectory() as folder:
        values = {**settings(options), "output-dir": folder}
        workers = 1 if name == "local" else options.workers
        engine = "local" if name == "workers" else name
        run = run_one(values, engine=engine, workers=workers)
        return [row["seconds"] for row in run.rounds]


class PeakMemory(threading.Thread):
    """Sample the memory of this process and its children, shared pages counted once."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._stopped = threading.Event()

    def run(self) -> None:
        me = psutil.Process()
        while not self._stopped.wait(0.2):
            total = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.peak = max(self.peak, total)

    def stop(self) -> float:
        self._stopped.set()
        self.join()
        return self.peak / 2**30


def measure(options: argparse.Namespace) -> None:
    """Measure one row and print it as JSON."""
    memory = PeakMemory()
    if options.measure != "floor":
        memory.start()
    start = time.perf_counter()
    if options.measure == "floor":
        rows = floor(options)
        peak = psutil.Process().memory_info().rss / 2**30
    else:
        rows = engine(options, options.measure)
        peak = memory.stop()
    rows = rows[options.warm_up :]
    medians = {
        key: statistics.median(row.get(key, 0.0) for row in rows) for key in rows[0]
    }
    whole = time.perf_counter() - start
    print(json.dumps({"medians": medians, "peak_gib": peak, "whole": whole}))


def main() -> None:
    options = arguments()
    if options.measure:
        measure(options)
        return
    table = Table(
        "row", "s/round", "ratio", *PHASES, "peak GiB", "whole run s",
        title=f"{options.method} on {options.dataset}, {options.clients} clients, "
        f"median of {options.rounds} rounds after {options.warm_up}",
    )  # fmt: skip
    base = None
    for row in options.rows:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:],
             "--measure", row],
            capture_output=True,
            text=True,
        )  # fmt: skip
        if done.returncode:
            sys.exit(done.stderr)
        result = json.loads(done.stdout.strip().splitlines()[-1])
        medians = result["medians"]
        base = base or medians["total"]
        phases = [f"{1000 * medians[p]:.1f} ms" if p in medians else "" for p in PHASES]
        table.add_row(
            row, f"{medians['total']:.4f}", f"{medians['total'] / base:.2f}", *phases,
            f"{result['peak_gib']:.2f}", f"{result['whole']:.1f}",
        )  # fmt: skip
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
