"""Measure FedPG's cost: seconds per round against Local, bytes against FedAvg.

    python benchmarks/fedpg_cost.py                      # Physics, 10 clients, GAMLP
    python benchmarks/fedpg_cost.py --dataset synthetic --clients 4

Runs of all methods alternate, with the local engine and one thread, so that other load on
the machine affects all of them. The table shows the median over the rounds after the
warm-up, the fastest round, and the ratio of both to Local. Bytes are measured on the
messages of the last round, as the mean over clients, next to the documented formula:
4·M·(p + 1) up and 4·M·p down for the M prototypes that a client sent in that round, and 4·P
in each direction for the P parameters of FedAvg.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

from rich.console import Console
from rich.table import Table

from flower_fgl.core.config import RunConfig
from flower_fgl.datasets.store import open_store
from flower_fgl.methods import METHODS as ROWS
from flower_fgl.nn import build_model
from flower_fgl.protocols.prototypes import LocalPrototypes
from flower_fgl.simulation.run import run_one

METHODS = ("local", "fedavg", "fedproto", "fedpg")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="physics")
    parser.add_argument("--model", default="gamlp")
    parser.add_argument("--partition", default="metis")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds per run")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2)
    return parser.parse_args()


def settings(options: argparse.Namespace, method: str) -> dict[str, Any]:
    return {
        "method": method,
        "dataset": options.dataset,
        "model": options.model,
        "partition": options.partition,
        "clients": options.clients,
        "rounds": options.warm_up + options.rounds,
        "local-epochs": 3,
        "threads": 1,
        "seed": 0,
    }


def count_parameters(options: argparse.Namespace) -> tuple[int, int]:
    """Return P of the backbone and the embedding width p."""
    config = RunConfig.parse(settings(options, "fedavg"), ROWS)
    graph = open_store(config, options.clients).load(0)
    model = build_model(
        options.model,
        in_channels=graph.num_features,
        hidden_channels=config.hidden_channels,
        num_classes=graph.num_classes,
        num_layers=config.num_layers,
        dropout=config.dropout,
        readout=False,
        initialise=False,
    )
    return sum(p.numel() for p in model.parameters()), config.hidden_channels


def measure(
    options: argparse.Namespace, method: str
) -> tuple[list[float], dict[str, float], float]:
    """Return seconds per round, and bytes and prototypes per client in the last round."""
    present: list[int] = []
    pack = LocalPrototypes.to_record

    def counting(upload: LocalPrototypes) -> Any:
        present.append(int((upload.counts > 0).sum()))
        return pack(upload)

    LocalPrototypes.to_record = counting  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            values = {**settings(options, method), "output-dir": folder}
            run = run_one(values, engine="local", workers=None)
            rounds = list(run.rounds)
    finally:
        LocalPrototypes.to_record = pack  # type: ignore[method-assign]
    clients = options.clients
    sent = {
        way: sum(v for k, v in payloads.items() if k not in ("metrics", "config"))
        / clients
        for way, payloads in rounds[-1]["bytes"].items()
    }
    seconds = [row["seconds"]["total"] for row in rounds[options.warm_up :]]
    return seconds, sent, sum(present[-clients:]) / clients if present else 0.0


def main() -> None:
    options = arguments()
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    sent: dict[str, dict[str, float]] = {}
    present: dict[str, float] = {}
    for _ in range(options.turns):
        for method in METHODS:
            found, sent[method], present[method] = measure(options, method)
            seconds[method] += found
    parameters, width = count_parameters(options)
    formula = {
        method: {"up": 4 * m * (width + 1), "down": 4 * m * width}
        for method, m in present.items()
    }
    formula["fedavg"] = {"up": 4.0 * parameters, "down": 4.0 * parameters}
    base = seconds["local"]
    average = sum(sent["fedavg"].values())
    table = Table(
        "method", "s/round", "ratio", "fastest", "ratio", "up: formula", "measured",
        "down: formula", "measured", "share of FedAvg",
        title=f"{options.dataset}, {options.clients} clients, {options.model}, "
        f"{parameters} parameters",
    )  # fmt: skip
    for method in METHODS:
        typical, best = statistics.median(seconds[method]), min(seconds[method])
        table.add_row(
            method,
            f"{typical:.3f}", f"{typical / statistics.median(base):.2f}",
            f"{best:.3f}", f"{best / min(base):.2f}",
            f"{formula[method]['up']:.0f}", f"{sent[method].get('up', 0):.0f}",
            f"{formula[method]['down']:.0f}", f"{sent[method].get('down', 0):.0f}",
            f"{sum(sent[method].values()) / average:.5f}",
        )  # fmt: skip
    console = Console(width=130)
    console.print(table)


if __name__ == "__main__":
    main()
