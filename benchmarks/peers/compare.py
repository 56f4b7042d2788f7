"""Measure processor seconds a round: flower-fgl beside PyG, plain Flower and OpenFGL.

    python benchmarks/peers/compare.py --dataset cora --clients 10
    python benchmarks/peers/compare.py --clients 1000 --nodes 20000 --rounds 3

All rows train FedAvg with a two-layer GCN on the same files, written by ``flower-fgl
export``, with one thread per client. Each row runs with few and with more rounds; the
difference is without start and end. The processor time is that of all processes of a row.
OpenFGL has a row where it is installed (``pip install openfgl-lib==1.1.0 munkres``).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import psutil

YOUNG = 2.0
"""Seconds in which a new process may not have its own environment yet."""
HERE = Path(__file__).parent
MARK = "PEER_MARK"
"""Environment variable by which the processes of a row are found."""


def processor_seconds(command: list[str], folder: Path) -> float:
    """Run a command; return the processor time of all processes that inherit its mark.

    Ray's daemons leave the family of the process that starts them.
    """
    mark, spent, others = (
        secrets.token_hex(8),
        dict[psutil.Process, float](),
        set[int](),
    )
    with (folder / "log.txt").open("wb") as log:
        env = {**os.environ, MARK: mark, "FLWR_HOME": str(folder / "flower")}
        started = psutil.Popen(command, cwd=folder, stdout=log, stderr=log, env=env)
        while started.poll() is None:
            for pid in set(psutil.pids()) - others - {one.pid for one in spent}:
                try:
                    process = psutil.Process(pid)
                    if process.environ().get(MARK) == mark:
                        spent[process] = 0.0
                    elif time.time() - process.create_time() > YOUNG:
                        others.add(pid)
                except psutil.Error:
                    continue
            for process in spent:
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    spent[process] = times.user + times.system
            time.sleep(0.05)
    if started.returncode:
        sys.exit((folder / "log.txt").read_text()[-2000:])
    return sum(spent.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="synthetic")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument(
        "--nodes", type=int, default=2000, help="of the synthetic graph"
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help="rounds of the difference"
    )
    parser.add_argument("--skip", nargs="*", default=[], help="names of rows")
    options = parser.parse_args()
    program = str(Path(sys.executable).with_name("flower-fgl"))
    data = ["--dataset", options.dataset, "--clients", str(options.clients)]
    if options.dataset == "synthetic":
        blocks = max(10, options.clients)
        data += ["--set", f"synthetic.nodes={options.nodes}"]
        data += ["--set", f"synthetic.blocks={blocks}", "--set", "partition=uniform"]
    run = [
        program,
        "run",
        "--method",
        "fedavg",
        *data,
        "--quiet",
        "--set",
        "output-dir=r",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [program, "export", "files", *data],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        rows = {
            "flower-fgl, local": [*run, "--engine", "local", "--workers", "1"],
            "bare PyG": [sys.executable, str(HERE / "bare_pyg.py"), "files"],
            "flower-fgl, Flower": [*run, "--engine", "ray"],
            "flower-fgl, 8 nodes": [
                *run,
                "--engine",
                "ray",
                "--set",
                f"clients-per-node={-(-options.clients // 8)}",
            ],
            "plain Flower": [sys.executable, str(HERE / "plain_flower.py"), "files"],
        }
        if find_spec("openfgl"):
            rows["OpenFGL"] = [
                sys.executable,
                str(HERE / "openfgl_library.py"),
                "files",
            ]
        first = 0.0
        for row, command in rows.items():
            if row in options.skip:
                continue
            few, more = (
                processor_seconds([*command, "--rounds", str(rounds)], folder)
                for rounds in (2, 2 + options.rounds)
            )
            each = (more - few) / options.rounds
            first = first or each
            print(f"{row:20} {each:8.3f} s a round {each / first:8.1f} x", flush=True)


if __name__ == "__main__":
    main()
