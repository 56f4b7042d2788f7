"""Measure a complete run of O-pFGL on a synthetic graph of ogbn-arxiv's size.

    python benchmarks/one_shot_large.py   # 169,343 nodes, 40 classes, 128 features

Prints the seconds of the server's step and of the clients' stages, bytes, and the peak
memory of the process. The cache is a new folder, so nothing is reused.
"""

from __future__ import annotations

import argparse
import os
import tempfile

from rich.console import Console
from rich.table import Table
from round_time import PeakMemory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=169_343)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--local-epochs", type=int, default=3000)
    parser.add_argument("--link-channels", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FLOWER_FGL_CACHE"] = f"{folder}/cache"
        measure(options, folder)


def measure(options: argparse.Namespace, folder: str) -> None:
    from flower_fgl.simulation.run import run_one

    memory = PeakMemory()
    memory.start()
    run = run_one(
        {
            "method": "opfgl",
            "clients": options.clients,
            "partition": "metis-label",
            "split": "60/20/20",
            "local-epochs": options.local_epochs,
            "patience": 5,
            "threads": options.threads,
            "output-dir": f"{folder}/runs",
            "synthetic.nodes": options.nodes,
            "synthetic.degree": 13.77,
            "synthetic.classes": 40,
            "synthetic.features": 128,
            "synthetic.blocks": 200,
            # the published command for ogbn-arxiv partitioned by METIS
            "opfgl.server-steps": 2000,
            "opfgl.link-channels": options.link_channels,
            "opfgl.lr-features": 5e-2,
            "opfgl.lr-links": 1e-2,
            "opfgl.lr-global": 5e-4,
            "opfgl.lr-personal": 5e-3,
            "opfgl.node-share": 0.0025,
            "opfgl.beta": 1.0,
            "opfgl.gamma-max": 0.15,
            "opfgl.propagation-steps": 5,
            "opfgl.propagation-share": 0.6,
            "opfgl.reliable-classes": 4,
            "opfgl.reliable-degree": 5,
        },
        engine="local",
    )
    peak = memory.stop()
    console = Console(width=100)
    table = Table("phase", "seconds")
    for phase, seconds in run.rounds[0]["seconds"].items():
        table.add_row(phase, f"{seconds:.1f}")
    console.print(table)
    sent = run.rounds[0]["bytes"]
    console.print(
        "bytes of all clients:", {way: sum(sent[way].values()) for way in sent}
    )
    console.print(f"peak memory: {peak:.2f} GiB")
    best = run.summary["best"]["test"]
    console.print(
        f"test accuracy {best['accuracy']:.3f}, macro-F1 {best['macro_f1']:.3f}"
    )
    console.print(f"partition {run.summary['partition_sha256']}", soft_wrap=True)


if __name__ == "__main__":
    main()
