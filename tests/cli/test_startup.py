"""Help, lists and argument errors load no tensor library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, json, sys

def report():
    heavy = ("torch", "torch_geometric", "ray", "matplotlib")
    print(json.dumps([name for name in heavy if name in sys.modules]))

atexit.register(report)
sys.argv = ["flower-fgl", *json.loads(sys.argv[1])]
from flower_fgl.cli.main import main
main()
"""
COMMANDS = (
    "run",
    "methods",
    "settings",
    "datasets",
    "partition",
    "export",
    "check-graph",
    "predict",
    "report",
    "embeddings",
    "compare",
    "reach",
)
LISTS = ("--help", "methods", "settings", "settings fedpg", "datasets")
USAGE_ERRORS = (
    "nosuch",
    "run --nosuch",
    "run --rounds x",
    "partition --nosuch",
    "export --nosuch",
    "export",
    "report",
)
USER_ERRORS = {
    "settings nosuch": 'Unknown method "nosuch"',
    "run --method nosuch": 'Unknown method "nosuch"',
    "run --dataset nosuch": "nosuch",
    "run --set nosuch=1": "nosuch",
    "run --set lr": "--set expects key=value",
    "run --set lr=x": "lr must be of type float",
    "run --set model=nosuch": 'Unknown model "nosuch"',
    "run --rounds 0": "rounds must be >= 1",
    "run --clients 0": "clients must be at least 1, got 0",
    "run --engine nosuch": "--engine",
    "run --case first": "--case",
    "run missing.toml": "missing.toml",
    "run garbled.toml": "garbled.toml is not valid TOML",
    "run unknown-setting.toml": "nosuch",
    "run unknown-value.toml": "nosuch",
    "run --resume nofolder": "nofolder",
    "partition --dataset nosuch": "nosuch",
    "partition --rule nosuch": "nosuch",
    "partition --clients 0": "--clients must be at least 1, got 0",
    "export out --dataset nosuch": "nosuch",
    "export out --set nosuch=1": "nosuch",
    "check-graph nofile.npz --set nosuch=1": "nosuch",
    "report nofolder": "nofolder",
    "report nofolder --client 0": "nofolder",
    "embeddings nofolder --out picture.png --client 0": "nofolder",
    "compare nofolder other": "nofolder",
    "reach 0.8 nofolder": "nofolder",
}


def start(arguments: str, folder: Path) -> tuple[int, list[str], str]:
    """Return the exit status, the heavy modules that were loaded, and the errors."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(arguments.split())],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("arguments", [*LISTS, *(f"{c} --help" for c in COMMANDS)])
def test_help_and_lists_load_no_tensor_library(arguments: str, tmp_path: Path) -> None:
    code, loaded, errors = start(arguments, tmp_path)
    assert (code, errors) == (0, "")
    assert not {"torch", "torch_geometric"} & {*loaded}


@pytest.mark.parametrize("arguments", USAGE_ERRORS)
def test_usage_errors_load_no_tensor_library(arguments: str, tmp_path: Path) -> None:
    code, loaded, errors = start(arguments, tmp_path)
    assert code == 2
    assert "Usage: flower-fgl" in errors
    assert not {"torch", "torch_geometric"} & {*loaded}


@pytest.mark.parametrize("arguments", USER_ERRORS)
def test_argument_errors_load_no_tensor_library(arguments: str, tmp_path: Path) -> None:
    (tmp_path / "garbled.toml").write_text("[config")
    (tmp_path / "unknown-setting.toml").write_text("[config]\nnosuch = 1\n")
    (tmp_path / "unknown-value.toml").write_text(
        '[[case]]\nname = "a"\nmodel = "nosuch"\n[grid]\nseed = [0, 1]\n'
    )
    code, loaded, errors = start(arguments, tmp_path)
    assert code == 1
    assert errors.startswith("Error: ")
    assert USER_ERRORS[arguments] in errors
    assert not {"torch", "torch_geometric"} & {*loaded}
