"""Measure rows per second, latency and memory of predictions from files.

    python benchmarks/predict_speed.py

For each task a short run trains a model on synthetic data with 2 CPU threads. Then a small
and a large file are predicted: the seconds of a call of ``predict_graph`` include the
reading of the model and of the ``.npz`` file; those of the table the writing of CSV.
Latency is the median of repeated calls for the small file. The memory is the largest
resident memory of the process so far, all of it. Each task is measured in a process of its
own; ``--task`` measures one in this process.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flower_fgl import simulate
from flower_fgl.simulation.prediction import predict_graph, write_table

TASKS = ("nodes", "links", "top-k", "edges", "graphs")
FEATURES, WIDTH = 32, 64
SIZES = {
    "nodes": (1_000, 1_000_000),
    "links": (1_000, 1_000_000),
    "top-k": (1_000, 20_000),
    "edges": (1_000, 1_000_000),
    "graphs": (1_000, 1_000_000),
}
"""Rows of the small and of the large file; for ``top-k`` nodes with 10 partners each."""
REPEATS = 9

Arrays = dict[str, Any]


def one_graph(nodes: int, edges: int, draw: np.random.Generator) -> Arrays:
    return {
        "x": draw.standard_normal((nodes, FEATURES), dtype=np.float32),
        "edges": draw.integers(nodes, size=(edges, 2)),
    }


def many_graphs(number: int, draw: np.random.Generator) -> Arrays:
    sizes = draw.integers(5, 16, size=number)
    first = sizes.cumsum() - sizes
    nodes = np.arange(sizes.sum())
    graph = np.repeat(np.arange(number), sizes)
    last = (first + sizes - 1)[graph]
    ring = np.stack([nodes, np.where(nodes == last, first[graph], nodes + 1)], axis=1)
    x = draw.standard_normal((len(nodes), 9), dtype=np.float32)
    return {"x": x, "edges": ring, "graph_of_node": graph}


def make(task: str, rows: int, draw: np.random.Generator) -> Arrays:
    """Return the arrays of an unlabelled file with a number of rows to predict."""
    if task == "graphs":
        return many_graphs(rows, draw)
    if task == "edges":
        arrays = one_graph(max(100, rows // 10), rows, draw)
        return arrays | {"edge_attr": draw.standard_normal((rows, 8), dtype=np.float32)}
    nodes = rows if task in ("nodes", "top-k") else max(100, rows // 10)
    return one_graph(nodes, 5 * nodes, draw)


def train(task: str, folder: Path, draw: np.random.Generator) -> Path:
    """Train a model for the task with two owners, and return its run folder."""
    settings: dict[str, Any] = {"setting": "transductive"}
    if task == "graphs":
        settings = {"setting": "graph", "model": "gin"}
    elif task in ("links", "top-k"):
        settings = {"setting": "link"}
    elif task == "edges":
        settings = {"setting": "edge"}
    (folder / "owners").mkdir()
    for owner in ("a", "b"):
        arrays = make(task, 400, draw)
        names = np.array(["low", "mid", "high"])
        key = "edge_label" if task == "edges" else "y"
        rows = len(arrays["x"])
        if task in ("graphs", "edges"):
            rows = 400
        arrays[key] = draw.integers(3, size=rows)
        arrays["edge_class_names" if task == "edges" else "class_names"] = names
        np.savez(folder / "owners" / f"{owner}.npz", **arrays)
    return simulate(
        "fedavg", owners=str(folder / "owners"), output_dir=str(folder / "runs"),
        rounds=1, hidden_channels=WIDTH, **settings,
    ).path  # fmt: skip


def seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def measure(task: str) -> str:
    """Return a line of the table."""
    torch.set_num_threads(2)
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = train(task, folder, draw)
        cells = []
        for rows, repeats in zip(SIZES[task], (REPEATS, 1), strict=True):
            arrays = make(task, rows, draw)
            np.savez(folder / "new.npz", **arrays)
            more: dict[str, Any] = {"top_k": 10} if task == "top-k" else {}
            if task == "links":
                pairs = draw.integers(len(arrays["x"]), size=(rows, 2))
                pairs = pairs[pairs[:, 0] != pairs[:, 1]]
                np.savetxt(folder / "pairs.csv", pairs, "%d", ",", header="source,target",
                           comments="")  # fmt: skip
                more = {"pairs": folder / "pairs.csv"}
            del arrays
            predict_graph(model, folder / "new.npz", **more) if repeats > 1 else None
            took = [
                seconds(lambda: predict_graph(model, folder / "new.npz", **more))  # noqa: B023
                for _ in range(repeats)
            ]
            found = took[-1][1]
            wrote, _ = seconds(lambda: write_table(found, folder / "out.csv"))  # noqa: B023
            cells.append((statistics.median(t for t, _ in took), wrote, len(found)))
    (latency, _, few), (call, wrote, many) = cells
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"{task:<7}{few:>8,}{1000 * latency:>12.0f}{many:>12,}{call:>9.1f}"
        f"{many / call:>13,.0f}{wrote:>11.1f}{peak:>9.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS)
    task = parser.parse_args().task
    if task:
        print(measure(task))
        return
    print(
        "task       rows  latency ms        rows  seconds     rows / s  write CSV  max GiB"
    )
    for name in TASKS:
        done = subprocess.run(
            [sys.executable, __file__, "--task", name],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True,
        )  # fmt: skip
        print(done.stdout.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
