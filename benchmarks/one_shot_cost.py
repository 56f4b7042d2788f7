"""Measure O-pFGL's single exchange: seconds by part, and bytes against the formula.

    python benchmarks/one_shot_cost.py                    # Cora, CiteSeer and PubMed
    python benchmarks/one_shot_cost.py --datasets cora --widths 64 512

Runs the first seed of experiments/opfgl/opfgl-table1-DATASET.toml for 10 clients with the
local engine. The bytes for other widths come from runs of one epoch. Seconds of a stage are
means over the clients, which stop after different numbers of epochs. Bytes are totals over
all clients: statistics up, 4·M·(2D + 2) for M classes sent (mean, variance and two counts
per class; D = 2d), and the pseudo-graph down, 4·(s·d + s + s²) per client for s
pseudo-nodes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flower_fgl.lab.experiments.experiment_file import read_experiment
from flower_fgl.lab.results import Run
from flower_fgl.simulation.run import run_one

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
CLIENTS = 10


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--datasets", nargs="+", default=["cora", "citeseer", "pubmed"])
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 512])
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def planned(dataset: str, method: str) -> dict[str, Any]:
    """Return the settings of the experiment's first run of a method."""
    experiment = read_experiment(EXPERIMENTS / "opfgl" / f"opfgl-table1-{dataset}.toml")
    for run in experiment.runs():
        if run.settings["method"] == method and run.settings["clients"] == CLIENTS:
            return dict(run.settings)
    raise SystemExit(f"No run of {method} with {CLIENTS} clients on {dataset}.")


def run_with(values: dict[str, Any], changes: dict[str, Any]) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        return run_one(
            {**values, **changes, "output-dir": folder}, engine="local", workers=None
        )


def sent(run: Run) -> dict[str, int]:
    """Return the bytes over all clients and rounds, without the scores in replies."""
    return {
        way: sum(
            n
            for row in run.rounds
            for kind, n in row["bytes"][way].items()
            if kind not in ("metrics", "config")
        )
        for way in ("up", "down")
    }


def formula(run: Run) -> dict[str, int]:
    """Return the bytes of the exchange by the documented formula."""
    clients = [row for row in run.clients if row["round"] == 0]
    width = clients[0]["num_features"]
    counts = [row["class_counts"] for row in clients]
    classes = sum(n >= 2 for row in counts for n in row)
    pseudo = sum(any(row[c] >= 2 for row in counts) for c in range(len(counts[0])))
    return {
        "up": 4 * classes * (2 * 2 * width + 2),
        "down": CLIENTS * 4 * (pseudo * width + pseudo + pseudo**2),
    }


def main() -> None:
    options = arguments()
    seconds = Table(
        "dataset", "server step", "stage 1", "stage 2", "slowest client",
        title=f"seconds, {CLIENTS} clients, {options.threads} thread",
    )  # fmt: skip
    traffic = Table(
        "dataset", "run", "width", "up", "formula", "down", "formula", title="bytes"
    )
    for dataset in options.datasets:
        for method in ("opfgl", "fedavg"):
            values = {**planned(dataset, method), "threads": options.threads}
            for width in options.widths:
                is_whole = method == "opfgl" and width == options.widths[0]
                short = {"rounds": 1, "hidden-channels": width}
                if method == "fedavg":
                    short["fedavg.finetune-epochs"] = 0
                if not is_whole:
                    short |= {"local-epochs": 1, "check-every": 1}
                run = run_with(values, short)
                total, stated = sent(run), {"up": "", "down": ""}
                if method == "opfgl":
                    stated = {way: f"{n:,}" for way, n in formula(run).items()}
                traffic.add_row(
                    dataset, method, str(width),
                    f"{total['up']:,}", stated["up"],
                    f"{total['down']:,}", stated["down"],
                )  # fmt: skip
                if is_whole:
                    seconds.add_row(dataset, *costs(run))
    console = Console(width=110)
    console.print(seconds)
    console.print(traffic)


def costs(run: Run) -> list[str]:
    """Return the seconds of the server, the clients' stages, and the slowest client."""
    clients = [row["seconds"] for row in run.clients if row["round"] == 1]
    parts = [[row.get(name, 0.0) for row in clients] for name in ("stage-1", "stage-2")]
    whole = max(sum(row) for row in zip(*parts, strict=True))
    server = run.rounds[0]["seconds"]["aggregate"]
    means = [sum(part) / len(part) for part in parts]
    return [f"{value:.2f}" for value in (server, *means, whole)]


if __name__ == "__main__":
    main()
