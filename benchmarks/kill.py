"""Kill runs at random moments, resume them, and compare them with an uninterrupted run.

    python benchmarks/kill.py --engine local --runs 20
    python benchmarks/kill.py --engine ray --runs 5

Each run is a ``flower-fgl run`` in processes of its own. At one to three random moments
``kill -9`` hits the command, or with Ray one of the command, the SuperLink and the
ServerApp. ``flower-fgl run --resume`` continues the run each time; a run that was killed
before its first checkpoint starts anew. In the end all rows of all rounds and clients, the
summary and the model file must equal those of a run without a kill, to the bit; seconds,
the time of the start and the environment are not compared. Each result is a JSON line of
``--output`` as soon as it is known.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from flower_fgl import Run

METHODS = ("fedavg", "fedpg", "clustered-sampling", "fedproto")
OF_THE_PLACE = ("seconds", "started", "environment")
SETTINGS = (
    "checkpoint-every=2", "synthetic.nodes=200", "synthetic.blocks=6",
    "hidden-channels=8", "participation=0.6",
)  # fmt: skip
VICTIMS = {
    "local": ("command",),
    "ray": ("command", "flower-superlink", "flwr-simulation"),
}
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["flower_fgl.cli.run", "flower_fgl.simulation.run", "flower_fgl.simulation.local"]
)
PATIENCE = 240.0
"""Seconds that one process may take."""


class Command:
    """``flower-fgl run`` with some arguments, in a process of its own.

    The processes are forked from a server that has imported the package already, which
    saves the seconds of the imports. What runs in them is the command.
    """

    def __init__(self, *arguments: str) -> None:
        self.log = Path(tempfile.mkstemp(prefix="flower-fgl-kill-")[1])
        words = ["flower-fgl", "run", *arguments, "--quiet"]
        self.process = FORKS.Process(target=run_command, args=(words, str(self.log)))
        self.process.start()

    @property
    def is_over(self) -> bool:
        """Whether the process has ended."""
        return not self.process.is_alive()

    def finish(self) -> str:
        """Wait for the process, at most ``PATIENCE``; return its output."""
        self.process.join(PATIENCE)
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(self.process.pid)
            family = [*parent.children(recursive=True), parent]
        for member in family if self.process.is_alive() else []:
            with contextlib.suppress(psutil.Error):
                member.kill()
        self.process.join()
        text = self.log.read_text(errors="replace")
        self.log.unlink()
        return text


def run_command(words: list[str], log: str) -> None:
    """Run the command line in this process, with its output in a file."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = words
    from flower_fgl.cli.main import main as command

    command()


def fresh(engine: str, method: str, folder: Path, rounds: int) -> list[str]:
    """Return the arguments of a new run."""
    settings = [f"run-dir={folder}", f"rounds={rounds}", *SETTINGS]
    more = ["--workers", "1"] if engine == "ray" else []
    pairs = [word for setting in settings for word in ("--set", setting)]
    return ["--engine", engine, "--method", method, "--clients", "4", *more, *pairs]


def num_rounds(folder: Path) -> int:
    """Count the rounds in the run folder."""
    lines = folder / "rounds.jsonl"
    return lines.read_bytes().count(b"\n") if lines.exists() else 0


def kill(command: Command, victim: str) -> None:
    """Kill the command itself, or the program of that name below it."""
    parent = psutil.Process(command.process.pid)
    if victim == "command":
        parent.kill()
        return
    for child in parent.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(Path(word).name == victim for word in child.cmdline()[:2]):
                child.kill()


def contents(run: Run) -> dict[str, Any]:
    """Return everything of a run that must not depend on interruptions."""
    model = run.path / "model.safetensors"
    return {
        "rounds": [{k: v for k, v in r.items() if k != "seconds"} for r in run.rounds],
        "clients": [
            {k: v for k, v in r.items() if k != "seconds"} for r in run.clients
        ],
        "summary": {k: v for k, v in run.summary.items() if k not in OF_THE_PLACE},
        "model": model.read_bytes() if model.exists() else b"",
    }


def one_run(
    engine: str, method: str, home: Path, rounds: int, draw: random.Random
) -> dict[str, Any]:
    """Run, kill and resume until the run is over; return what happened."""
    folder = home / "run"
    kills: list[tuple[str, int]] = []
    planned, restarts = draw.randint(1, 3), 0
    arguments = fresh(engine, method, folder, rounds)
    while True:
        done = num_rounds(folder)
        command = Command(*arguments)
        if len(kills) < planned:
            # anywhere between the start of the process and the end of the run
            target = draw.randint(done, max(done, rounds - 1))
            end_by = time.monotonic() + PATIENCE
            while num_rounds(folder) < target or not (folder / "summary.json").exists():
                if command.is_over or time.monotonic() > end_by:
                    break
                time.sleep(0.005)
            time.sleep(draw.uniform(0, 0.3))
            if not command.is_over:
                victim = draw.choice(VICTIMS[engine])
                kills.append((victim, num_rounds(folder)))
                kill(command, victim)
        output = command.finish()
        status = ""
        with contextlib.suppress(OSError, ValueError):
            status = str(json.loads((folder / "summary.json").read_text())["status"])
        if status == "completed":
            return {"kills": kills, "restarts": restarts, "output": ""}
        if "has no checkpoint" in output or not (folder / "checkpoint").is_dir():
            restarts += 1
            shutil.rmtree(folder, ignore_errors=True)
            arguments = fresh(engine, method, folder, rounds)
        else:
            arguments = ["--resume", str(folder)]
        if len(kills) + restarts > 12:
            return {"kills": kills, "restarts": restarts, "output": output[-2000:]}


def main() -> int:
    """Print one line per run and the totals; the exit status is 1 if a run differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=VICTIMS, default="local")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="file for one JSON line per run")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    equal, kills = 0, 0
    with tempfile.TemporaryDirectory() as place:
        whole: dict[str, dict[str, Any]] = {}
        for number in range(given.runs):
            method = METHODS[number % len(METHODS)]
            if method not in whole:
                folder = Path(place) / f"whole-{method}"
                output = Command(
                    *fresh(given.engine, method, folder, given.rounds)
                ).finish()
                whole[method] = contents(Run.load(folder))
                assert whole[method]["summary"]["status"] == "completed", output
            home = Path(place) / f"run-{number}"
            home.mkdir()
            row = one_run(given.engine, method, home, given.rounds, draw)
            found = contents(Run.load(home / "run"))
            differs = [k for k in found if found[k] != whole[method][k]]
            equal += not differs
            kills += len(row["kills"])
            row = {"engine": given.engine, "method": method, "differs": differs, **row}
            if given.output:
                with given.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            print(f"{number + 1:3} {json.dumps(row)}", flush=True)
            shutil.rmtree(home, ignore_errors=True)
    print(
        f"{given.engine}: {given.runs} runs, {kills} kills, {equal} equal to the run "
        "without a kill"
    )
    return int(equal < given.runs)


if __name__ == "__main__":
    sys.exit(main())
