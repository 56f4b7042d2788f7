"""Contract of a method in Flower's simulation, which runs in Ray's processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import tomli_w

from flower_fgl.runs.files import flatten_config
from flower_fgl.runs.run import RunFolder
from flower_fgl.simulation.local import run_config_of, run_local
from flower_fgl.testing.case import Contract, MethodCase

__all__ = ["RayContract"]

SECONDS = 600
"""Limit of a run; it takes half a minute on an idle machine."""


class RayContract(Contract):
    """A run in Ray, half a minute. It needs about 2 GB of memory."""

    def test_ray_gives_the_numbers_of_the_local_engine(
        self, case: MethodCase, tmp_path: Path
    ) -> None:
        settings = case.settings()
        config = run_config_of(
            method=settings.pop("method"),
            dataset="synthetic",
            clients=settings.pop("clients"),
            seed=0,
            settings={**settings, "run_dir": str(tmp_path / "ray")},
        )
        file = tmp_path / "run.toml"
        file.write_text(tomli_w.dumps({"config": config}), encoding="utf-8")
        words = [sys.executable, "-m", "flower_fgl", "run", str(file)]
        done = subprocess.run(
            [*words, "--engine", "ray", "--quiet"],
            # a Ray cluster elsewhere has not this package
            env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        ray = RunFolder.load(tmp_path / "ray")
        assert ray.summary["engine"] == "ray"
        again = {k: v for k, v in flatten_config(ray.config) if k != "run-dir"}
        local = run_local({**again, "output-dir": str(tmp_path / "local")})
        assert _numbers(local) == _numbers(ray)


def _numbers(run: RunFolder) -> str:
    """Return what a run computed; two engines may differ in time and process only."""
    kept = ("round", "partition_id", "loss", "metrics", "replies", "status")
    rows = [*run.rounds, *run.clients]
    chosen = [{key: row[key] for key in kept if key in row} for row in rows]
    return json.dumps([chosen, run.summary["best"]], sort_keys=True)
