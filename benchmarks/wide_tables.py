"""Measure how long graph files of CSV tables take to read.

    python benchmarks/wide_tables.py --nodes 200 --columns 20000

Writes a folder of random numbers with four digits, reads it as a data owner's SuperNode
does, and prints processor seconds, seconds, and the memory that reading added.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from flower_fgl.datasets.graph_files.graph_file import load_graph_file


def write_tables(folder: Path, num_nodes: int, num_columns: int) -> None:
    """Write ``nodes.csv`` and ``edges.csv`` with five edges per node."""
    rng = np.random.default_rng(0)
    with open(folder / "nodes.csv", "w") as file:
        names = ",".join(f"f{i}" for i in range(num_columns))
        file.write(f"id,label,{names}\n")
        for i in range(num_nodes):
            row = ",".join(map("{:.4g}".format, rng.standard_normal(num_columns)))
            file.write(f"n{i},c{i % 3},{row}\n")
    with open(folder / "edges.csv", "w") as file:
        file.write("source,target\n")
        for a, b in rng.integers(0, num_nodes, (5 * num_nodes, 2)):
            file.write(f"n{a},n{b}\n")


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--columns", type=int, default=20_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_tables(Path(name), given.nodes, given.columns)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start, busy = time.perf_counter(), time.process_time()
        load_graph_file(name)
        seconds, cpu = time.perf_counter() - start, time.process_time() - busy
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"{given.nodes:,} nodes, {given.columns:,} columns: {cpu:.1f} s of processor time, "
        f"{seconds:.1f} s, {(peak - before) / 1024:.0f} MiB"
    )


if __name__ == "__main__":
    main()
