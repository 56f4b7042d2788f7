"""Joining a Ray cluster that was started before."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flower_fgl import Run, simulate
from tests.engines.test_run import environment, flower_fgl, numbers, run_folder
from tests.support.flower_deployment import family_of, free_port
from tests.support.short_runs import SMALL

pytestmark = pytest.mark.xdist_group("processes")

RAY = ["--engine", "ray"]


@contextlib.contextmanager
def ray_head() -> Iterator[dict[str, str]]:
    """Start the head of a Ray cluster; give the variables that lead to it."""
    place = Path(
        tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    )  # sockets have short paths
    port = free_port()
    told = {"RAY_TMPDIR": str(place), "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [
            str(Path(sys.executable).parent / "ray"), "start", "--head", "--block",
            "--port", str(port), "--node-ip-address", "127.0.0.1", "--num-cpus", "2",
            "--include-dashboard", "false", "--temp-dir", str(place),
            "--object-store-memory", "200000000",
        ],
        env=environment(**told),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + 90
        while time.monotonic() < end:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=1),
            ):
                break
            time.sleep(0.2)
        yield {**told, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    finally:
        for member in family_of(process):
            with contextlib.suppress(psutil.Error):
                member.kill()
        process.wait(timeout=20)
        shutil.rmtree(place, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_joins_a_ray_cluster_and_leaves_it_alive(tmp_path: Path) -> None:
    expected = simulate("fedavg", clients=3, output_dir=str(tmp_path), **SMALL)
    config = str(expected.path / "config.toml")
    with ray_head() as cluster:
        refused = flower_fgl("run", config, *RAY, "--workers", "2", **cluster)
        assert refused.returncode == 1
        assert "RAY_ADDRESS names a Ray cluster" in refused.stdout + refused.stderr
        done = flower_fgl("run", config, *RAY, timeout=300, **cluster)
        assert done.returncode == 0, done.stdout + done.stderr
        run = Run.load(run_folder(done.stdout))
        local = flower_fgl("run", config, "--workers", "2", timeout=300, **cluster)
        assert local.returncode == 0, local.stdout + local.stderr
        _, port = cluster["RAY_ADDRESS"].split(":")
        socket.create_connection(("127.0.0.1", int(port)), timeout=5).close()
    assert run.summary["engine"] == "ray"
    assert numbers(run) == numbers(expected)
