"""Measure clients that share a GPU: stacked, one by one, and the same on the CPU.

    python benchmarks/gpu.py                      # 1, 10, 100, 1,000 clients on cuda
    python benchmarks/gpu.py --clients 1000 --nodes 200 --methods fedavg
    python benchmarks/gpu.py --device cpu --clients 1 10   # dry run without a GPU
    python benchmarks/gpu.py --quick              # every method, in under 8 minutes

Every client has 100 nodes of the synthetic graph (``--nodes``). Each form runs in the local
engine, in its own process. Seconds are wall seconds of a whole round, messages and server
included, the median over the rounds after the first. A ratio above 1 means that the device
with its fastest form is faster. Methods without a stacked form run one by one only. Device
memory is the peak of what torch allocated on the GPU.

``--quick`` measures one round of every method that plain graphs can train: 100 clients
of 100 nodes for those with a stacked form, and 4 clients of 5,000 nodes for all. It trains
without dropout, so that the losses of all forms can be compared, and ends after
``--seconds``: what was left then is named.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from flower_fgl import simulate
from flower_fgl.methods import METHODS

FORMS = ("stacked", "one by one", "on the CPU")

QUICK = ((4, 5000, 500), (100, 100, 64))  # large, small: clients, nodes, features
ONCE = {"rounds": 1, "local_epochs": 50, "check_every": 0}
DISTILLED = {"server_epochs": 5, "generator_steps": 5, "finetune_epochs": 5}
# for long starts, single rounds, and small batches, which do not stack
SHORT: dict[str, dict[str, Any]] = {
    "adafgl": {"adafgl": {"finetune_epochs": 5}},
    "adpfedgnn": {"model": "graphsage", "batch_size": 0},
    "co-boosting": {**ONCE, "co-boosting": DISTILLED},
    "dense": {**ONCE, "dense": DISTILLED},
    "fedlog": {"batch_size": 0, "fedlog": {"prompt_epochs": 1}},
    "fedpano": {"split": "60/20/20"},  # stacked clients train on most of their graphs
    "fedsage+": {"fedsage+": {"gen_rounds": 1}},
    "opfgl": {**ONCE, "min_class_count": 1, "opfgl": {"server_steps": 50}},
}
OTHER_GRAPHS = ("fedhgn", "fedlit", "flit", "fedstar", "fedsst", "gcfl+")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, …, or cpu")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        help="default: fedavg, fedpg and fedlog; with --quick all of plain graphs",
    )
    parser.add_argument("--model", default="gcn")
    parser.add_argument("--nodes", type=int, default=100, help="nodes of each client")
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="rounds after the first")
    parser.add_argument("--quick", action="store_true", help="every method, briefly")
    parser.add_argument("--seconds", type=float, default=460, help="limit of --quick")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if not options.methods:
        every = [name for name in METHODS.own if name not in OTHER_GRAPHS]
        options.methods = every if options.quick else ["fedavg", "fedpg", "fedlog"]
    return options


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
    """Run one form; return seconds per round, peak memory (GiB), accuracy and loss."""
    is_gpu = values["device"].startswith("cuda")
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(values["device"])
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(**values, output_dir=folder)
    seconds = [row["seconds"]["total"] for row in run.rounds if row["phase"] == "train"]
    losses = [row["loss"] for row in run.rounds if row.get("loss") is not None]
    peak = torch.cuda.max_memory_allocated(values["device"]) if is_gpu else 0
    return {
        "seconds": statistics.median(seconds[1:] or seconds),
        "gib": peak / 2**30,
        "accuracy": run.summary["last"]["test"]["accuracy"],
        "loss": losses[-1] if losses else float("nan"),
    }


def quick_cases(options: argparse.Namespace) -> Iterator[tuple[str, list[Any]]]:
    """Yield each form at each size, with the settings of all methods that have it."""
    for clients, options.nodes, options.features in QUICK:
        is_small = clients == QUICK[1][0]
        for form in ("stacked", "on the CPU", "one by one"):
            found = []
            for method in options.methods:
                changes = forms(options, method)
                is_asked = is_small == ("stacked" in changes) or form != "one by one"
                if form in changes and is_asked and (not is_small or len(changes) > 2):
                    shared = {**settings(options, method, clients), "dropout": 0.0}
                    found.append({**shared, **SHORT.get(method, {}), **changes[form]})
            if found:
                yield form, found


def measure_all(cases: list[dict[str, Any]]) -> None:
    """Measure cases in one process; print a line of JSON for each."""
    for values in cases:
        try:
            result: dict[str, Any] = measure(values)
        except Exception as error:  # the others are measured all the same
            result = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps({"method": values["method"], **result}), flush=True)


def quick(options: argparse.Namespace) -> None:
    """Measure every method briefly; print a table of each size, and what is missing."""
    options.rounds = 1
    end = time.monotonic() + options.seconds
    results: dict[int, dict[str, dict[str, Any]]] = {}
    for form, cases in quick_cases(options):
        command = [sys.executable, str(Path(__file__).resolve()), "--measure"]
        with subprocess.Popen(
            [*command, json.dumps(cases)], stdout=subprocess.PIPE, text=True
        ) as child:
            stop = threading.Timer(max(0.1, end - time.monotonic()), child.kill)
            stop.start()
            left = [values["method"] for values in cases]
            for line in child.stdout or ():
                result = json.loads(line)
                left.remove(result["method"])
                size = results.setdefault(cases[0]["clients"], {})
                size.setdefault(result["method"], {})[form] = result
                print(f"{cases[0]['clients']} clients, {form}: {line}", end="")
            stop.cancel()
        if left:
            print(f"{cases[0]['clients']} clients, {form}: not run: {', '.join(left)}")
    for (clients, options.nodes, _), found in zip(
        QUICK, results.values(), strict=False
    ):
        table = Table(
            "method", *(f"{form}, s" for form in FORMS), "one by one / best",
            "CPU / best", "losses differ by", "GiB",
            title=f"{clients} clients of {options.nodes} nodes",
        )  # fmt: skip
        for method, of_forms in found.items():
            table.add_row(method, *quick_row(of_forms))
        Console(width=150).print(table)


def quick_row(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return a row of the table of ``--quick``: seconds, ratios, losses, memory."""
    known = {form: found[form] for form in FORMS if "seconds" in found.get(form, {})}
    seconds = {form: result["seconds"] for form, result in known.items()}
    on_device = [seconds[form] for form in FORMS[:2] if form in seconds]
    best = min(on_device, default=float("nan"))
    losses = [result["loss"] for result in known.values()]
    apart = (max(losses) - min(losses)) / abs(max(losses)) if losses else float("nan")
    return [
        *(
            f"{seconds[form]:.3f}" if form in seconds
            else "failed" if form in found else "-"
            for form in FORMS
        ),
        *(f"{seconds.get(form, float('nan')) / best:.1f}" for form in FORMS[1:]),
        f"{apart:.1e}",
        f"{max((result['gib'] for result in known.values()), default=0):.2f}",
    ]  # fmt: skip


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
        cases = json.loads(options.measure)
        measure_all([cases] if isinstance(cases, dict) else cases)
        return
    if options.device != "cpu" and not torch.cuda.is_available():
        sys.exit(f"torch finds no GPU for --device {options.device}; try --device cpu.")
    if options.quick:
        quick(options)
        return
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
                found[form] = json.loads(done.stdout.strip().splitlines()[-1])
                if "error" in found[form]:
                    sys.exit(found[form]["error"])
                seconds = found[form]["seconds"]
                print(
                    f"{method}, {clients:,} clients, {form}: {seconds:.4f} s",
                    file=sys.stderr,
                )
            add_row(table, method, clients, found)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
