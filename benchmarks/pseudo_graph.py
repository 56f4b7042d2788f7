"""Measure the server step of O-pFGL: seconds and peak memory of the pseudo-graph.

    python benchmarks/pseudo_graph.py                    # all cases
    python benchmarks/pseudo_graph.py --cases cora arxiv --threads 1

The targets are random and have the sizes of the datasets: the cost does not depend on their
values. Each case runs in a separate process, so that its peak memory is measured alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

# classes, features, labelled nodes, share p (0: one node per class), steps, hidden width
CASES = {
    "cora": (7, 1433, 542, 0.0, 3000, 128),
    "arxiv": (40, 128, 90_941, 0.0025, 2000, 128),
    "arxiv-256": (40, 128, 90_941, 0.0025, 2000, 256),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, default=0, help="replaces the steps of the case"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(options: argparse.Namespace) -> None:
    """Measure one case and print it as JSON."""
    import torch

    from flower_fgl.algorithms.opfgl.pseudo_graph import (
        generate,
        pseudo_counts,
    )
    from flower_fgl.methods.opfgl import OPFGLSettings

    torch.set_num_threads(options.threads)
    classes, width, labelled, share, steps, hidden = CASES[options.measure]
    steps = options.steps or steps
    generator = torch.Generator().manual_seed(0)
    counts = torch.full((classes,), labelled // classes)
    start = time.perf_counter()
    graph, losses = generate(
        torch.randn(classes, 2 * width, generator=generator) * 0.1,
        torch.rand(classes, 2 * width, generator=generator) * 0.05,
        counts,
        pseudo_counts(counts, share=share or None),
        num_features=width,
        depth=1,
        settings=OPFGLSettings(server_steps=steps, link_channels=hidden),
        generator=generator,
    )
    seconds = time.perf_counter() - start
    memory = psutil.Process().memory_info()
    peak = getattr(memory, "peak_wset", 0)
    if not peak:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    fall = 1 - float(losses[-1, 0] / losses[0, 0])
    row = {"nodes": len(graph.labels), "steps": steps, "seconds": seconds}
    print(json.dumps({**row, "gib": peak / 2**30, "fall": fall}))


def main() -> None:
    options = arguments()
    if options.measure:
        measure(options)
        return
    table = Table(
        "case", "pseudo-nodes", "features", "hidden", "steps", "seconds", "ms/step",
        "peak GiB", "alignment decrease",
        title=f"pseudo-graph of O-pFGL, {options.threads} threads",
    )  # fmt: skip
    for case in options.cases:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:],
             "--measure", case],
            capture_output=True,
            text=True,
        )  # fmt: skip
        if done.returncode:
            sys.exit(done.stderr)
        row = json.loads(done.stdout.strip().splitlines()[-1])
        _, width, _, _, _, hidden = CASES[case]
        table.add_row(
            case, str(row["nodes"]), str(width), str(hidden), str(row["steps"]),
            f"{row['seconds']:.1f}", f"{1000 * row['seconds'] / row['steps']:.1f}",
            f"{row['gib']:.2f}", f"{100 * row['fall']:.1f} %",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
