"""Time the training of FedLoG's prompt generators in two forms.

    python benchmarks/prompt_generators.py --data cora:3 cora:10 citeseer:3
    python benchmarks/prompt_generators.py --data pubmed:3 --compare layouts

Both forms train in one process with one thread, in turn: Eq. (12) by features and by nodes,
or sparse and strided features. The table shows the seconds of an epoch of all clients
together, medians over the repeats, the ratio, and the largest difference of the clients'
losses. The package chooses by the numbers of nodes and features (``has_few_nodes``), and by
the share of features that are not zero (``DENSE_FROM``).
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

FORMS: dict[str, dict[str, tuple[str, Any]]] = {
    "products": {
        "by features": ("has_few_nodes", lambda *_: False),
        "by nodes": ("has_few_nodes", lambda *_: True),
    },
    "layouts": {"sparse": ("DENSE_FROM", 2.0), "strided": ("DENSE_FROM", 0.0)},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=["cora:3", "cora:10"])
    parser.add_argument("--compare", choices=FORMS, default="products")
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
    forms = FORMS[options.compare]
    columns = (*forms, "ratio", "losses differ by")
    table = Table("data", *columns, title="seconds of an epoch, all clients")
    for data in options.data:
        dataset, _, number = data.partition(":")
        seconds: dict[str, list[float]] = {form: [] for form in forms}
        losses: dict[str, list[float]] = {}
        for _ in range(options.repeats):
            for form, (name, value) in forms.items():
                with mock.patch.object(matching, name, value):
                    rows = train(dataset, int(number), options.epochs)
                took = sum(row["seconds"]["train"] for row in rows)
                seconds[form].append(took / options.epochs)
                losses[form] = [row["loss"] for row in rows]
        first, second = (median(seconds[form]) for form in forms)
        apart = max(abs(a / b - 1) for a, b in zip(*losses.values(), strict=True))
        shown = [f"{first:.3f}", f"{second:.3f}", f"{first / second:.2f}"]
        table.add_row(data, *shown, f"{100 * apart:.4f} %")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
