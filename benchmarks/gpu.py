"""Measure clients that share a GPU: stacked, one by one, and the same on the CPU.

    python benchmarks/gpu.py                      # 1, 10, 100, 1,000 clients on cuda
    python benchmarks/gpu.py --clients 1000 --nodes 200 --methods fedavg
    python benchmarks/gpu.py --device cpu --clients 1 10   # dry run without a GPU

Every client has 100 nodes of the synthetic graph (``--nodes``). Each form runs in the local
engine, in its own process. Seconds are wall seconds of a whole round, messages and server
included, the median over the rounds after the first. A ratio above 1 means that the device
with its fastest form is faster. Methods without a stacked form run one by one only. Device
memory is the peak of what torch allocated on the GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from flower_fgl import simulate
from flower_fgl.methods import METHODS

FORMS = ("stacked", "one by one", "on the CPU")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, …, or cpu")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument(
        "--methods", nargs="+", default=["fedavg", "fedpg", "fedlog"], choices=METHODS
    )
    parser.add_argument("--model", default="gcn")
    parser.add_argument("--nodes", type=int, default=100, help="nodes of each client")
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="rounds after the first")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def has_stacked_form(method: str) -> bool:
    """Return whether clients of a method can train together."""
    return bool(vars(METHODS[method].load_client_app()).get("stacked"))


def forms(options: argparse.Namespace, method: str) -> dict[str, dict[str, Any]]:
    """Return device and ``stacked`` of each form that a method has."""
    stacked = "true" if has_stacked_form(method) else "false"
    found: dict[str, dict[str, Any]] = {
        "stacked": {"device": options.device, "stacked": "true"},
        "one by one": {"device": options.device, "stacked": "false"},
        "on the CPU": {"device": "cpu", "stacked": stacked},
    }
    if stacked == "false":
        del found["stacked"]
    return found


def settings(options: argparse.Namespace, method: str, clients: int) -> dict[str, Any]:
    """Return the settings that all forms share."""
    return {
        "method": method,
        "model": options.model,
        "clients": clients,
        "rounds": options.rounds + 1,
        "partition": "uniform",  # METIS leaves small parts empty
        "synthetic": {
            "nodes": options.nodes * clients,
            "features": options.features,
            "degree": 4.0,
        },
        "checkpoint_every": 0,
    }


def measure(values: dict[str, Any]) -> dict[str, float]:
    """Run one form; return seconds per round, peak device memory (GiB) and accuracy."""
    is_gpu = values["device"].startswith("cuda")
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(values["device"])
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(**values, output_dir=folder)
    seconds = [row["seconds"]["total"] for row in run.rounds if row["phase"] == "train"]
    peak = torch.cuda.max_memory_allocated(values["device"]) if is_gpu else 0
    return {
        "seconds": statistics.median(seconds[1:]),
        "gib": peak / 2**30,
        "accuracy": run.summary["last"]["test"]["accuracy"],
    }


def add_row(
    table: Table, method: str, clients: int, found: dict[str, dict[str, float]]
) -> None:
    """Add the results of all forms of one case to the table."""
    on_device = {form: found[form] for form in FORMS[:2] if form in found}
    best = min(result["seconds"] for result in on_device.values())
    alone, cpu = found["one by one"]["seconds"], found["on the CPU"]["seconds"]
    peaks = [f"{result['gib']:.2f}" for result in on_device.values()]
    spread = [result["accuracy"] for result in found.values()]
    table.add_row(
        method,
        f"{clients:,}",
        *(f"{found[form]['seconds']:.4f}" if form in found else "-" for form in FORMS),
        f"{alone / best:.1f}",
        f"{cpu / best:.1f}",
        " / ".join(peaks),
        f"{100 * (max(spread) - min(spread)):.2f}",
    )


def new_table(options: argparse.Namespace) -> Table:
    """Return the empty table."""
    device = options.device
    name = torch.cuda.get_device_name(device) if device != "cpu" else "dry run"
    return Table(
        "method", "clients", *(f"{form}, s" for form in FORMS), "one by one / best",
        "CPU / best", "device GiB", "accuracies differ, points",
        title=f"{device} ({name}), {options.model}, {options.nodes} nodes per client",
    )  # fmt: skip


def main() -> None:
    options = arguments()
    if options.measure:
        print(json.dumps(measure(json.loads(options.measure))))
        return
    if options.device != "cpu" and not torch.cuda.is_available():
        sys.exit(f"torch finds no GPU for --device {options.device}; try --device cpu.")
    table = new_table(options)
    for method in options.methods:
        for clients in options.clients:
            found = {}
            for form, change in forms(options, method).items():
                values = {**settings(options, method, clients), **change}
                done = subprocess.run(
                    [sys.executable, str(Path(__file__).resolve()),
                     "--measure", json.dumps(values)],
                    capture_output=True,
                    text=True,
                )  # fmt: skip
                if done.returncode:
                    sys.exit(done.stderr)
                found[form] = json.loads(done.stdout.strip().splitlines()[-1])
                seconds = found[form]["seconds"]
                print(
                    f"{method}, {clients:,} clients, {form}: {seconds:.4f} s",
                    file=sys.stderr,
                )
            add_row(table, method, clients, found)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
