"""Measure how fast ``flower-fgl`` answers when it trains nothing.

    python benchmarks/start_up.py [--repeats 5]

One row per command line: help, lists and argument errors. ``seconds`` is the median wall
time of a fresh process, ``MB`` the largest peak of its resident memory (10⁶ bytes).
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from statistics import median

COMMANDS = (
    "--help",
    "methods",
    "settings",
    "settings fedpg",
    "datasets",
    "run --help",
    "partition --help",
    "report --help",
    "run --nosuch",
    "run --method nosuch",
    "run --dataset nosuch",
    "run --set nosuch=1",
    "run --set model=nosuch",
    "run missing.toml",
    "run --resume nofolder",
    "partition --dataset nosuch",
    "export out --dataset nosuch",
    "report nofolder",
)
PROGRAM = "from flower_fgl.cli.main import main; main()"
UNIT = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss


def start(arguments: list[str], folder: str) -> tuple[float, float]:
    """Run one command line; return its wall seconds and peak resident megabytes."""
    before = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    # wait4 reports this child alone; getrusage(RUSAGE_CHILDREN) the largest of all
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return time.perf_counter() - before, usage.ru_maxrss * UNIT / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"{'flower-fgl …':<32}{'seconds':>9}{'MB':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            found = [start(shlex.split(command), folder) for _ in range(args.repeats)]
            seconds = median(seconds for seconds, _ in found)
            megabytes = max(megabytes for _, megabytes in found)
            print(f"{command:<32}{seconds:>9.2f}{megabytes:>7.0f}", flush=True)


if __name__ == "__main__":
    main()
