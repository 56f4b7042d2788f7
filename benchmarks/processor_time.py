"""Print the processor seconds of each round of ``flower-fgl run``, of all its processes.

    python benchmarks/processor_time.py --engine ray --clients 1000 --rounds 6 \
        --set synthetic.nodes=20000 --set clients-per-node=125
    python benchmarks/processor_time.py --rounds 1

Arguments are those of ``flower-fgl run``. The first row has everything up to the end of the
first round; the last one the whole run, and the peak of the memory of all processes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import psutil

POLL_SECONDS = 0.1


def main() -> None:
    """Start the run and sample its processes until it ends."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, "-m", "flower_fgl", "run", "--quiet"]
        command += ["--set", f"run-dir={folder}", *sys.argv[1:]]
        started = psutil.Popen(command)
        used: dict[psutil.Process, float] = {}
        peak = rounds = 0
        before = 0.0
        while started.poll() is None:
            memory = 0
            try:
                found = [started, *started.children(recursive=True)]
            except psutil.Error:
                found = []
            for process in {*used, *found}:
                try:
                    times = process.cpu_times()
                    used[process] = times.user + times.system
                    memory += process.memory_info().rss
                except psutil.Error:
                    continue
            peak = max(peak, memory)
            rows = folder / "rounds.jsonl"
            written = rows.read_text().count("\n") if rows.exists() else 0
            if written > rounds:
                rounds, total = written, sum(used.values())
                print(f"round {rounds}: {total - before:.2f} s", flush=True)
                before = total
            time.sleep(POLL_SECONDS)
    print(f"whole run: {sum(used.values()):.1f} s, {peak / 2**30:.2f} GiB")
    sys.exit(started.returncode)


if __name__ == "__main__":
    main()
