"""Worker processes on two nodes of a Ray cluster, one of which dies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flower_fgl import Run, resume, simulate
from tests.support.flower_deployment import family_of, free_port, wait_until
from tests.support.short_runs import comparable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MANY = {
    "synthetic": {"nodes": 20_000, "blocks": 1000},
    "partition": "uniform",
    "hidden_channels": 8,
    "checkpoint_every": 1,
}


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start one Ray node in a process that runs until it is killed."""
    ray = str(Path(sys.executable).with_name("ray"))
    common = ["--num-cpus=1", "--num-gpus=0", "--disable-usage-stats", "--block"]
    common += ["--object-store-memory=100000000", "--node-ip-address=127.0.0.1"]
    with (folder / "ray.log").open("ab") as log:
        return subprocess.Popen(
            [ray, "start", *arguments, *common],
            stdout=log,
            stderr=log,
            env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
        )


def kill(node: subprocess.Popen[bytes]) -> None:
    for process in family_of(node):
        if process.is_running():
            process.kill()
    node.wait(timeout=60)


def is_alive(address: str, nodes: int) -> bool:
    """Return whether a cluster has so many living nodes."""
    text = (
        f"import ray; ray.init({address!r}, log_to_driver=False, "
        "configure_logging=False); print(sum(n['Alive'] for n in ray.nodes()))"
    )
    found = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return found.stdout.split()[-1:] == [str(nodes)]


@pytest.fixture
def cluster(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield the address of a cluster of two nodes, and the second one."""
    short = Path("/tmp") / f"fgl-two-{os.getpid()}"  # Ray's sockets need a short path
    address = f"127.0.0.1:{free_port()}"
    nodes = [
        start(
            tmp_path,
            "--head",
            f"--port={address.rpartition(':')[2]}",
            "--include-dashboard=false",
            f"--temp-dir={short}",
        )
    ]
    try:
        wait_until(lambda: is_alive(address, 1), seconds=120)
        nodes.append(start(tmp_path, f"--address={address}"))
        wait_until(lambda: is_alive(address, 2), seconds=120)
        yield address, nodes[1]
    finally:
        for node in reversed(nodes):
            kill(node)
        shutil.rmtree(short, ignore_errors=True)


def command(address: str, folder: Path, rounds: int) -> subprocess.Popen[str]:
    """Start a run of 1,000 clients in two workers of a cluster."""
    options = {
        "synthetic.nodes": 20_000,
        "synthetic.blocks": 1000,
        "partition": "uniform",
        "hidden-channels": 8,
        "checkpoint-every": 1,
        "run-dir": folder,
    }
    sets = [
        word for key, value in options.items() for word in ("--set", f"{key}={value}")
    ]
    program = str(Path(sys.executable).with_name("flower-fgl"))
    return subprocess.Popen(
        [
            *(program, "run", "--method", "fedavg", "--clients", "1000", "--quiet"),
            *("--rounds", str(rounds), "--workers", "2", *sets),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "RAY_ADDRESS": address},
    )


def test_1000_clients_on_two_nodes_equal_one_process_and_outlive_a_node(
    cluster: tuple[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    address, second = cluster
    whole = simulate(
        "fedavg", clients=1000, rounds=6, run_dir=str(tmp_path / "whole"), **MANY
    )
    both = command(address, tmp_path / "both", 6)
    output, _ = both.communicate(timeout=200)
    assert both.returncode == 0, output
    assert comparable(Run.load(tmp_path / "both")) == comparable(whole)

    lost = command(address, tmp_path / "lost", 6)
    rows = tmp_path / "lost" / "rounds.jsonl"
    wait_until(
        lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 2, seconds=120
    )
    kill(second)
    output, _ = lost.communicate(timeout=200)
    assert lost.returncode == 1, output
    assert "worker 1 of 2 on " in output or "worker 2 of 2 on " in output
    assert "--resume" in output
    assert "Traceback" not in output
    run = resume(tmp_path / "lost")
    assert comparable(run) == comparable(whole)
