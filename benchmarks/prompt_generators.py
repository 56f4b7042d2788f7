"""Time the training of FedLoG's prompt generators, by nodes and by features.

    python benchmarks/prompt_generators.py --data cora:3 cora:10 citeseer:3

Both forms of Eq. (12) train in one process with one thread, in turn. The table shows the
seconds of an epoch of all clients together, medians over the repeats, the ratio, and the
largest difference of the clients' losses. The package chooses by the numbers of nodes and
features (``has_few_nodes``).
"""

from __future__ import annotations

import argparse
import tempfile
from statistics import median
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from flower_fgl.algorithms.fedlog import matching
from flower_fgl.simulation.run import run_one


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=["cora:3", "cora:10"])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def train(dataset: str, clients: int, epochs: int) -> list[dict[str, Any]]:
    """Return the rows of round 0, in which the generators train."""
    settings = {
        "method": "fedlog",
        "dataset": dataset,
        "clients": clients,
        "setting": "closed-set",
        "batch-size": 64,
        "rounds": 1,
        "threads": 1,
        "fedlog.prompt-epochs": epochs,
    }
    with tempfile.TemporaryDirectory() as folder:
        run = run_one({**settings, "output-dir": folder}, engine="local")
        return [row for row in run.clients if row["round"] == 0 and "loss" in row]


def main() -> None:
    options = arguments()
    columns = ("by features", "by nodes", "ratio", "losses differ by")
    table = Table("data", *columns, title="seconds of an epoch, all clients")
    for data in options.data:
        dataset, _, number = data.partition(":")
        seconds: dict[bool, list[float]] = {False: [], True: []}
        losses: dict[bool, list[float]] = {}
        for _ in range(options.repeats):
            for form in (False, True):
                with mock.patch.object(matching, "has_few_nodes", return_value=form):
                    rows = train(dataset, int(number), options.epochs)
                took = sum(row["seconds"]["train"] for row in rows)
                seconds[form].append(took / options.epochs)
                losses[form] = [row["loss"] for row in rows]
        times = {form: median(seconds[form]) for form in seconds}
        apart = max(abs(a / b - 1) for a, b in zip(*losses.values(), strict=True))
        ratio = times[False] / times[True]
        shown = [f"{times[False]:.3f}", f"{times[True]:.3f}", f"{ratio:.2f}"]
        table.add_row(data, *shown, f"{100 * apart:.4f} %")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
