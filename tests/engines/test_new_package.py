"""The package of ``flower-fgl new``, installed as pip does, keeps the contract."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flower_fgl.cli.new import write_package

ROOT = Path(__file__).parents[2]


@pytest.mark.engines
@pytest.mark.xdist_group("processes")
@pytest.mark.timeout(900)
def test_a_new_package_passes_its_tests_where_it_is_installed(tmp_path: Path) -> None:
    write_package("my-method", tmp_path / "package")
    site = tmp_path / "site"
    # without network: the build backend is installed, and dependencies are left out
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)]
    run([*pip, *options, str(tmp_path / "package")], tmp_path)
    assert (site / "my_method" / "__init__.py").exists()
    # the tests alone, so that they find the installed package and no folder beside them
    tests = tmp_path / "package" / "tests"
    words = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(tests)]
    output = run(words, tmp_path, PYTHONPATH=f"{site}{os.pathsep}{ROOT}")
    assert re.search(r"TestRay::\S+\[my-method\] PASSED", output)
    assert re.search(r"TestContract::test_the_same_seed\S+ PASSED", output)
    assert " failed" not in output


def run(words: list[str], folder: Path, **variables: str) -> str:
    """Run a program; return what it printed."""
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
